"""The lake: three Delta tables that follow a bucket, as a target of the pipeline.

schema, position        the columns, the layout, and the position of a table
store                   where the files are: a directory or an object store
replay                  what rows mean: from changes to live keys; pure
files, tasks, rewrite   what workers do
tables, lake            commits, the lock, and the repair after a crash
sync, follow            the rounds, and the process around them
latest, maintenance     refreshing `latest`; merging, trimming, vacuuming
maintainer, erase       both beside a sync; erasing a key
verify, query, report   comparing with the bucket, SQL, and a summary
"""
