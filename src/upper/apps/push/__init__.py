"""External targets: a bucket, a search index or a topic that follows a bucket or a lake.

state          the position of a target, what may have been written, and the keys of recent changes: pure
tasks          what a worker does for some partitions: read, record, write, commit
rounds         one round of the driver: get the states, plan, distribute tasks
follow         rounds until stopped, with pause, progress and metrics
lake           a lake as the source
kafka, opensearch    the targets; a bucket as a target is in `upper.apps.replicate`
"""
