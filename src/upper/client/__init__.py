"""The consumer library: follow a bucket, leave it, and take it up again where you left.

url, routes            where the nodes are, and which of them holds a partition
events, positions      what a follower sees, and where it stands
checkpoint             positions at rest
place, follow          the machine: handshakes, rollbacks, reconnects; no socket, no clock
link, login, commands  key-value: packets, signing in, what each call asks
bulk                   the same changes as columns
blocking, asynchronous the two drivers, and the bucket that each gives to its callers
"""
