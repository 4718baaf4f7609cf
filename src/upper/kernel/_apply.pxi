# Replica streams into partitions, compiled; part of _compiled.pyx. `plain_apply` documents it.

cdef inline Py_ssize_t sound(const uint8_t *p, Py_ssize_t left, uint32_t partition, uint64_t high) noexcept:
    """The length of the change at `p` if it is whole, well formed, of this partition and past `high`; else 0."""
    cdef Py_ssize_t total
    cdef int opcode, length
    cdef uint64_t seqno
    if left < DELETION_HEAD or p[0] != REQUEST:
        return 0
    opcode, length, total = p[AT_OPCODE], get16(p + AT_KEY_LENGTH), get32(p + AT_BODY)
    if opcode == MUTATION:
        if p[AT_EXTRAS_LENGTH] != MUTATION_EXTRAS or total < MUTATION_EXTRAS + length or total > MAX_BODY:
            return 0
    elif (opcode != DELETION and opcode != EXPIRATION) or p[AT_EXTRAS_LENGTH] != DELETION_EXTRAS or total != DELETION_EXTRAS + length:
        return 0
    seqno = get64(p + AT_SEQNO)
    if length == 0 or length > MAX_KEY or get16(p + AT_PARTITION) != partition or get32(p + AT_OPAQUE) != partition:
        return 0
    if seqno <= high or seqno > MAX_SEQNO or total > left - HEADER_SIZE:
        return 0
    return HEADER_SIZE + total


cdef inline bint marks(const uint8_t *p, Py_ssize_t left, uint32_t partition, int opcode) noexcept:
    """Whether a complete marker of this kind and partition, without a body, is at `p`."""
    if left < HEADER_SIZE or p[0] != REQUEST or p[AT_OPCODE] != opcode or p[AT_EXTRAS_LENGTH] or get16(p + AT_KEY_LENGTH):
        return False
    return get32(p + AT_BODY) == 0 and get32(p + AT_OPAQUE) == partition and get16(p + AT_PARTITION) == partition


cdef object mark(int opcode, uint32_t partition, uint64_t end):
    """The journal entry that begins a snapshot, with its end, or the one that ends it."""
    cdef Py_ssize_t extras = 8 if opcode == SNAPSHOT_START else 0
    fact = blank(opcode, extras, 0, partition, extras, 0)
    if extras:
        put64(fresh(fact) + HEADER_SIZE, end)
    return fact


cdef int enter(Table part, const uint8_t *p, Py_ssize_t size, uint32_t tag, Log pending, list expiring) except -1:
    """Append a change to its partition."""
    cdef uint8_t *to
    cdef uint64_t *slot = map_find(&part.items.map, cell_key(p), cell_key_length(p), tag)
    if size >= SHARED_VALUE:
        record = PyBytes_FromStringAndSize(<const char *> p, size)
        put32(fresh(record) + AT_OPAQUE, 0)
        pending.reserve_record(record)
        map_put_at(&part.items.map, chars(record), size, <PyObject *> record, tag, slot)
        pending.add(record)
    else:
        to = pending.reserve(size)
        memcpy(to, p, size)
        put32(to + AT_OPAQUE, 0)
        map_put_at(&part.items.map, to, size, NULL, tag, slot)
        pending.took(size, size)
    part.high = get64(p + AT_SEQNO)
    if p[AT_OPCODE] == MUTATION and get32(p + AT_EXPIRATION):
        record = PyBytes_FromStringAndSize(<const char *> p, size)
        put32(fresh(record) + AT_OPAQUE, 0)
        PyList_Append(expiring, record)
    return 0


def apply(
    data, Py_ssize_t start, list tables not None, bytearray inside not None, Log pending not None, bytearray ends not None
):
    cdef Py_buffer view
    cdef const uint8_t *base
    cdef uint8_t *to
    cdef Ahead ahead
    cdef int place = 0  # the next of the packets that were prefetched
    cdef Py_ssize_t at = start, past, size, length, count, several, changes = 0, used = PyByteArray_GET_SIZE(ends), space = used
    cdef uint64_t highest = 0, high
    cdef uint32_t partition, tag
    cdef int state
    cdef bint facts = False, marked
    cdef list expiring = []
    cdef Table part
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base, size = <const uint8_t *> view.buf, view.len
        within(start, size, size)
        ahead.end = start
        count = min(PyList_GET_SIZE(tables), PyByteArray_GET_SIZE(inside))
        while size - at >= HEADER_SIZE:
            if at >= ahead.end:
                look_ahead(&ahead, base, at, size, tables, False, STREAMED)
                place = 0
            partition = get32(base + at + AT_OPAQUE)
            if partition >= count:
                break
            made = <object> PyList_GET_ITEM(tables, partition)
            if made is None:
                break
            part = <Table?> made
            state = (<uint8_t *> PyByteArray_AS_STRING(inside))[partition]
            past, high, several, marked = at, part.high, 0, False
            if base[at + AT_OPCODE] == SNAPSHOT_START:
                if state != BETWEEN or high == 0 or not marks(base + at, size - at, partition, SNAPSHOT_START):
                    break
                at += HEADER_SIZE
                past = at
                place += 1
            elif state != INSIDE:
                break
            while True:
                length = sound(base + past, size - past, partition, high)
                if length == 0:
                    break
                high = get64(base + past + AT_SEQNO)
                past += length
                several += 1
            if state == INSIDE:
                if several == 0:
                    break
            elif not marks(base + past, size - past, partition, SNAPSHOT_END):
                at -= HEADER_SIZE
                break
            elif several > 1 and high - part.high != <uint64_t> several:
                facts = marked = True
                pending.append(mark(SNAPSHOT_START, partition, high))
            changes += several
            while at < past:
                if at >= ahead.end:
                    look_ahead(&ahead, base, at, size, tables, False, STREAMED)
                    place = 0
                length = HEADER_SIZE + get32(base + at + AT_BODY)
                highest = max(highest, get64(base + at + AT_CAS))
                tag = ahead.tags[place] if at < ahead.end else map_tag(cell_key(base + at), cell_key_length(base + at))
                enter(part, base + at, length, tag, pending, expiring)
                at += length
                place += 1
            if state == BETWEEN:
                at += HEADER_SIZE
                place += 1
                if marked:
                    pending.append(mark(SNAPSHOT_END, partition, 0))
                if several:
                    if used + 10 > space:
                        # Grown ahead in large steps, cut to what was used at the end.
                        PyByteArray_Resize(ends, used + 4096)
                        space = PyByteArray_GET_SIZE(ends)
                    to = <uint8_t *> PyByteArray_AS_STRING(ends) + used
                    put16(to, partition)
                    put64(to + 2, high)
                    used += 10
    finally:
        PyBuffer_Release(&view)
        if space != used:
            PyByteArray_Resize(ends, used)
    return at, changes, highest, facts, expiring
