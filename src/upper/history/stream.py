"""A stream of changes: the producer's side, the consumer's side, and the window between them.

Each is a transition table and a small class that turns inputs into effects, which are values: a driver
performs them, a test compares them. No bytes and no sockets; only drivers handle records.

- `producing`: what forms a snapshot, when it may be sent, how a partition is handed over.
- `following`: a consumer's position, what it may claim, how it rolls back.
- `window`: how much may be in flight.
"""

from upper.history.following import ConsumerStream, Following
from upper.history.producing import ProducerStream, Sending
from upper.history.trail import Trail
from upper.history.window import Acknowledgements, FlowWindow

__all__ = [
    "Acknowledgements",
    "ConsumerStream",
    "FlowWindow",
    "Following",
    "ProducerStream",
    "Sending",
    "Trail",
]
