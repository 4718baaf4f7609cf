"""The extras of key-value packets: layouts that the rows of `kv`, the server and the client share.

This module imports neither messages nor tables, so a client that only reads and writes keys starts without
them.
"""

from __future__ import annotations

from upper.wire.codes import WANTED_STATES
from upper.wire.packet import Layout, u8, u16, u32, u64

# The meaning of some numbers in them.
MONTH = 30 * 86400  # seconds; expirations up to here count from now, as in memcached, larger ones from 1970
NEVER_CREATE = 0xFFFFFFFF  # as the expiration of a counter: fail where there is none yet
DEFAULT_LOCK = 15  # seconds, where a request states none
LOCKED = 2**64 - 1  # the CAS that readers see of a locked item: no write can match it

FLAGS = Layout(u32("flags"))
STORE = Layout(u32("flags"), u32("expiration"))
COUNT = Layout(u64("delta"), u64("initial"), u32("expiration"))
EXPIRATION = Layout(u32("expiration"))
LOCK_TIME = Layout(u32("lock_time"))
OPTIONS = Layout(u32("options"))
STATE = Layout(u32("state", WANTED_STATES))
TOKEN = Layout(u64("branch"), u64("seqno"))  # the mutation token, where HELLO asked for it
WITH_META = Layout(u32("flags"), u32("expiration"), u64("revision"), u64("cas"))
WITH_META_SIZES = (
    WITH_META,
    WITH_META.then(u16("meta_size")),
    WITH_META.then(u32("options")),
    WITH_META.then(u32("options"), u16("meta_size")),
)
META = Layout(u32("deleted"), u32("flags"), u32("expiration"), u64("revision"))
# Sub-documents: the length of a path and its flags; the parts of a list of paths; the outcome of one.
SUBDOC_PATH = Layout(u16("path_size"), u8("path_flags"))
SUBDOC_PATH_SIZES = (
    SUBDOC_PATH,
    SUBDOC_PATH.then(u8("document_flags")),
    SUBDOC_PATH.then(u32("expiration")),
    SUBDOC_PATH.then(u32("expiration"), u8("document_flags")),
)
SUBDOC_LIST_SIZES = (
    Layout(),
    Layout(u8("document_flags")),
    EXPIRATION,
    EXPIRATION.then(u8("document_flags")),
)
SUBDOC_READ = Layout(u8("opcode"), u8("flags"), u16("path_size"))
SUBDOC_EDIT = SUBDOC_READ.then(u32("value_size"))
SUBDOC_RESULT = Layout(u16("status"), u32("size"))
PLACE = Layout(u16("partition"), u64("seqno"))
# The response to OBSERVE_SEQNO. Format 1, where the requested branch is not the newest, adds PARTED: that
# branch, and the last seqno that it shares with the newest.
OBSERVED = Layout(u8("format"), u16("partition"), u64("branch"), u64("persisted"), u64("current"))
PARTED = Layout(u64("branch"), u64("seqno"))
