"""The demonstration behind `make demo`: a shop, a node, a lake, and a plug that is pulled."""
