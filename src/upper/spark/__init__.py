"""The pipeline: Spark reads the changes of a bucket. Nothing here is imported by the server or the client."""
