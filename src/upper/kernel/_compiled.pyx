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
from cpython.list cimport PyList_Append, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

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
    MAX_KEY = 250

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
    const uint8_t *data, Py_ssize_t at, Py_ssize_t end, Py_ssize_t limit, int *opcode
) except -1:
    """Where the packet at `at` ends, or 0 if it is not whole; its opcode, or -1 if it is not a change."""
    cdef const uint8_t *p = data + at
    cdef Py_ssize_t total
    cdef int key, extras
    if at == end:
        return 0
    if p[0] != REQUEST and p[0] != RESPONSE:
        raise packets.bad_magic(p[0], at)
    if end - at < 24:
        return 0
    key, extras, total, opcode[0] = get16(p + 2), p[4], get32(p + 8), p[1]
    if extras + key > total:
        raise packets.bad_length(extras, key, total, at)
    if total > limit:
        raise packets.too_large(total, limit, at)
    if p[0] == REQUEST and MUTATION <= p[1] <= EXPIRATION:
        if extras != 28 if p[1] == MUTATION else (extras != 16 or total != 16 + key):
            raise packets.bad_change(p[1], extras, key, total, at)
    else:
        opcode[0] = -1
    return at + 24 + total if total <= end - at - 24 else 0


def scan(data, Py_ssize_t start, seqnos, Py_ssize_t max_body=packets.MAX_BODY):
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
                past = packet(base, at, view.len, max_body, &opcode)
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


cdef inline void respond(
    uint8_t *to, int opcode, int key, int extras, int status, uint32_t total, const uint8_t *opaque, uint64_t cas
) noexcept:
    to[0], to[1], to[4], to[5] = RESPONSE, opcode, extras, 0
    put16(to + 2, key)
    put16(to + 6, status)
    put32(to + 8, total)
    memcpy(to + 12, opaque, 4)
    put64(to + 16, cas)


cdef class Run:
    """One partition of a run, its numbers kept out of Python objects until the run leaves it."""
    cdef object store
    cdef dict items
    cdef uint64_t durable, high
    cdef int64_t tombstones, size
    cdef bint counted  # high, tombstones and size have been read: there was a write

    cdef int enter(self, object store) except -1:
        self.leave()
        self.items = store.items
        self.durable = store.durable
        self.store = store
        return 0

    cdef int count(self) except -1:
        if not self.counted:
            self.high, self.tombstones, self.size = self.store.high, self.store.tombstones, self.store.size
            self.counted = True
        return 0

    cdef int leave(self) except -1:
        if self.counted:
            self.counted = False
            self.store.high, self.store.tombstones, self.store.size = self.high, self.tombstones, self.size
        self.store = None
        return 0

    cdef int put(self, object key, object old, object record, list pending) except -1:
        """The record, made but for its seqno and revision, takes the last place in its partition."""
        cdef uint8_t *to = fresh(record)
        cdef uint64_t revision = 1
        PyList_Append(pending, record)
        if old is not None:
            revision = get64(chars(old) + 32) + 1
            self.size -= PyBytes_GET_SIZE(old)
            if chars(old)[1] != MUTATION:
                self.tombstones -= 1
            PyDict_DelItem(self.items, key)
        self.high += 1
        put64(to + 24, self.high)
        put64(to + 32, revision)
        self.size += PyBytes_GET_SIZE(record)
        if to[1] != MUTATION:
            self.tombstones += 1
        PyDict_SetItem(self.items, key, record)
        return 0


cdef object blank(int opcode, int extras, Py_ssize_t key, int partition, Py_ssize_t body, uint64_t cas):
    """A record with its header filled in."""
    record = PyBytes_FromStringAndSize(NULL, 24 + body)
    cdef uint8_t *to = fresh(record)
    to[0], to[1], to[4], to[5] = REQUEST, opcode, extras, 0
    put16(to + 2, key)
    put16(to + 6, partition)
    put32(to + 8, body)
    put32(to + 12, 0)
    put64(to + 16, cas)
    return record


def run(
    data, Py_ssize_t start, list table not None, clock, list pending not None, bytearray out not None, *,
    Py_ssize_t limit=packets.MAX_VALUE, Py_ssize_t room=4 << 20, bint delete_cas=False,
):
    cdef Py_buffer view
    cdef const uint8_t *p
    cdef const uint8_t *record = NULL
    cdef uint8_t *to
    cdef Py_ssize_t at = start, used = PyByteArray_GET_SIZE(out), space = used, need, total, length = 0, size
    cdef int opcode, klen, extras, partition = 0, current = -1, shown
    cdef uint64_t cas = clock.last, before = cas
    cdef bint waits = False, live
    cdef PyObject *found
    cdef object key = None, old, made
    cdef Run part = Run.__new__(Run)
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        size = view.len
        within(start, size, size)
        while size - at >= 24 and used < room:
            p = <const uint8_t *> view.buf + at
            opcode, klen, extras, total = p[1], get16(p + 2), p[4], get32(p + 8)
            if p[0] != REQUEST or p[5] or get64(p + 16) or total > size - at - 24 or klen + extras > total:
                break
            if opcode == NOOP:
                if total:
                    break
                old, live, need = None, False, 24
            else:
                partition = get16(p + 6)
                if klen == 0 or klen > MAX_KEY or partition >= PyList_GET_SIZE(table):
                    break
                if partition != current:
                    made = table[partition]
                    if made is None:
                        break
                    current = -1
                    part.enter(made)
                    current = partition
                key = PyBytes_FromStringAndSize(<const char *> p + 24 + extras, klen)
                found = PyDict_GetItemWithError(part.items, key)
                old, live, length = None, False, 0
                need = 24 + 4 + klen + 9
                if found != NULL:
                    old = <object> found
                    if not PyBytes_Check(old):
                        break
                    record, length = chars(old), PyBytes_GET_SIZE(old)
                    if length < 40 + klen:
                        break
                    live = record[1] == MUTATION
                    if live and (length < 52 + klen or get64(record + 44)):
                        break
                    need += length
            if used + need > space:
                # Grown ahead in large steps, cut to what was used at the end.
                PyByteArray_Resize(out, used + need + (16 << 10) + used // 2)
                space = PyByteArray_GET_SIZE(out)
            to = <uint8_t *> PyByteArray_AS_STRING(out) + used
            if opcode == NOOP:
                respond(to, NOOP, 0, 0, 0, 0, p + 12, 0)
                used += 24
            elif opcode == SET or opcode == SETQ:
                if extras != 8 or total - klen < 8 or total - klen - 8 > limit or get32(p + 28):
                    break
                part.count()
                if part.high >= MAX_SEQNO or cas >= MAX_CAS:
                    break
                made = blank(MUTATION, 28, klen, partition, total + 20, cas + 1)
                memcpy(fresh(made) + 40, p + 24, 4)
                memset(fresh(made) + 44, 0, 8)
                memcpy(fresh(made) + 52, p + 32, total - 8)
                part.put(key, old, made, pending)
                cas += 1
                waits = True
                if opcode == SET:
                    respond(to, SET, 0, 0, 0, 0, p + 12, cas)
                    used += 24
            elif opcode == DELETE or opcode == DELETEQ:
                if extras or total != klen:
                    break
                if live:
                    part.count()
                    if part.high >= MAX_SEQNO or cas >= MAX_CAS:
                        break
                    made = blank(DELETION, 16, klen, partition, 16 + klen, cas + 1)
                    memcpy(fresh(made) + 40, p + 24, klen)
                    part.put(key, old, made, pending)
                    cas += 1
                    waits = True
                    if opcode == DELETE:
                        respond(to, DELETE, 0, 0, 0, 0, p + 12, cas if delete_cas else 0)
                        used += 24
                else:
                    respond(to, opcode, 0, 0, 1, 9, p + 12, 0)
                    memcpy(to + 24, chars(NOT_FOUND), 9)
                    used += 33
            elif opcode == GET or opcode == GETQ or opcode == GETK or opcode == GETKQ:
                if extras or total != klen:
                    break
                shown = klen if opcode == GETK or opcode == GETKQ else 0
                if live:
                    if record[5]:
                        break
                    length -= 52 + klen
                    respond(to, opcode, shown, 4, 0, 4 + shown + length, p + 12, get64(record + 16))
                    memcpy(to + 24, record + 40, 4)
                    memcpy(to + 28, p + 24, shown)
                    memcpy(to + 28 + shown, record + 52 + klen, length)
                    used += 28 + shown + length
                elif opcode == GET:
                    respond(to, GET, 0, 0, 1, 9, p + 12, 0)
                    memcpy(to + 24, chars(NOT_FOUND), 9)
                    used += 33
                elif opcode == GETK:
                    respond(to, GETK, klen, 0, 1, klen, p + 12, 0)
                    memcpy(to + 24, p + 24, klen)
                    used += 24 + klen
            else:
                break
            if old is not None and get64(chars(old) + 24) > part.durable:
                waits = True
            at += 24 + total
    finally:
        PyBuffer_Release(&view)
        if space != used:
            PyByteArray_Resize(out, used)
        if cas != before:
            clock.last = cas
        part.leave()
    return at, waits


# ── To a socket ───────────────────────────────────────────────────────────────────────────────────

def join(list records not None, opaque):
    cdef uint32_t number = packets.fits_opaque(opaque)
    cdef Py_ssize_t i, length, total = 0, count = PyList_GET_SIZE(records)
    cdef uint8_t *to
    for i in range(count):
        record = <object> PyList_GET_ITEM(records, i)
        if not PyBytes_Check(record):
            raise TypeError(f"a record is bytes, not {type(record).__name__}")
        length = PyBytes_GET_SIZE(record)
        if length < 24:
            raise packets.short(length)
        total += length
    joined = PyBytes_FromStringAndSize(NULL, total)
    to = fresh(joined)
    for i in range(count):
        if i + 8 < count:  # records lie all over the memory; have the eighth next on its way
            fetch_soon(<const void *> (<const char *> PyList_GET_ITEM(records, i + 8) + 32))
            fetch_soon(<const void *> (<const char *> PyList_GET_ITEM(records, i + 8) + 96))
        record = <object> PyList_GET_ITEM(records, i)
        length = PyBytes_GET_SIZE(record)
        memcpy(to, chars(record), length)
        put32(to + 12, number)
        to += length
    return joined


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


def after(dict items not None, seqno):
    cdef uint64_t mark
    cdef list found = []
    if seqno <= 0:
        return list(items.values())
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


# ── Columns ───────────────────────────────────────────────────────────────────────────────────────

cdef struct Buffers:
    int32_t *partition
    uint32_t *flags
    uint32_t *expiration
    uint32_t *lock_time
    uint64_t *seqno
    uint64_t *branch
    uint64_t *revision
    uint64_t *cas
    uint64_t *changed_at
    int32_t *name_ends
    int32_t *key_ends
    int32_t *value_ends
    uint8_t *names
    uint8_t *keys
    uint8_t *values
    uint8_t *validity  # NULL: nothing is null


cdef object space(Py_ssize_t size, void **where):
    made = PyBytes_FromStringAndSize(NULL, size)
    where[0] = fresh(made)
    return made


cdef void fill(const uint8_t *p, const uint8_t *end, const uint64_t *branches, Buffers *to) noexcept:
    """Every change between `p` and `end`, counted and checked before, goes to its place in each column."""
    cdef Py_ssize_t row = 0, size, klen
    cdef int32_t names = 0, keys = 0, values = 0
    cdef int width
    cdef const uint8_t *key
    to.name_ends[0] = to.key_ends[0] = to.value_ends[0] = 0
    while p < end:
        size = 24 + <Py_ssize_t> get32(p + 8)
        if p[0] == REQUEST and MUTATION <= p[1] <= EXPIRATION:
            klen = get16(p + 2)
            to.partition[row] = get16(p + 6)
            to.branch[row] = branches[get16(p + 6)]
            to.cas[row] = get64(p + 16)
            to.changed_at[row] = to.cas[row] // 1000
            to.seqno[row] = get64(p + 24)
            to.revision[row] = get64(p + 32)
            if p[1] == MUTATION:
                key = p + 52
                to.flags[row] = get32(p + 40)
                to.expiration[row] = get32(p + 44)
                to.lock_time[row] = get32(p + 48)
                memcpy(to.values + values, key + klen, size - 52 - klen)
                values += <int32_t> (size - 52 - klen)
                if to.validity != NULL:
                    to.validity[row >> 3] |= 1 << (row & 7)
            else:
                key = p + 40
                to.flags[row] = to.expiration[row] = to.lock_time[row] = 0
            memcpy(to.keys + keys, key, klen)
            keys += <int32_t> klen
            width = 10 if p[1] == EXPIRATION else 8
            memcpy(to.names + names, OPERATION[p[1] - MUTATION], width)
            names += width
            row += 1
            to.name_ends[row], to.key_ends[row], to.value_ends[row] = names, keys, values
        p += size

cdef const char *OPERATION[3]
OPERATION[0], OPERATION[1], OPERATION[2] = b"mutation", b"deletion", b"expiration"


def columns(data, Py_ssize_t start, Py_ssize_t end, branches):
    cdef Py_buffer view, known
    cdef Buffers to
    cdef const uint8_t *base
    cdef Py_ssize_t at, past, rows = 0, keys = 0, values = 0, names = 0, count, klen
    cdef int opcode = 0
    cdef bint nulls = False
    cdef dict made
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        packets.check_range(start, end, view.len)
        numbers(branches, &known, PyBUF_SIMPLE)
        try:
            base, count = <const uint8_t *> view.buf, known.len // 8
            # Count and check first: what is allocated below is what was counted here.
            at = start
            while True:
                past = packet(base, at, end, MAX_RANGE, &opcode)
                if past == 0:
                    break
                if opcode >= 0:
                    if get16(base + at + 6) >= count:
                        raise packets.no_branch(get16(base + at + 6), count, at)
                    klen = get16(base + at + 2)
                    rows += 1
                    keys += klen
                    names += 10 if opcode == EXPIRATION else 8
                    if opcode == MUTATION:
                        values += past - at - 52 - klen
                    else:
                        nulls = True
                at = past
            if at != end:
                raise packets.truncated(at)
            made = {
                "partition": (None, space(4 * rows, <void **> &to.partition)),
                "seqno": (None, space(8 * rows, <void **> &to.seqno)),
                "branch": (None, space(8 * rows, <void **> &to.branch)),
                "operation": (
                    None, space(4 * rows + 4, <void **> &to.name_ends), space(names, <void **> &to.names)
                ),
                "key": (None, space(4 * rows + 4, <void **> &to.key_ends), space(keys, <void **> &to.keys)),
                "value": (
                    space((rows + 7) // 8, <void **> &to.validity) if nulls else None,
                    space(4 * rows + 4, <void **> &to.value_ends),
                    space(values, <void **> &to.values),
                ),
                "revision": (None, space(8 * rows, <void **> &to.revision)),
                "cas": (None, space(8 * rows, <void **> &to.cas)),
                "flags": (None, space(4 * rows, <void **> &to.flags)),
                "expiration": (None, space(4 * rows, <void **> &to.expiration)),
                "lock_time": (None, space(4 * rows, <void **> &to.lock_time)),
                "changed_at": (None, space(8 * rows, <void **> &to.changed_at)),
            }
            if nulls:
                memset(to.validity, 0, (rows + 7) // 8)
            else:
                to.validity = NULL
            fill(base + start, base + end, <const uint64_t *> known.buf, &to)
        finally:
            PyBuffer_Release(&known)
    finally:
        PyBuffer_Release(&view)
    return rows, made


def to_arrow(data, Py_ssize_t start, Py_ssize_t end, branches):
    return arrow.batch(*columns(data, start, end, branches))
