"""The demonstration behind `make demo`: a shop, a cluster, a lake, and nodes that fail."""
