"""One node: it answers key-value requests and sends change streams, on one port."""
