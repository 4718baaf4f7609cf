"""A bucket that follows another one, in one direction or in both.

documents      the keys under which the state is stored in the target
target         the bucket as a target: writing with metadata, conflicts, repairs
replicate      `upper replicate` from start to stop: one direction or two, pause, status
"""
