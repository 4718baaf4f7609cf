"""One node: it answers key-value requests and feeds change streams, on one port."""
