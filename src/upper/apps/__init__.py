"""Uses of a bucket that rest on the client alone."""
