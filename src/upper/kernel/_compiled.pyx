# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
"""The kernel, compiled: the same functions as `upper.kernel.plain`, with the same results and errors.

Read `plain` for what each one means; here stands only how. Rules of this file: a pointer moves only after the
length was compared with what is left; every buffer taken is released in a `finally`; sizes of allocations come
from bytes that were counted, never from a field; sentences of errors are made by `packets`.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_DelItem, PyDict_GetItemWithError, PyDict_Next, PyDict_SetItem
from cpython.list cimport PyList_Append, PyList_GET_ITEM, PyList_GET_SIZE, PyList_New, PyList_SET_ITEM, PyList_SetSlice
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.sequence cimport PySequence_Fast_ITEMS
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

import os

from upper.kernel import arrow, packets

NAME = "compiled"

cdef extern from *:
    """
    #include <stdint.h>
    /* Big endian, byte by byte: right on every machine, and one instruction where there is one. */
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
    #else
    #define fetch_soon(p) ((void)0)
    #endif
    """
    uint16_t get16(const uint8_t *p) nogil
    uint32_t get32(const uint8_t *p) nogil
    uint64_t get64(const uint8_t *p) nogil
    void put16(uint8_t *p, uint16_t v) nogil
    void put32(uint8_t *p, uint32_t v) nogil
    void put64(uint8_t *p, uint64_t v) nogil
    void fetch_soon(const void *p) nogil

cdef enum:
    REQUEST = 0x80
    RESPONSE = 0x81
    GET = 0x00
    SET = 0x01
    DELETE = 0x04
    GETQ = 0x09
    NOOP = 0x0A
    GETK = 0x0C
    GETKQ = 0x0D
    SETQ = 0x11
    DELETEQ = 0x14
    MUTATION = 0x56
    DELETION = 0x57
    EXPIRATION = 0x58
    FLUSH = 0x59
    MAX_KEY = 250
    AHEAD = 24  # records lie all over the memory: the one so many further on is fetched meanwhile

cdef uint64_t MAX_SEQNO = packets.MAX_SEQNO
cdef uint64_t MAX_CAS = packets.MAX_CAS
cdef Py_ssize_t MAX_RANGE = packets.MAX_RANGE
cdef bytes NOT_FOUND = packets.NOT_FOUND


cdef inline const uint8_t *chars(object record) noexcept:
    return <const uint8_t *> PyBytes_AS_STRING(record)


cdef inline uint8_t *fresh(object blank) noexcept:
    """The bytes of an object that nobody else has seen yet."""
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
    """Where the packet at `at` ends, or 0 if it is not whole; UPR's opcode, or -1 if it is not a change."""
    cdef const uint8_t *p = data + at
    cdef Py_ssize_t total
    cdef int key, extras
    if at == end:
        return 0
    if p[0] != REQUEST and p[0] != RESPONSE:
        raise packets.bad_magic(p[0], at)
    if end - at < 24:
        return 0
    key, extras, total, opcode[0] = get16(p + 2), p[4], get32(p + 8), p[1] - dcp
    if extras + key > total:
        raise packets.bad_length(extras, key, total, at)
    if total > limit:
        raise packets.too_large(total, limit, at)
    if p[0] != REQUEST or opcode[0] < MUTATION or opcode[0] > EXPIRATION:
        opcode[0] = -1
    elif dcp:
        if extras != 31 if opcode[0] == MUTATION else (extras != 18 and extras != (21 if opcode[0] == DELETION else 20)):
            raise packets.bad_change(p[1], extras, key, total, at)
    elif extras != 28 if p[1] == MUTATION else (extras != 16 or total != 16 + key):
        raise packets.bad_change(p[1], extras, key, total, at)
    return at + 24 + total if total <= end - at - 24 else 0


def scan(data, Py_ssize_t start, seqnos, Py_ssize_t max_body=packets.MAX_BODY, *, bint dcp=False):
    cdef Py_buffer view, slots
    cdef const uint8_t *base
    cdef uint64_t *last
    cdef Py_ssize_t at, past, changes = 0, count
    cdef int opcode = 0
    cdef uint32_t opaque
    cdef list others = []
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
                    changes += 1
                    opaque = get32(base + at + 12)
                    if opaque < count:
                        last[opaque] = get64(base + at + 24)
                at = past
        finally:
            PyBuffer_Release(&slots)
    finally:
        PyBuffer_Release(&view)
    return at, changes, others


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
            klen = get16(base + at + 2)
            key = base + at + 24 + base[at + 4]
            extras = 28 if opcode == MUTATION else 16
            body = base + past - key  # key and value
            if dcp:
                body = body - get16(base + at + 52) if opcode == MUTATION else klen
                if body < klen:
                    raise packets.truncated(at)
            record = PyBytes_FromStringAndSize(NULL, 24 + extras + body)
            to = fresh(record)
            memcpy(to, base + at, 24 + extras)
            put32(to + 12, 0)
            if dcp:
                to[1], to[4] = opcode, extras
                put32(to + 8, extras + body)
                if opcode != MUTATION:
                    to[5] = 0
            memcpy(to + 24 + extras, key, body)
            found.append(record)
            at = past
        if at != end:
            raise packets.truncated(at)
    finally:
        PyBuffer_Release(&view)
    return found


# ── To a socket ───────────────────────────────────────────────────────────────────────────────────

def join(list records not None, opaque, *, bint dcp=False):
    cdef uint32_t number = packets.fits_opaque(opaque)
    cdef Py_ssize_t i, length, body, total = 0, count = PyList_GET_SIZE(records)
    cdef const uint8_t *p
    cdef uint8_t *to
    cdef int more = 0
    for i in range(count):
        if i + AHEAD < count:
            fetch_soon(<const void *> PyList_GET_ITEM(records, i + AHEAD))
        record = <object> PyList_GET_ITEM(records, i)
        if not PyBytes_Check(record):
            raise TypeError(f"a record is bytes, not {type(record).__name__}")
        length = PyBytes_GET_SIZE(record)
        if length < 24:
            raise packets.short(length)
        total += length
    if dcp:
        for i in range(count):
            record = <object> PyList_GET_ITEM(records, i)
            p = chars(record)
            if p[1] < MUTATION or p[1] > FLUSH:
                raise packets.not_a_change(p[1])
            if PyBytes_GET_SIZE(record) < 24 + p[4]:
                raise packets.short(PyBytes_GET_SIZE(record))
            total += longer(p[1])
    joined = PyBytes_FromStringAndSize(NULL, total)
    to = fresh(joined)
    for i in range(count):
        if i + AHEAD < count:  # its head is here already
            fetch_soon(<const void *> (<const char *> PyList_GET_ITEM(records, i + AHEAD) + 64))
            fetch_soon(<const void *> (<const char *> PyList_GET_ITEM(records, i + AHEAD) + 128))
        record = <object> PyList_GET_ITEM(records, i)
        p, length = chars(record), PyBytes_GET_SIZE(record)
        if dcp:
            more, body = longer(p[1]), 24 + p[4]
            memcpy(to, p, body)
            memset(to + body, 0, more)
            memcpy(to + body + more, p + body, length - body)
            to[0], to[1], to[4] = REQUEST, p[1] + 1, p[4] + more
            length += more
            put32(to + 8, length - 24)
        else:
            memcpy(to, p, length)
        put32(to + 12, number)
        to += length
    return joined


cdef inline int longer(int opcode) noexcept:
    """How many bytes of extras DCP adds to a record."""
    return 3 if opcode == MUTATION else 0 if opcode == FLUSH else 2


def retarget(buffer, Py_ssize_t start, Py_ssize_t end, opaque):
    cdef uint32_t number = packets.fits_opaque(opaque)
    cdef Py_ssize_t at = start, count = 0, total
    cdef uint8_t *base
    if not isinstance(buffer, bytearray):
        raise TypeError("only a bytearray can be changed in place")
    within(start, end, len(buffer))
    base = <uint8_t *> PyByteArray_AS_STRING(buffer)
    while at < end:
        total = get32(base + at + 8) if end - at >= 24 else end
        if total > end - at - 24:
            raise packets.truncated(at)
        put32(base + at + 12, number)
        at += 24 + total
        count += 1
    return count


# ── To a file ─────────────────────────────────────────────────────────────────────────────────────

cdef extern from *:
    """
    /* Both read what somebody else keeps alive and nobody changes, so neither needs the interpreter. */
    static Py_ssize_t length_of_all(PyObject **records, Py_ssize_t count, Py_ssize_t ahead) {
        Py_ssize_t i, total = 0;
        for (i = 0; i < count; i++) {
            if (i + ahead < count) fetch_soon(records[i + ahead]);
            if (!PyBytes_Check(records[i])) return -1 - i;
            total += Py_SIZE(records[i]);
        }
        return total;
    }
    static void copy_all(char *to, PyObject **records, Py_ssize_t count, Py_ssize_t ahead) {
        Py_ssize_t i, length;
        for (i = 0; i < count; i++) {
            if (i + ahead < count) {
                fetch_soon((char *)records[i + ahead] + 64);
                fetch_soon((char *)records[i + ahead] + 128);
            }
            length = Py_SIZE(records[i]);
            memcpy(to, ((PyBytesObject *)records[i])->ob_sval, length);
            to += length;
        }
    }
    """
    Py_ssize_t length_of_all(PyObject **records, Py_ssize_t count, Py_ssize_t ahead) nogil
    void copy_all(char *to, PyObject **records, Py_ssize_t count, Py_ssize_t ahead) nogil


def gather(list records not None, Py_ssize_t start, Py_ssize_t end):
    cdef PyObject **first
    cdef Py_ssize_t total
    within(start, end, PyList_GET_SIZE(records))
    first = PySequence_Fast_ITEMS(records) + start
    with nogil:
        total = length_of_all(first, end - start, AHEAD)
    if total < 0:
        raise TypeError(f"a record is bytes, not {type(<object> first[-1 - total]).__name__}")
    gathered = PyBytes_FromStringAndSize(NULL, total)
    cdef char *to = PyBytes_AS_STRING(gathered)
    with nogil:
        copy_all(to, first, end - start, AHEAD)
    return gathered


# ── From a file ───────────────────────────────────────────────────────────────────────────────────

def replay(data, Py_ssize_t start, Py_ssize_t end, list tables not None, highs):
    cdef Py_buffer view, slots
    cdef const uint8_t *p
    cdef Py_ssize_t at = start, total
    cdef Py_ssize_t count
    cdef int opcode, klen, extras, partition
    cdef object key, record
    cdef dict items
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        within(start, end, view.len)
        numbers(highs, &slots, PyBUF_WRITABLE)
        try:
            count = min(PyList_GET_SIZE(tables), slots.len // 8)
            while end - at >= 40:
                p = <const uint8_t *> view.buf + at
                opcode, klen, extras, partition, total = p[1], get16(p + 2), p[4], get16(p + 6), get32(p + 8)
                if p[0] != REQUEST or partition >= count or total > end - at - 24:
                    break
                if opcode == MUTATION:
                    if extras != 28 or klen + 28 > total:
                        break
                elif (opcode != DELETION and opcode != EXPIRATION) or extras != 16 or klen + 16 != total:
                    break
                items = tables[partition]
                key = PyBytes_FromStringAndSize(<const char *> p + 24 + extras, klen)
                record = PyBytes_FromStringAndSize(<const char *> p, 24 + total)
                if PyDict_GetItemWithError(items, key) != NULL:
                    PyDict_DelItem(items, key)
                PyDict_SetItem(items, key, record)
                (<uint64_t *> slots.buf)[partition] = get64(p + 24)
                at += 24 + total
        finally:
            PyBuffer_Release(&slots)
    finally:
        PyBuffer_Release(&view)
    return at


# ── Maps and lists of records ─────────────────────────────────────────────────────────────────────

def measure(dict items not None):
    cdef PyObject *key
    cdef PyObject *value
    cdef Py_ssize_t place = 0, length, size = 0, tombstones = 0
    cdef list expiring = []
    while PyDict_Next(items, &place, &key, &value):
        record = <object> value
        if not PyBytes_Check(record):
            continue
        length = PyBytes_GET_SIZE(record)
        size += length
        if length < 2 or chars(record)[1] != MUTATION:
            tombstones += 1
        elif length >= 48 and get32(chars(record) + 44):
            expiring.append(record)
    return tombstones, size, expiring


cdef list everything(dict items):
    """The values of a map. Each is counted once more, and lies in a place of its own: fetched ahead."""
    cdef Py_ssize_t i = 0, count = len(items), place = 0
    cdef PyObject *key
    cdef PyObject *value
    cdef list found = PyList_New(count)
    cdef PyObject **to = PySequence_Fast_ITEMS(found)
    while i < count and PyDict_Next(items, &place, &key, &value):
        to[i] = value
        i += 1
    for i in range(count):
        if i + AHEAD < count:
            fetch_soon(to[i + AHEAD])
        Py_INCREF(<object> to[i])
    return found


def after(dict items not None, seqno):
    cdef uint64_t mark
    cdef list found = []
    if seqno <= 0:
        return everything(items)
    mark = min(seqno, MAX_CAS)
    for entry in reversed(items.values()):
        if PyBytes_Check(entry):
            if PyBytes_GET_SIZE(entry) < 32:
                raise packets.short(PyBytes_GET_SIZE(entry))
            if get64(chars(entry) + 24) <= mark:
                break
        elif entry >> 80 <= seqno:
            break
        found.append(entry)
    found.reverse()
    return found


def take(list stack not None, Py_ssize_t size):
    cdef Py_ssize_t i, count = PyList_GET_SIZE(stack), at = count, filled = 0
    cdef PyObject **entries = PySequence_Fast_ITEMS(stack)
    cdef list taken
    while at > 0 and (filled < size or at == count):
        at -= 1
        if at >= AHEAD:
            fetch_soon(entries[at - AHEAD])
        if not PyBytes_Check(<object> entries[at]):
            raise TypeError(f"a record is bytes, not {type(<object> entries[at]).__name__}")
        filled += PyBytes_GET_SIZE(<object> entries[at])
    taken = PyList_New(count - at)
    for i in range(count - at):
        record = <object> entries[count - 1 - i]
        Py_INCREF(record)
        PyList_SET_ITEM(taken, i, record)
    PyList_SetSlice(stack, at, count, [])
    return taken


def group(list records not None):
    cdef dict groups = {}
    cdef list members = None
    cdef int partition, last = -1
    for record in records:
        if not PyBytes_Check(record):
            raise TypeError(f"a record is bytes, not {type(record).__name__}")
        if PyBytes_GET_SIZE(record) < 24:
            raise packets.short(PyBytes_GET_SIZE(record))
        partition = get16(chars(record) + 6)
        if partition != last:
            members = groups.get(partition)
            if members is None:
                members = []
                groups[partition] = members
            last = partition
        members.append(record)
    return groups


def latest(list records not None):
    cdef dict newest = {}
    cdef Py_ssize_t number = 0, begin, length
    cdef const uint8_t *p
    cdef object key
    for record in records:
        if not PyBytes_Check(record):
            raise TypeError(f"a record is bytes, not {type(record).__name__}")
        if PyBytes_GET_SIZE(record) < 24:
            raise packets.short(PyBytes_GET_SIZE(record))
        p = chars(record)
        if MUTATION <= p[1] <= EXPIRATION:
            begin, length = 24 + p[4], get16(p + 2)
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

include "_run.pxi"
include "_columns.pxi"
include "_writer.pxi"
