"""Items in files: export from a bucket or a lake, import into one; streaming, without Spark.

items     the live items of a bucket or of a commit of a lake, in tables of bounded size
formats   JSON lines, CSV and Parquet, written and read
imports   reading rows, rejecting bad ones, writing the others to a bucket
lake_import   committing them to a lake of their own history
"""
