"""Rules: pure decisions and state machines about histories. No bytes, no sockets, no clocks."""
