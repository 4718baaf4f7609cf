"""Key-value: the memcached binary protocol, and what Couchbase added to it.

All commands share two messages, `Request` and `Response`, which keep their extras as bytes; the rows name the
fields in them and declare the sizes of requests. Responses are accepted with any extras: a newer server may
send more, and a status other than OK usually has none.

The one exception is 0x48, the request for the high seqno of each partition: streams use it too, so it
has messages of its own, in every dialect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from upper.model.messages import Refusal, Request, Response, SeqnosAnswer, SeqnosRequest
from upper.wire.codes import STATES, Opcode, Side
from upper.wire.content import NOTHING, Content, Many, may, must
from upper.wire.extras import (
    COUNT,
    EXPIRATION,
    FLAGS,
    LOCK_TIME,
    META,
    PLACE,
    STATE,
    STORE,
    SUBDOC_LIST_SIZES,
    SUBDOC_PATH_SIZES,
    TOKEN,
    WITH_META_SIZES,
)
from upper.wire.packet import EMPTY, RESPONSE, Layout, u8, u32, u64
from upper.wire.table import Dialect, Row

KEY, VALUE = must("key"), may("value")


def command(
    opcode: Opcode,
    *,
    extras: Iterable[Layout] = (EMPTY,),
    key: Content = NOTHING,
    value: Content = NOTHING,
    answer: Iterable[Layout] = (),
) -> Iterator[Row]:
    """The two rows of one command."""
    first, *others = extras
    name = opcode.name.lower()
    yield Row(
        name=name,
        message=Request,
        opcode=opcode,
        by=Side.CLIENT,
        extras=first,
        accepts=tuple(others),
        raw=True,
        key=key,
        value=value,
    )
    yield Row(
        name=f"{name}_response",
        message=Response,
        opcode=opcode,
        magic=RESPONSE,
        by=Side.SERVER,
        accepts=tuple(answer),
        raw=True,
        any_extras=True,
        key=may("key"),
        value=VALUE,
    )


def commands(*opcodes: Opcode, **shape: object) -> Iterator[Row]:
    """Commands of the same shape, such as a command and its quiet form."""
    for opcode in opcodes:
        yield from command(opcode, **shape)  # type: ignore[arg-type]


O = Opcode  # noqa: E741  a table reads better with short names
COMMANDS: tuple[Row, ...] = (
    *commands(O.GET, O.GETQ, O.GETK, O.GETKQ, O.GET_REPLICA, key=KEY, answer=(FLAGS,)),
    *commands(
        O.SET,
        O.SETQ,
        O.ADD,
        O.ADDQ,
        O.REPLACE,
        O.REPLACEQ,
        extras=(STORE,),
        key=KEY,
        value=VALUE,
        answer=(TOKEN,),
    ),
    *commands(O.APPEND, O.APPENDQ, O.PREPEND, O.PREPENDQ, key=KEY, value=VALUE, answer=(TOKEN,)),
    *commands(O.DELETE, O.DELETEQ, key=KEY, answer=(TOKEN,)),
    *commands(
        O.INCREMENT, O.INCREMENTQ, O.DECREMENT, O.DECREMENTQ, extras=(COUNT,), key=KEY, answer=(TOKEN,)
    ),
    *commands(O.TOUCH, extras=(EXPIRATION,), key=KEY, answer=(FLAGS, TOKEN)),
    *commands(O.GAT, O.GATQ, O.GATK, O.GATKQ, extras=(EXPIRATION,), key=KEY, answer=(FLAGS,)),
    *commands(O.FLUSH, O.FLUSHQ, extras=(EMPTY, EXPIRATION)),
    *commands(O.NOOP, O.VERSION, O.QUIT, O.QUITQ),
    *commands(O.STAT, key=may("key"), value=VALUE),
    *commands(O.VERBOSITY, extras=(Layout(u32("level")),)),
    *commands(O.HELLO, key=may("key"), value=VALUE),
    *commands(O.SASL_LIST_MECHS),
    *commands(O.SASL_AUTH, O.SASL_STEP, key=KEY, value=VALUE),
    *commands(O.SELECT_BUCKET, key=KEY),
    # Older clients send a bucket's name with it.
    *commands(
        O.GET_CLUSTER_CONFIG,
        extras=(EMPTY, Layout(u64("epoch"), u64("revision"))),
        key=may("key"),
        value=VALUE,
    ),
    *commands(O.GET_ERROR_MAP, value=VALUE),
    *commands(O.GET_LOCKED, extras=(EMPTY, LOCK_TIME), key=KEY, answer=(FLAGS,)),
    *commands(O.UNLOCK_KEY, key=KEY),
    *commands(
        O.GET_META,
        O.GETQ_META,
        extras=(EMPTY, Layout(u8("version"))),
        key=KEY,
        answer=(META, META.then(u8("data_type"))),
    ),
    *commands(
        O.SET_WITH_META,
        O.SETQ_WITH_META,
        O.ADD_WITH_META,
        O.ADDQ_WITH_META,
        O.DELETE_WITH_META,
        O.DELETEQ_WITH_META,
        extras=WITH_META_SIZES,
        key=KEY,
        value=VALUE,
        answer=(TOKEN,),
    ),
    *commands(
        O.SUBDOC_GET,
        O.SUBDOC_EXISTS,
        O.SUBDOC_DICT_ADD,
        O.SUBDOC_DICT_UPSERT,
        O.SUBDOC_DELETE,
        O.SUBDOC_REPLACE,
        O.SUBDOC_ARRAY_PUSH_LAST,
        O.SUBDOC_ARRAY_PUSH_FIRST,
        O.SUBDOC_ARRAY_INSERT,
        O.SUBDOC_ARRAY_ADD_UNIQUE,
        O.SUBDOC_COUNTER,
        O.SUBDOC_GET_COUNT,
        extras=SUBDOC_PATH_SIZES,
        key=KEY,
        value=VALUE,
        answer=(TOKEN,),
    ),
    *commands(
        O.SUBDOC_MULTI_LOOKUP,
        O.SUBDOC_MULTI_MUTATION,
        extras=SUBDOC_LIST_SIZES,
        key=KEY,
        value=must("value"),
        answer=(TOKEN,),
    ),
    *commands(O.GET_COLLECTIONS_MANIFEST, O.GET_COLLECTION_ID, key=may("key"), value=VALUE),
    *commands(O.OBSERVE, O.OBSERVE_SEQNO, value=must("value")),
    *commands(O.GET_RANDOM_KEY, extras=(EMPTY, Layout(u32("collection"))), answer=(FLAGS,)),
    *commands(
        O.SET_VBUCKET_STATE, extras=(Layout(u8("state", STATES)), Layout(u32("state", STATES))), value=VALUE
    ),
    *commands(O.GET_VBUCKET_STATE),
    *commands(O.DELETE_VBUCKET, value=VALUE),
)

SEQNOS = Many("seqnos", PLACE, lambda *pair: pair, lambda pair: pair)
REQUIRED_SEQNOS = Many("seqnos", PLACE, lambda *pair: pair, lambda pair: pair, required=True)


def refusals(*opcodes: int, by: Side | None = Side.SERVER) -> tuple[Row, ...]:
    """The rows that refuse requests with these opcodes: a status, and a sentence as value."""
    return tuple(
        Row(
            name="refusal",
            message=Refusal,
            opcode=opcode,
            magic=RESPONSE,
            by=by,
            failed=True,
            value=may("value"),
        )
        for opcode in opcodes
    )


KV = Dialect(
    "kv",
    {
        SeqnosRequest: [
            Row(name="get_all_vb_seqnos", message=SeqnosRequest, opcode=0x48, by=Side.CLIENT, extras=extras)
            for extras in (EMPTY, STATE, STATE.then(u32("collection")))
        ],
        SeqnosAnswer: Row(
            name="get_all_vb_seqnos_response",
            message=SeqnosAnswer,
            opcode=0x48,
            magic=RESPONSE,
            by=Side.SERVER,
            status=0,
            value=SEQNOS,
        ),
        Refusal: refusals(0x48),
        Request: [row for row in COMMANDS if row.message is Request],
        Response: [row for row in COMMANDS if row.message is Response],
    },
    fallback=Row(
        name="response",
        message=Response,
        opcode=0,
        magic=RESPONSE,
        raw=True,
        any_extras=True,
        key=may("key"),
        value=VALUE,
    ),
)


class RequestShape(NamedTuple):
    """The parts of a request: sizes of extras; whether key and value must (True) or may (None) be there."""

    extras: tuple[int, ...]
    key: bool | None
    value: bool | None


def shape(opcode: int) -> RequestShape:
    """The parts of a key-value request, as its rows declare them."""
    rows = [row for kind in (Request, SeqnosRequest) for row in KV.rows[kind] if row.opcode == opcode]
    sizes = tuple(sorted({layout.size for row in rows for layout in row.layouts}))
    return RequestShape(sizes, rows[0].key.presence, rows[0].value.presence)
