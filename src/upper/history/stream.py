"""A stream of changes: the producer's side, the consumer's side, and the window between them.

Each is a table of moves and a small class that turns what happened into effects, which are values: a
driver carries them out, a test compares them. No bytes and no sockets; records pass by in the driver.

- `producing`: what forms a snapshot, when it may leave, how a partition is handed over.
- `following`: where a consumer stands, what it may claim, how it goes back.
- `window`: how much may be under way.
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
