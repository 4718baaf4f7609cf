"""Rules: pure decisions and state machines about histories. No bytes, no sockets, no clocks.

A machine is a transition table and a small class that turns inputs into effects, which are values: a driver
performs them, a test compares them.

- `resume`: whether a consumer may resume at its position, or where it has to roll back to.
- `producing`: what forms a snapshot, when it may be sent, how a partition is handed over.
- `following`: a consumer's position, what it may claim, how it rolls back; `trail`: the ends that it stored.
- `window`: how many bytes may be in flight.
- `partition_state`: the states of a copy, and which of them accept requests.
"""
