"""The lake: three Delta tables that always tell the truth about a bucket.

schema, stand     what is in the tables, and where a table stands
replay, plan      what rows mean, and what a round should do: pure
files, work       what workers do
tables, home      commits, the lock, and the repair after a crash
sync, care        the rounds; merging, trimming and sweeping
verify, query     is it true, and what is in it
"""
