"""The pipeline: many workers read a bucket into a target, and the target follows its rollbacks.

changes        a change as a row: operation names, signed ids, the row of a rollback
source         the state of a bucket, and reading a part of its history; can be pickled
plan           which partitions go back, what is read, and which worker reads it: pure
target         what a target implements, and one round: look, plan, apply, commit

Nothing here imports Spark or the lake. Spark is one task runner, the lake is one target.
"""
