# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
"""The kernel, compiled: the same functions as `upper.kernel.plain`, with the same results and errors.

`plain` documents what each one does. Rules of this file: a pointer moves only after the length was compared
with what is left; every buffer taken is released in a `finally`; allocation sizes come from counted bytes, never
from a field; `packets` makes the error messages.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_DelItem, PyDict_GetItemWithError, PyDict_SetItem
from cpython.exc cimport PyErr_Clear
from cpython.list cimport PyList_Append, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport Py_TYPE, PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.math cimport NAN, isnan
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

import os
import time

from upper.kernel import arrow, packets
from upper.record import layout
from upper.wire import extras

cdef extern from *:
    """
    #include <stdint.h>
    #ifndef UPPER_SOURCES
    #define UPPER_SOURCES ""
    #endif
    /* Big endian, byte by byte: correct on every machine, and compiled to one instruction where it has one. */
    static inline uint16_t get16(const uint8_t *p) { return (uint16_t)(p[0] << 8 | p[1]); }
    static inline uint32_t get32(const uint8_t *p) {
        return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    }
    static inline uint64_t get64(const uint8_t *p) { return (uint64_t)get32(p) << 32 | get32(p + 4); }
    static inline void put16(uint8_t *p, uint16_t v) { p[0] = v >> 8; p[1] = v; }
    static inline void put32(uint8_t *p, uint32_t v) { p[0] = v >> 24; p[1] = v >> 16; p[2] = v >> 8; p[3] = v; }
    static inline void put64(uint8_t *p, uint64_t v) { put32(p, v >> 32); put32(p + 4, (uint32_t)v); }
    #if defined(__GNUC__)
    #define fetch_soon(p) __builtin_prefetch(p)
    #define fetch_to_write(p) __builtin_prefetch(p, 1)
    #else
    #define fetch_soon(p) ((void)0)
    #define fetch_to_write(p) ((void)0)
    #endif
    """
    const char *UPPER_SOURCES
    uint16_t get16(const uint8_t *p) nogil
    uint32_t get32(const uint8_t *p) nogil
    uint64_t get64(const uint8_t *p) nogil
    void put16(uint8_t *p, uint16_t v) nogil
    void put32(uint8_t *p, uint32_t v) nogil
    void put64(uint8_t *p, uint64_t v) nogil
    void fetch_soon(const void *p) nogil

NAME = "compiled"
SOURCES = UPPER_SOURCES.decode()  # `choice.digest` of the sources that it was built from

# Offsets, opcodes and sizes, from a header that the other C code uses too.
cdef extern from "_layout.h":
    ctypedef struct layout_row:
        const char *name
        long number
    const layout_row layout_rows[1]
    enum:
        LAYOUT_COUNT
    enum:
        HEADER_SIZE, AT_OPCODE, AT_KEY_LENGTH, AT_EXTRAS_LENGTH, AT_DATA_TYPE, AT_PARTITION, AT_BODY, AT_OPAQUE
        AT_CAS, AT_SEQNO, AT_REVISION, AT_FLAGS, AT_EXPIRATION, AT_LOCK_TIME, REQUEST, RESPONSE, MUTATION, DELETION
        EXPIRATION, FLUSH, SNAPSHOT_START, SNAPSHOT_END, MUTATION_EXTRAS, DELETION_EXTRAS, MUTATION_HEAD
        DELETION_HEAD, MAX_KEY, SEQNO_SHIFT, LENGTH_BITS, BETWEEN, INSIDE, AT_DCP_META, DCP_MUTATION_EXTRAS
        DCP_GONE_EXTRAS, DCP_DELETION_EXTRAS, DCP_EXPIRATION_EXTRAS, DELETE_TIMES, EXPIRATIONS, DATA_TYPES
        NANOSECONDS, DCP_MARKER, DCP_MARKER_EXTRAS, DCP_IN_MEMORY, SEQNO_ADVANCED, ADVANCED_EXTRAS, TAP_MUTATION
        TAP_DELETION, TAP_MUTATION_EXTRAS, TAP_DELETION_EXTRAS, AT_TAP_MARKS, AT_TAP_HOPS, TAP_HOPS, TAP_ACK
        TAP_NO_VALUE, ALL_OPERATIONS, GET, SET, DELETE, GETQ, NOOP, GETK, GETKQ, SETQ, DELETEQ, SET_WITH_META, ADD
        REPLACE, INCREMENT, DECREMENT, APPEND, PREPEND, ADDQ, REPLACEQ, INCREMENTQ, DECREMENTQ, APPENDQ, PREPENDQ
        TOUCH, GAT, GATQ, GATK, GATKQ, GET_LOCKED, UNLOCK_KEY, STORE_EXTRAS, COUNT_EXTRAS, TOUCH_EXTRAS
        TOKEN_EXTRAS, COPY_EXTRAS, FLAGS_EXTRAS, MONTH, DEFAULT_LOCK

cdef enum:
    AHEAD = 24  # records between the one that is processed and the one that is prefetched

LAYOUT = {layout_rows[row].name.decode(): layout_rows[row].number for row in range(LAYOUT_COUNT)}

cdef uint64_t MAX_SEQNO = layout.MAX_SEQNO
cdef uint64_t MAX_CAS = layout.MAX_CAS
cdef Py_ssize_t MAX_BODY = layout.MAX_BODY
cdef Py_ssize_t MAX_RANGE = packets.MAX_RANGE
cdef bytes NOT_FOUND = packets.NOT_FOUND
cdef uint32_t NEVER_CREATE = extras.NEVER_CREATE


cdef inline const uint8_t *chars(object record) noexcept:
    return <const uint8_t *> PyBytes_AS_STRING(record)


cdef inline uint8_t *fresh(object blank) noexcept:
    """A pointer to the bytes of a new object, which no other code has a reference to."""
    return <uint8_t *> PyBytes_AS_STRING(blank)


cdef int within(Py_ssize_t start, Py_ssize_t end, Py_ssize_t size) except -1:
    if start < 0 or end < start or end > size:
        packets.within(start, end, size)
    return 0


cdef int numbers(object slots, Py_buffer *view, int flags) except -1:
    packets.numbers(slots)
    return PyObject_GetBuffer(slots, view, flags)


# ── From a socket ─────────────────────────────────────────────────────────────────────────────────

cdef Py_ssize_t packet(
    const uint8_t *data, Py_ssize_t at, Py_ssize_t end, Py_ssize_t limit, bint dcp, int *opcode
) except -1:
    """The end of the packet at `at`, or 0 if it is incomplete; UPR's opcode, or -1 if it is not a change."""
    cdef const uint8_t *p = data + at
    cdef Py_ssize_t total
    cdef int key, extras
    if at == end:
        return 0
    if p[0] != REQUEST and p[0] != RESPONSE:
        raise packets.bad_magic(p[0], at)
    if end - at < HEADER_SIZE:
        return 0
    key, extras, total, opcode[0] = get16(p + AT_KEY_LENGTH), p[AT_EXTRAS_LENGTH], get32(p + AT_BODY), p[AT_OPCODE] - dcp
    if extras + key > total:
        raise packets.bad_length(extras, key, total, at)
    if total > limit:
        raise packets.too_large(total, limit, at)
    if p[0] != REQUEST or opcode[0] < MUTATION or opcode[0] > EXPIRATION:
        opcode[0] = -1
    elif dcp:
        if extras != DCP_MUTATION_EXTRAS if opcode[0] == MUTATION else (
            extras != DCP_GONE_EXTRAS
            and extras != (DCP_DELETION_EXTRAS if opcode[0] == DELETION else DCP_EXPIRATION_EXTRAS)
        ):
            raise packets.bad_change(p[AT_OPCODE], extras, key, total, at)
    elif extras != MUTATION_EXTRAS if p[AT_OPCODE] == MUTATION else (extras != DELETION_EXTRAS or total != DELETION_EXTRAS + key):
        raise packets.bad_change(p[AT_OPCODE], extras, key, total, at)
    return at + HEADER_SIZE + total if total <= end - at - HEADER_SIZE else 0


cdef inline Py_ssize_t value_length(const uint8_t *p, const uint8_t *past, const uint8_t *value, bint dcp) noexcept:
    """The length of the value of a mutation. In DCP metadata may follow it; negative if the packet is malformed."""
    return past - value - (get16(p + AT_DCP_META) if dcp else 0)


cdef struct ColumnSizes:  # how many changes there are, and the bytes of their columns
    Py_ssize_t rows, keys, values, nulls, expirations, partitions
    bint malformed


cdef inline void measure(ColumnSizes *sizes, const uint8_t *p, const uint8_t *past, int opcode, bint dcp) noexcept:
    """Add one change."""
    cdef Py_ssize_t klen = get16(p + AT_KEY_LENGTH), vlen
    sizes.rows += 1
    sizes.keys += klen
    sizes.partitions = max(sizes.partitions, get16(p + AT_PARTITION) + 1)
    if opcode == MUTATION:
        vlen = value_length(p, past, p + HEADER_SIZE + p[AT_EXTRAS_LENGTH] + klen, dcp)
        sizes.malformed |= vlen < 0
        sizes.values += vlen
    else:
        sizes.nulls += 1
        sizes.expirations += opcode == EXPIRATION


cdef class Scanned:
    """`plain_scan.Scanned`. It refers to the bytes that were scanned, which cannot change."""
    cdef bytes data
    cdef Py_ssize_t start, end
    cdef bint dcp
    cdef ColumnSizes sizes

    cdef bint holds(self, data, Py_ssize_t start, Py_ssize_t end, Py_ssize_t count, bint dcp) noexcept:
        """Whether it describes this range, and every change in it is sound."""
        return (
            self.data is data and data is not None and self.start == start and self.end == end and self.dcp == dcp
            and not self.sizes.malformed and self.sizes.partitions <= count
        )


def scan(data, Py_ssize_t start, seqnos, Py_ssize_t max_body=layout.MAX_BODY, *, bint dcp=False, Scanned scanned=None):
    cdef Py_buffer view, slots
    cdef const uint8_t *base
    cdef uint64_t *last
    cdef Py_ssize_t at, past, count
    cdef int opcode = 0
    cdef uint32_t opaque
    cdef ColumnSizes found
    cdef list others = []
    memset(&found, 0, sizeof(found))
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        within(start, view.len, view.len)
        numbers(seqnos, &slots, PyBUF_WRITABLE)
        try:
            base, last, count = <const uint8_t *> view.buf, <uint64_t *> slots.buf, slots.len // 8
            at = start
            while True:
                past = packet(base, at, view.len, max_body, dcp, &opcode)
                if past == 0:
                    break
                if opcode < 0:
                    others.append(at)
                else:
                    measure(&found, base + at, base + past, opcode, dcp)
                    opaque = get32(base + at + AT_OPAQUE)
                    if opaque < count:
                        last[opaque] = get64(base + at + AT_SEQNO)
                at = past
        finally:
            PyBuffer_Release(&slots)
    finally:
        PyBuffer_Release(&view)
    if scanned is not None:
        scanned.data = data if type(data) is bytes else None
        scanned.start, scanned.end, scanned.dcp, scanned.sizes = start, at, dcp, found
    return at, found.rows, others


def records(data, Py_ssize_t start, Py_ssize_t end, *, bint dcp=False):
    cdef Py_buffer view
    cdef const uint8_t *base
    cdef const uint8_t *key
    cdef uint8_t *to
    cdef Py_ssize_t at = start, past, klen, body
    cdef int opcode = 0, extras
    cdef list found = []
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        within(start, end, view.len)
        base = <const uint8_t *> view.buf
        while True:
            past = packet(base, at, end, MAX_RANGE, dcp, &opcode)
            if past == 0:
                break
            if opcode < 0:
                at = past
                continue
            klen = get16(base + at + AT_KEY_LENGTH)
            key = base + at + HEADER_SIZE + base[at + AT_EXTRAS_LENGTH]
            extras = MUTATION_EXTRAS if opcode == MUTATION else DELETION_EXTRAS
            body = base + past - key  # key and value
            if dcp:
                body = body - get16(base + at + AT_DCP_META) if opcode == MUTATION else klen
                if body < klen:
                    raise packets.truncated(at)
            record = PyBytes_FromStringAndSize(NULL, HEADER_SIZE + extras + body)
            to = fresh(record)
            memcpy(to, base + at, HEADER_SIZE + extras)
            put32(to + AT_OPAQUE, 0)
            if dcp:
                to[AT_OPCODE], to[AT_EXTRAS_LENGTH] = opcode, extras
                put32(to + AT_BODY, extras + body)
                if opcode != MUTATION:
                    to[AT_DATA_TYPE] = 0
            memcpy(to + HEADER_SIZE + extras, key, body)
            found.append(record)
            at = past
        if at != end:
            raise packets.truncated(at)
    finally:
        PyBuffer_Release(&view)
    return found


# ── To a socket ───────────────────────────────────────────────────────────────────────────────────

def join(list records not None, opaque, *, int dcp=0):
    cdef uint32_t number = packets.fits_opaque(opaque)
    cdef Py_ssize_t i, length, total = 0, count = PyList_GET_SIZE(records)
    cdef const uint8_t *p
    cdef uint8_t *to
    for i in range(count):
        if i + AHEAD < count:
            fetch_soon(<const void *> PyList_GET_ITEM(records, i + AHEAD))
        record = <object> PyList_GET_ITEM(records, i)
        if not PyBytes_Check(record):
            raise TypeError(f"a record is bytes, not {type(record).__name__}")
        length = PyBytes_GET_SIZE(record)
        if length < HEADER_SIZE:
            raise packets.short(length)
        total += length
    if dcp:
        for i in range(count):
            record = <object> PyList_GET_ITEM(records, i)
            p = chars(record)
            if p[AT_OPCODE] < MUTATION or p[AT_OPCODE] > FLUSH:
                raise packets.not_a_change(p[AT_OPCODE])
            if PyBytes_GET_SIZE(record) < HEADER_SIZE + p[AT_EXTRAS_LENGTH]:
                raise packets.short(PyBytes_GET_SIZE(record))
            total += longer(p[AT_OPCODE], dcp)
    joined = PyBytes_FromStringAndSize(NULL, total)
    to = fresh(joined)
    for i in range(count):
        if i + AHEAD < count:  # its head is in the cache already
            fetch_soon(<const void *> (<const char *> PyList_GET_ITEM(records, i + AHEAD) + 64))
            fetch_soon(<const void *> (<const char *> PyList_GET_ITEM(records, i + AHEAD) + 128))
        record = <object> PyList_GET_ITEM(records, i)
        p, length = chars(record), PyBytes_GET_SIZE(record)
        to += emit(to, p, length, dcp, number)
    return joined


cdef inline Py_ssize_t emit(uint8_t *to, const uint8_t *p, Py_ssize_t length, int dcp, uint32_t number) noexcept:
    """Write a record as a stream sends it, in a form of DCP if `dcp` is one; returns the number of bytes."""
    cdef Py_ssize_t body
    cdef int more
    if dcp:
        more, body = longer(p[AT_OPCODE], dcp), HEADER_SIZE + p[AT_EXTRAS_LENGTH]
        if body == MUTATION_HEAD and more == DCP_MUTATION_EXTRAS - MUTATION_EXTRAS:
            memcpy(to, p, MUTATION_HEAD)  # a constant size, which the compiler inlines
            to[MUTATION_HEAD] = to[MUTATION_HEAD + 1] = to[MUTATION_HEAD + 2] = 0
        else:
            memcpy(to, p, body)
            memset(to + body, 0, more)
        memcpy(to + body + more, p + body, length - body)
        to[0], to[AT_OPCODE], to[AT_EXTRAS_LENGTH] = REQUEST, p[AT_OPCODE] + 1, p[AT_EXTRAS_LENGTH] + more
        if p[AT_OPCODE] == EXPIRATION and not dcp & EXPIRATIONS:
            to[AT_OPCODE] = DELETION + 1
        if not dcp & DATA_TYPES:
            to[AT_DATA_TYPE] = 0
        if more > DCP_GONE_EXTRAS - DELETION_EXTRAS and p[AT_OPCODE] != MUTATION:
            put32(to + body, <uint32_t> (get64(p + AT_CAS) // NANOSECONDS))
        length += more
        put32(to + AT_BODY, length - HEADER_SIZE)
    else:
        memcpy(to, p, length)
    put32(to + AT_OPAQUE, number)
    return length


cdef inline int longer(int opcode, int form) noexcept:
    """How many bytes of extras this form of DCP adds to a record."""
    if opcode == MUTATION:
        return DCP_MUTATION_EXTRAS - MUTATION_EXTRAS
    if opcode == FLUSH:
        return 0
    if not form & DELETE_TIMES:
        return DCP_GONE_EXTRAS - DELETION_EXTRAS
    if opcode == EXPIRATION and form & EXPIRATIONS:
        return DCP_EXPIRATION_EXTRAS - DELETION_EXTRAS
    return DCP_DELETION_EXTRAS - DELETION_EXTRAS


cdef inline void edge(uint8_t *to, int opcode, int partition, uint32_t opaque) noexcept:
    """A marker of a snapshot, as UPR has it."""
    memset(to, 0, HEADER_SIZE)
    to[0], to[AT_OPCODE] = REQUEST, opcode
    put16(to + AT_PARTITION, partition)
    put32(to + AT_OPAQUE, opaque)


def retarget(buffer, Py_ssize_t start, Py_ssize_t end, opaque):
    cdef uint32_t number = packets.fits_opaque(opaque)
    cdef Py_ssize_t at = start, count = 0, total
    cdef uint8_t *base
    if not isinstance(buffer, bytearray):
        raise TypeError("only a bytearray can be changed in place")
    within(start, end, len(buffer))
    base = <uint8_t *> PyByteArray_AS_STRING(buffer)
    while at < end:
        total = get32(base + at + AT_BODY) if end - at >= HEADER_SIZE else end
        if total > end - at - HEADER_SIZE:
            raise packets.truncated(at)
        put32(base + at + AT_OPAQUE, number)
        at += HEADER_SIZE + total
        count += 1
    return count


# ── From a file ───────────────────────────────────────────────────────────────────────────────────

def replay(data, Py_ssize_t start, Py_ssize_t end, list tables not None, highs):
    cdef Py_buffer view, slots
    cdef const uint8_t *p
    cdef Py_ssize_t at = start, total
    cdef Py_ssize_t count
    cdef int opcode, klen, extras, partition
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        within(start, end, view.len)
        numbers(highs, &slots, PyBUF_WRITABLE)
        try:
            count = min(PyList_GET_SIZE(tables), slots.len // 8)
            while end - at >= DELETION_HEAD:
                p = <const uint8_t *> view.buf + at
                opcode, klen, extras, partition, total = p[AT_OPCODE], get16(p + AT_KEY_LENGTH), p[AT_EXTRAS_LENGTH], get16(p + AT_PARTITION), get32(p + AT_BODY)
                if p[0] != REQUEST or partition >= count or total > end - at - HEADER_SIZE:
                    break
                if opcode == MUTATION:
                    if extras != MUTATION_EXTRAS or klen + MUTATION_EXTRAS > total:
                        break
                elif (opcode != DELETION and opcode != EXPIRATION) or extras != DELETION_EXTRAS or klen + DELETION_EXTRAS != total:
                    break
                map_put(&(<RecordMap?> <object> PyList_GET_ITEM(tables, partition)).map, p, HEADER_SIZE + total, NULL)
                (<uint64_t *> slots.buf)[partition] = get64(p + AT_SEQNO)
                at += HEADER_SIZE + total
        finally:
            PyBuffer_Release(&slots)
    finally:
        PyBuffer_Release(&view)
    return at


# ── Lists of records ──────────────────────────────────────────────────────────────────────────────

def latest(list records not None):
    cdef dict newest = {}
    cdef Py_ssize_t number = 0, begin, length
    cdef const uint8_t *p
    cdef object key
    for record in records:
        if not PyBytes_Check(record):
            raise TypeError(f"a record is bytes, not {type(record).__name__}")
        if PyBytes_GET_SIZE(record) < HEADER_SIZE:
            raise packets.short(PyBytes_GET_SIZE(record))
        p = chars(record)
        if MUTATION <= p[AT_OPCODE] <= EXPIRATION:
            begin, length = HEADER_SIZE + p[AT_EXTRAS_LENGTH], get16(p + AT_KEY_LENGTH)
            if begin + length > PyBytes_GET_SIZE(record):
                raise packets.short(PyBytes_GET_SIZE(record))
            key = PyBytes_FromStringAndSize(<const char *> p + begin, length)
            if PyDict_GetItemWithError(newest, key) != NULL:
                PyDict_DelItem(newest, key)
        else:
            key = number
        number += 1
        PyDict_SetItem(newest, key, record)
    return records if len(newest) == number else list(newest.values())


# ── The rest of this module, a file for each of its large parts ───────────────────────────────────

include "_map.pxi"
include "_log.pxi"
include "_run.pxi"
include "_commands.pxi"
include "_apply.pxi"
include "_fanout.pxi"
include "_tracking.pxi"
include "_columns.pxi"
include "_events.pxi"
include "_writer.pxi"
include "_client.pxi"
