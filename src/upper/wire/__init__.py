"""Bytes: packets to messages and back. No sockets, no rules.

`packet` holds the header and the layouts, `table` the rows and dialects made of them, `kv`, `upr`,
`upr0`, `tap` and `dcp` one table each, and `session` one connection without its socket.
"""
