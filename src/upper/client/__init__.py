"""The consumer library: key-value calls, and change streams that resume after any interruption.

    url, routes                        addresses and credentials, and the cluster map
    events, positions, position_codec  what a consumer receives, and its positions
    checkpoint                         saved positions
    plan                               from the options of `changes` to a start and an end in each partition
    partition_consumer, follow, tap    the protocol of a consumer: no socket, no clock
    decode, bulk                       bytes into events, or into columns
    reader                             what the application has received, processed and saved
    link, login, refusals              responses of key-value calls, logging in, and errors
    calls, routing, commands           what each call sends and returns, described once
    operations                         the calls as methods of both buckets
    sockets, feed, bucket              the blocking driver
    async_connection, async_feed, asynchronous    the asyncio driver
    scan                               listing keys
    rules                              the resume decision, for programs that plan ahead

Start with partition_consumer.py.
"""
