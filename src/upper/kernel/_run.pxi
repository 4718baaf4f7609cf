# The pipelined key-value run, compiled; part of _compiled.pyx. `plain_run` says what it means.

cdef inline void respond(
    uint8_t *to, int opcode, int key, int extras, int status, uint32_t total, const uint8_t *opaque, uint64_t cas
) noexcept:
    to[0], to[1], to[4], to[5] = RESPONSE, opcode, extras, 0
    put16(to + 2, key)
    put16(to + 6, status)
    put32(to + 8, total)
    memcpy(to + 12, opaque, 4)
    put64(to + 16, cas)


cdef class Table:
    """`plain_run.Table`, its numbers where a loop reaches them without asking for an attribute."""
    cdef public dict items
    cdef public uint64_t high, durable, last_batch
    cdef public int64_t tombstones, size
    cdef public object first_batch

    def __cinit__(self):
        self.items = {}


include "_ahead.pxi"


cdef int put(Table part, object key, object old, object record, list pending) except -1:
    """The record, made but for its seqno and revision, takes the last place in its partition."""
    cdef uint8_t *to = fresh(record)
    cdef uint64_t revision = 1
    PyList_Append(pending, record)
    if old is not None:
        revision = get64(chars(old) + 32) + 1
        part.size -= PyBytes_GET_SIZE(old)
        if chars(old)[1] != MUTATION:
            part.tombstones -= 1
        PyDict_DelItem(part.items, key)
    part.high += 1
    put64(to + 24, part.high)
    put64(to + 32, revision)
    part.size += PyBytes_GET_SIZE(record)
    if to[1] != MUTATION:
        part.tombstones += 1
    PyDict_SetItem(part.items, key, record)
    return 0


cdef class Counts:
    """`plain_run.Counts`."""
    cdef public uint64_t gets, misses, sets, deletes, noops


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
    Py_ssize_t limit=packets.MAX_VALUE, Py_ssize_t room=4 << 20, bint delete_cas=False, Counts counts=None,
):
    cdef Py_buffer view
    cdef const uint8_t *p
    cdef const uint8_t *record = NULL
    cdef uint8_t *to
    cdef Py_ssize_t at = start, used = PyByteArray_GET_SIZE(out), space = used, need, total, length = 0, size, seen = start
    cdef int opcode, klen, extras, partition = 0, current = -1, shown
    cdef uint64_t cas = clock.last, before = cas
    cdef bint waits = False, live
    cdef PyObject *found
    cdef object key = None, old, made
    cdef Table part = None
    cdef Counts counted = Counts() if counts is None else counts
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        size = view.len
        within(start, size, size)
        while size - at >= 24 and used < room:
            if LOOKS_AHEAD and at >= seen:
                seen = look_ahead(<const uint8_t *> view.buf, at, size, table)
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
                    part = <Table?> made
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
                counted.noops += 1
            elif opcode == SET or opcode == SETQ:
                if extras != 8 or total - klen < 8 or total - klen - 8 > limit or get32(p + 28):
                    break
                if part.high >= MAX_SEQNO or cas >= MAX_CAS:
                    break
                made = blank(MUTATION, 28, klen, partition, total + 20, cas + 1)
                memcpy(fresh(made) + 40, p + 24, 4)
                memset(fresh(made) + 44, 0, 8)
                memcpy(fresh(made) + 52, p + 32, total - 8)
                put(part, key, old, made, pending)
                counted.sets += 1
                cas += 1
                waits = True
                if opcode == SET:
                    respond(to, SET, 0, 0, 0, 0, p + 12, cas)
                    used += 24
            elif opcode == DELETE or opcode == DELETEQ:
                if extras or total != klen:
                    break
                if live:
                    if part.high >= MAX_SEQNO or cas >= MAX_CAS:
                        break
                    made = blank(DELETION, 16, klen, partition, 16 + klen, cas + 1)
                    memcpy(fresh(made) + 40, p + 24, klen)
                    put(part, key, old, made, pending)
                    cas += 1
                    waits = True
                    if opcode == DELETE:
                        respond(to, DELETE, 0, 0, 0, 0, p + 12, cas if delete_cas else 0)
                        used += 24
                else:
                    respond(to, opcode, 0, 0, 1, 9, p + 12, 0)
                    memcpy(to + 24, chars(NOT_FOUND), 9)
                    used += 33
                counted.deletes += 1
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
                counted.gets += 1
                counted.misses += not live
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
    return at, waits


def touched(list records not None, list tables not None, uint64_t batch):
    cdef list found = []
    cdef Table table
    cdef Py_ssize_t last = -1, partition
    for record in records:
        if not PyBytes_Check(record) or PyBytes_GET_SIZE(record) < 24:
            raise packets.short(len(record))
        partition = get16(chars(record) + 6)
        if partition == last:
            continue
        if partition >= PyList_GET_SIZE(tables):
            raise packets.not_ours(partition, PyList_GET_SIZE(tables))
        last = partition
        table = <Table?> <object> PyList_GET_ITEM(tables, partition)
        if table.last_batch != batch:
            table.last_batch = batch
            if table.first_batch is None:
                table.first_batch = batch
            found.append(table)
    return [(table, table.high) for table in found]


def reach(list reached not None):
    cdef uint64_t high, furthest = 0
    cdef Table table
    for made in reached:
        table, high = <Table?> (<tuple?> made)[0], (<tuple> made)[1]
        if high > table.durable:
            table.durable = high
            furthest = max(furthest, high)
    return furthest
