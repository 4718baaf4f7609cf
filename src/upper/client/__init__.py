"""The consumer library: follow a bucket, leave it, and take it up again where you left.

    url, routes              where the nodes are, and which of them holds a partition
    events, positions        what a follower sees, and where it stands
    checkpoint               positions at rest
    plan                     from what a caller wants to where each partition begins and ends
    lane, follow, tap        the machine: handshakes, rollbacks, reconnects; no socket, no clock
    decode, bulk             bytes into events, or into columns
    reader                   what the application has been given, is through with, and has saved
    link, login              packets of key-value calls, and signing in
    calls, commands          what each call asks, and makes of the answers
    sockets, feed, bucket    the blocking driver
    pipes, async_feed, asynchronous    the other one
    load                     a load generator
    rules                    the resume decision, for those who plan ahead

Read lane.py first: it is what the rest carries.
"""
