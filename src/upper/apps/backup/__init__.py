"""A lake as an incremental backup of its bucket.

commits    the commits of a lake, and which of them can be rebuilt
state      the live keys at a commit, read by workers
restore    bringing a bucket to a commit
target     the bucket that is restored, as the workers see it
audit      checking the files and tables of a lake without the node
retention  removing rows that only older commits need
"""
