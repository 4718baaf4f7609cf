"""Targets outside: a bucket, a search index, a topic that follow a bucket or a lake.

state          where a target stands, what may have been written, and which keys it took: pure
tasks          what a worker does for some partitions: read, record, write, commit
rounds         one round of the driver: look, plan, give out tasks
follow         rounds until stopped, with pause, progress and metrics
lake           a lake as the source
kafka, opensearch    the targets; a bucket as a target is in `upper.apps.replicate`
"""
