"""The exception for a response that refuses a request.

The node's own sentence is used where it sent one; about a key, the sentence here, which names the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from upper.client.link import Answer
from upper.errors import NotMyPartition, Refused
from upper.wire.codes import Status

CLASSES: Mapping[int, type[Refused]] = {
    kind.status: kind for kind in Refused.__subclasses__() if kind.status != Refused.status
}
OF_KEYS: Mapping[int, str] = {
    Status.KEY_NOT_FOUND: "{key} does not exist",
    Status.KEY_EXISTS: "{key} exists, or has changed since it was read; read it again and retry",
    Status.NOT_STORED: "{key} was not stored: it must exist for this call, or must not; read it first",
    Status.NOT_A_NUMBER: "the value of {key} is not a decimal number below 2^64; set it first",
    Status.LOCKED: "{key} is locked by another reader; try again when its lock has ended",
}
SENTENCES: Mapping[int, str] = {
    **{status: sentence.format(key="the key") for status, sentence in OF_KEYS.items()},
    Status.VALUE_TOO_LARGE: "the value is larger than the node accepts; split it",
    Status.AUTHENTICATION_FAILED: "the node rejected the user name or the password",
    Status.NO_ACCESS: "the user lacks the role for this; log in as a user who has it",
    Status.OUT_OF_MEMORY: "the node is out of memory for new data; raise its quota or delete something",
    Status.UNKNOWN_COMMAND: "the node does not support this command; it may be of another kind or version",
    Status.BUSY: "the node is busy; try again later",
    Status.TEMPORARY_FAILURE: "the node cannot do this at the moment; try again later",
    Status.SYNC_WRITE_AMBIGUOUS: "it is not known whether the change is stored; read the key, then decide",
}
LONGEST_KEY = 80  # characters of a key that an error quotes


def no_active_copy(partition: int, cluster_map: bytes = b"", *, why: str = "") -> NotMyPartition:
    """`why`: what is wrong with the node that should hold it."""
    reason = f" that answers ({why.partition(';')[0]})" if why else ""
    return NotMyPartition(
        f"partition {partition} has no active copy{reason}; "
        "promote a replica of it, or wait until it is back",
        partition=partition,
        cluster_map=cluster_map,
    )


def refusal(answer: Answer, *, partition: int = 0, key: bytes | None = None) -> Refused:
    """The exception for a response with a status other than OK."""
    if answer.status == Status.NOT_MY_VBUCKET:
        return no_active_copy(partition, answer.value)
    text = answer.value.decode(errors="replace")
    if key is not None and answer.status in OF_KEYS:
        sentence = OF_KEYS[answer.status].format(key=f"key {quoted(key)}")
    else:
        # Other servers send "Not found" and the like; a sentence from here also has the remedy.
        sentence = text if " " in text and len(text) > 24 else SENTENCES.get(answer.status, text)
    make: Callable[[str], Refused] = CLASSES.get(answer.status, Refused)
    error = make(sentence or f"the node refused with status 0x{answer.status:02x}")
    error.status = answer.status
    error.key = key
    return error


def quoted(key: bytes) -> str:
    try:
        text = repr(key.decode())
    except UnicodeDecodeError:
        text = repr(key)
    return text if len(text) <= LONGEST_KEY else text[: LONGEST_KEY - 1] + "…"
