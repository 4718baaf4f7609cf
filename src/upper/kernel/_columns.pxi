# Changes as the buffers of Arrow columns, compiled; part of _compiled.pyx. `plain_columns` documents it.

cdef struct Buffers:
    int32_t *partition
    uint32_t *flags
    uint32_t *expiration
    uint32_t *lock_time
    int32_t *data_type
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


cdef void fill(
    const uint8_t *p, const uint8_t *end, const uint64_t *branches, bint dcp, Buffers *to
) noexcept:
    """Write every change between `p` and `end` to the columns; they were counted and checked before."""
    cdef Py_ssize_t row = 0, size, klen, vlen
    cdef int32_t names = 0, keys = 0, values = 0
    cdef int width, opcode
    cdef const uint8_t *key
    to.name_ends[0] = to.key_ends[0] = to.value_ends[0] = 0
    while p < end:
        size = HEADER_SIZE + <Py_ssize_t> get32(p + AT_BODY)
        opcode = p[AT_OPCODE] - dcp
        if p[0] == REQUEST and MUTATION <= opcode <= EXPIRATION:
            klen = get16(p + AT_KEY_LENGTH)
            key = p + HEADER_SIZE + p[AT_EXTRAS_LENGTH]
            to.partition[row] = get16(p + AT_PARTITION)
            to.branch[row] = branches[get16(p + AT_PARTITION)]
            to.cas[row] = get64(p + AT_CAS)
            to.changed_at[row] = to.cas[row] // 1000
            to.seqno[row] = get64(p + AT_SEQNO)
            to.revision[row] = get64(p + AT_REVISION)
            to.data_type[row] = p[AT_DATA_TYPE]
            if opcode == MUTATION:
                to.flags[row] = get32(p + AT_FLAGS)
                to.expiration[row] = get32(p + AT_EXPIRATION)
                to.lock_time[row] = get32(p + AT_LOCK_TIME)
                vlen = value_length(p, p + size, key + klen, dcp)
                memcpy(to.values + values, key + klen, vlen)
                values += <int32_t> vlen
                if to.validity != NULL:
                    to.validity[row >> 3] |= 1 << (row & 7)
            else:
                if dcp:
                    to.data_type[row] = 0  # of a deletion it describes a value that has no column here
                to.flags[row] = to.expiration[row] = to.lock_time[row] = 0
            memcpy(to.keys + keys, key, klen)
            keys += <int32_t> klen
            width = 10 if opcode == EXPIRATION else 8
            memcpy(to.names + names, OPERATION[opcode - MUTATION], width)
            names += width
            row += 1
            to.name_ends[row], to.key_ends[row], to.value_ends[row] = names, keys, values
        p += size

cdef const char *OPERATION[3]
OPERATION[0], OPERATION[1], OPERATION[2] = b"mutation", b"deletion", b"expiration"


cdef int measure_all(
    const uint8_t *base, Py_ssize_t start, Py_ssize_t end, Py_ssize_t count, bint dcp, ColumnSizes *sizes
) except -1:
    """Check and count every change; `count` partitions are known."""
    cdef Py_ssize_t at = start, past
    cdef int opcode = 0
    memset(sizes, 0, sizeof(sizes[0]))
    while True:
        past = packet(base, at, end, MAX_RANGE, dcp, &opcode)
        if past == 0:
            break
        if opcode >= 0:
            if get16(base + at + AT_PARTITION) >= count:
                raise packets.no_branch(get16(base + at + AT_PARTITION), count, at)
            measure(sizes, base + at, base + past, opcode, dcp)
            if sizes.malformed:
                raise packets.truncated(at)
        at = past
    if at != end:
        raise packets.truncated(at)
    return 0


def columns(data, Py_ssize_t start, Py_ssize_t end, branches, *, bint dcp=False, Scanned scanned=None):
    cdef Py_buffer view, known
    cdef Buffers to
    cdef const uint8_t *base
    cdef ColumnSizes sizes
    cdef Py_ssize_t rows, count
    cdef dict made
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        packets.check_range(start, end, view.len)
        numbers(branches, &known, PyBUF_SIMPLE)
        try:
            base, count = <const uint8_t *> view.buf, known.len // 8
            # Checked and counted first: what is allocated below has the counted size.
            if scanned is not None and scanned.holds(data, start, end, count, dcp):
                sizes = scanned.sizes
            else:
                measure_all(base, start, end, count, dcp, &sizes)
            rows = sizes.rows
            made = {
                "partition": (None, space(4 * rows, <void **> &to.partition)),
                "seqno": (None, space(8 * rows, <void **> &to.seqno)),
                "branch": (None, space(8 * rows, <void **> &to.branch)),
                "operation": (
                    None, space(4 * rows + 4, <void **> &to.name_ends), space(8 * rows + 2 * sizes.expirations, <void **> &to.names)
                ),
                "key": (None, space(4 * rows + 4, <void **> &to.key_ends), space(sizes.keys, <void **> &to.keys)),
                "value": (
                    space((rows + 7) // 8, <void **> &to.validity) if sizes.nulls else None,
                    space(4 * rows + 4, <void **> &to.value_ends),
                    space(sizes.values, <void **> &to.values),
                ),
                "revision": (None, space(8 * rows, <void **> &to.revision)),
                "cas": (None, space(8 * rows, <void **> &to.cas)),
                "flags": (None, space(4 * rows, <void **> &to.flags)),
                "expiration": (None, space(4 * rows, <void **> &to.expiration)),
                "lock_time": (None, space(4 * rows, <void **> &to.lock_time)),
                "changed_at": (None, space(8 * rows, <void **> &to.changed_at)),
                "data_type": (None, space(4 * rows, <void **> &to.data_type)),
            }
            if sizes.nulls:
                memset(to.validity, 0, (rows + 7) // 8)
            else:
                to.validity = NULL
            fill(base + start, base + end, <const uint64_t *> known.buf, dcp, &to)
        finally:
            PyBuffer_Release(&known)
    finally:
        PyBuffer_Release(&view)
    return rows, made


def to_arrow(data, Py_ssize_t start, Py_ssize_t end, branches, *, bint dcp=False, Scanned scanned=None):
    return arrow.batch(*columns(data, start, end, branches, dcp=dcp, scanned=scanned))


def attributed(data, Py_ssize_t start, Py_ssize_t end):
    cdef Py_buffer view
    cdef const uint8_t *base
    cdef Py_ssize_t at = start, past, row = 0
    cdef int opcode = 0
    cdef list found = []
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        within(start, end, view.len)
        base = <const uint8_t *> view.buf
        while True:
            past = packet(base, at, end, MAX_RANGE, True, &opcode)
            if past == 0:
                break
            if opcode >= 0:
                if base[at + AT_DATA_TYPE] & XATTR:
                    found.append((row, at))
                row += 1
            at = past
        if at != end:
            raise packets.truncated(at)
    finally:
        PyBuffer_Release(&view)
    return found
