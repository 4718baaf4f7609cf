# The pipelined key-value run, compiled; part of _compiled.pyx. `plain_run` says what it means.

cdef inline void respond(
    uint8_t *to, int opcode, int key, int extras, int status, uint32_t total, const uint8_t *opaque, uint64_t cas
) noexcept:
    to[0], to[AT_OPCODE], to[AT_EXTRAS_LENGTH], to[AT_DATA_TYPE] = RESPONSE, opcode, extras, 0
    put16(to + AT_KEY_LENGTH, key)
    put16(to + AT_PARTITION, status)
    put32(to + AT_BODY, total)
    memcpy(to + AT_OPAQUE, opaque, 4)
    put64(to + AT_CAS, cas)


cdef class Table:
    """`plain_run.Table`, its numbers where a loop reaches them without asking for an attribute."""
    cdef public RecordMap items
    cdef public uint64_t high, durable, written, last_batch
    cdef public object first_batch

    def __cinit__(self):
        self.items = RecordMap()

    @property
    def tombstones(self):
        return self.items.map.tombstones

    @property
    def size(self):
        return self.items.map.size

    @property
    def evicted(self):
        return self.items.map.evicted


cdef extern from *:
    """
    static uint32_t crc_table[8][256];

    static void make_crc_table(void) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
            crc_table[0][i] = crc;
        }
        for (int k = 1; k < 8; k++)
            for (uint32_t i = 0; i < 256; i++)
                crc_table[k][i] = crc_table[k - 1][i] >> 8 ^ crc_table[0][crc_table[k - 1][i] & 0xFF];
    }

    /* The CRC-32 of zlib, eight bytes a step. */
    static inline uint32_t crc_of(const uint8_t *p, size_t length) {
        uint32_t crc = 0xFFFFFFFFu;
        for (; length >= 8; length -= 8, p += 8)
            crc = crc_table[7][p[0] ^ (crc & 0xFF)] ^ crc_table[6][p[1] ^ (crc >> 8 & 0xFF)]
                ^ crc_table[5][p[2] ^ (crc >> 16 & 0xFF)] ^ crc_table[4][p[3] ^ crc >> 24]
                ^ crc_table[3][p[4]] ^ crc_table[2][p[5]] ^ crc_table[1][p[6]] ^ crc_table[0][p[7]];
        while (length--) crc = crc >> 8 ^ crc_table[0][(crc ^ *p++) & 0xFF];
        return ~crc;
    }
    """
    void make_crc_table()
    uint32_t crc_of(const uint8_t *data, size_t length) nogil

make_crc_table()


cdef inline Py_ssize_t by_hash(const uint8_t *key, Py_ssize_t length, Py_ssize_t partitions) noexcept:
    """`model.values.partition_of`: the partition that a key belongs in, of a power of two of them."""
    return (crc_of(key, length) >> 16) & 0x7FFF & (partitions - 1)


cdef enum:
    TOGETHER = 16  # requests that are looked at together
    STREAMED = 48  # packets of replica streams; most of them are markers


cdef Py_ssize_t look_ahead(
    const uint8_t *data, Py_ssize_t at, Py_ssize_t size, list table, bint routed, Py_ssize_t *homes, uint32_t *tags, int together
) except -1:
    """Have what the next requests will ask for on its way; where those requests end, their partitions and the tags of
    their keys."""
    cdef upper_map *maps[STREAMED]
    cdef uint32_t asked[STREAMED]
    cdef int i, count = 0, looked = 0
    cdef const uint8_t *p
    cdef Py_ssize_t total, klen, partition
    while looked < together and size - at >= HEADER_SIZE:
        p = data + at
        total, klen, partition = get32(p + AT_BODY), get16(p + AT_KEY_LENGTH), get16(p + AT_PARTITION)
        if total > size - at - HEADER_SIZE or klen + p[AT_EXTRAS_LENGTH] > total:
            break
        at += HEADER_SIZE + total
        if routed:
            partition = by_hash(p + HEADER_SIZE + p[AT_EXTRAS_LENGTH], klen, PyList_GET_SIZE(table))
        homes[looked] = partition
        if klen and partition < PyList_GET_SIZE(table):
            store = <object> PyList_GET_ITEM(table, partition)
            tags[looked] = map_tag(p + HEADER_SIZE + p[AT_EXTRAS_LENGTH], klen)
            if isinstance(store, Table) and (<Table> store).items is not None:
                maps[count] = &(<Table> store).items.map
                asked[count] = tags[looked]
                map_fetch_slot(maps[count], asked[count])
                count += 1
        looked += 1
    for i in range(count):
        map_fetch_cell(maps[i], asked[i])
    return at


cdef int put(Table part, const uint8_t *old, object record, list pending, uint32_t tag, uint64_t *slot) except -1:
    """The record, made but for its seqno and revision, takes the last place in its partition."""
    cdef uint8_t *to = fresh(record)
    put64(to + AT_SEQNO, part.high + 1)
    put64(to + AT_REVISION, get64(old + AT_REVISION) + 1 if old != NULL else 1)
    return enlist(part, record, pending, tag, slot)


cdef int enlist(Table part, object record, list pending, uint32_t tag, uint64_t *slot) except -1:
    PyList_Append(pending, record)
    try:
        map_put_at(&part.items.map, chars(record), PyBytes_GET_SIZE(record), <PyObject *> record, tag, slot)
    except MemoryError:
        pending.pop()
        raise
    part.high += 1
    return 0


cdef class Counts:
    """`plain_run.Counts`."""
    cdef public uint64_t gets, misses, sets, deletes, noops


cdef object blank(int opcode, int extras, Py_ssize_t key, int partition, Py_ssize_t body, uint64_t cas):
    """A record with its header filled in."""
    record = PyBytes_FromStringAndSize(NULL, HEADER_SIZE + body)
    cdef uint8_t *to = fresh(record)
    to[0], to[AT_OPCODE], to[AT_EXTRAS_LENGTH], to[AT_DATA_TYPE] = REQUEST, opcode, extras, 0
    put16(to + AT_KEY_LENGTH, key)
    put16(to + AT_PARTITION, partition)
    put32(to + AT_BODY, body)
    put32(to + AT_OPAQUE, 0)
    put64(to + AT_CAS, cas)
    return record


def run(
    data, Py_ssize_t start, list table not None, clock, list pending not None, bytearray out not None, *,
    Py_ssize_t limit=layout.MAX_VALUE, Py_ssize_t room=4 << 20, bint delete_cas=False,
    bint routed=False, Counts counts=None,
):
    cdef Py_buffer view
    cdef const uint8_t *p
    cdef const uint8_t *record = NULL
    cdef Py_ssize_t homes[TOGETHER]
    cdef uint32_t tags[TOGETHER]
    cdef Py_ssize_t place = 0
    cdef uint8_t *to
    cdef Py_ssize_t at = start, used = PyByteArray_GET_SIZE(out), space = used, need, total, length = 0, size, seen = start
    cdef int opcode, klen, extras, partition = 0, current = -1, shown
    cdef uint64_t cas = clock.last, before = cas, revision, theirs
    cdef uint32_t options, tag = 0
    cdef bint waits = False, live, unseen
    cdef uint64_t *found = NULL
    cdef object made
    cdef Table part = None
    cdef Counts counted = Counts() if counts is None else counts
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        size = view.len
        within(start, size, size)
        while size - at >= HEADER_SIZE and used < room:
            if at >= seen:
                seen = look_ahead(<const uint8_t *> view.buf, at, size, table, routed, homes, tags, TOGETHER)
                place = 0
            p = <const uint8_t *> view.buf + at
            opcode, klen, extras, total = p[AT_OPCODE], get16(p + AT_KEY_LENGTH), p[AT_EXTRAS_LENGTH], get32(p + AT_BODY)
            if p[0] != REQUEST or p[AT_DATA_TYPE] or get64(p + AT_CAS) or total > size - at - HEADER_SIZE or klen + extras > total:
                break
            partition = get16(p + AT_PARTITION)
            if routed:
                if partition:
                    break
                if at < seen:
                    partition = homes[place]
                else:
                    partition = by_hash(p + HEADER_SIZE + extras, klen, PyList_GET_SIZE(table))
            record, live, unseen = NULL, False, False
            if opcode == NOOP:
                if total:
                    break
                need = HEADER_SIZE
            else:
                if klen == 0 or klen > MAX_KEY or partition >= PyList_GET_SIZE(table):
                    break
                if partition != current:
                    made = table[partition]
                    if made is None:
                        break
                    part = <Table?> made
                    current = partition
                tag = tags[place] if at < seen else map_tag(p + HEADER_SIZE + extras, klen)
                found = map_find(&part.items.map, p + HEADER_SIZE + extras, klen, tag)
                length = 0
                need = HEADER_SIZE + FLAGS_EXTRAS + klen + 9
                if found != NULL:
                    record = map_cell(&part.items.map, found[0])
                    if record[AT_OPCODE] == CELL_COLD:
                        break
                    length, record = cell_record_length(record), cell_record(record)
                    unseen = get64(record + AT_SEQNO) > part.durable
                    live = record[AT_OPCODE] == MUTATION
                    if live and get64(record + AT_EXPIRATION):
                        break
                    need += length
            if used + need > space:
                # Grown ahead in large steps, cut to what was used at the end.
                PyByteArray_Resize(out, used + need + (16 << 10) + used // 2)
                space = PyByteArray_GET_SIZE(out)
            to = <uint8_t *> PyByteArray_AS_STRING(out) + used
            if opcode == NOOP:
                respond(to, NOOP, 0, 0, 0, 0, p + AT_OPAQUE, 0)
                used += HEADER_SIZE
                counted.noops += 1
            elif opcode == SET or opcode == SETQ:
                if extras != STORE_EXTRAS or total - klen < extras or total - klen - extras > limit or get32(p + HEADER_SIZE + 4):
                    break
                if part.high >= MAX_SEQNO or cas >= MAX_CAS:
                    break
                made = blank(MUTATION, MUTATION_EXTRAS, klen, partition, total - STORE_EXTRAS + MUTATION_EXTRAS, cas + 1)
                memcpy(fresh(made) + AT_FLAGS, p + HEADER_SIZE, 4)
                memset(fresh(made) + AT_EXPIRATION, 0, MUTATION_HEAD - AT_EXPIRATION)
                memcpy(fresh(made) + MUTATION_HEAD, p + HEADER_SIZE + STORE_EXTRAS, total - STORE_EXTRAS)
                put(part, record, made, pending, tag, found)
                counted.sets += 1
                cas += 1
                waits = True
                if opcode == SET:
                    respond(to, SET, 0, 0, 0, 0, p + AT_OPAQUE, cas)
                    used += HEADER_SIZE
            elif opcode == SET_WITH_META:
                if extras != COPY_EXTRAS or total - klen < extras or total - klen - extras > limit or get32(p + HEADER_SIZE + 4):
                    break
                revision, theirs, options = get64(p + HEADER_SIZE + 8), get64(p + HEADER_SIZE + 16), get32(p + HEADER_SIZE + 24)
                if options > 1 or revision == 0 or revision >> 62 or theirs == 0 or theirs > cas or theirs >> 62:
                    break
                if record != NULL and options == 0:
                    if revision < get64(record + AT_REVISION) or (revision == get64(record + AT_REVISION) and theirs <= get64(record + AT_CAS)):
                        break
                if part.high >= MAX_SEQNO:
                    break
                made = blank(MUTATION, MUTATION_EXTRAS, klen, partition, total - COPY_EXTRAS + MUTATION_EXTRAS, theirs)
                memcpy(fresh(made) + AT_FLAGS, p + HEADER_SIZE, 4)
                memset(fresh(made) + AT_EXPIRATION, 0, MUTATION_HEAD - AT_EXPIRATION)
                memcpy(fresh(made) + MUTATION_HEAD, p + HEADER_SIZE + COPY_EXTRAS, total - COPY_EXTRAS)
                put64(fresh(made) + AT_SEQNO, part.high + 1)
                put64(fresh(made) + AT_REVISION, revision)
                enlist(part, made, pending, tag, found)
                counted.sets += 1
                waits = True
                respond(to, SET_WITH_META, 0, 0, 0, 0, p + AT_OPAQUE, theirs)
                used += HEADER_SIZE
            elif opcode == DELETE or opcode == DELETEQ:
                if extras or total != klen:
                    break
                if live:
                    if part.high >= MAX_SEQNO or cas >= MAX_CAS:
                        break
                    made = blank(DELETION, DELETION_EXTRAS, klen, partition, DELETION_EXTRAS + klen, cas + 1)
                    memcpy(fresh(made) + DELETION_HEAD, p + HEADER_SIZE, klen)
                    put(part, record, made, pending, tag, found)
                    cas += 1
                    waits = True
                    if opcode == DELETE:
                        respond(to, DELETE, 0, 0, 0, 0, p + AT_OPAQUE, cas if delete_cas else 0)
                        used += HEADER_SIZE
                else:
                    respond(to, opcode, 0, 0, 1, 9, p + AT_OPAQUE, 0)
                    memcpy(to + HEADER_SIZE, chars(NOT_FOUND), 9)
                    used += HEADER_SIZE + 9
                counted.deletes += 1
            elif opcode == GET or opcode == GETQ or opcode == GETK or opcode == GETKQ:
                if extras or total != klen:
                    break
                shown = klen if opcode == GETK or opcode == GETKQ else 0
                if live:
                    if record[AT_DATA_TYPE]:
                        break
                    length -= MUTATION_HEAD + klen
                    respond(to, opcode, shown, FLAGS_EXTRAS, 0, FLAGS_EXTRAS + shown + length, p + AT_OPAQUE, get64(record + AT_CAS))
                    memcpy(to + HEADER_SIZE, record + AT_FLAGS, FLAGS_EXTRAS)
                    memcpy(to + HEADER_SIZE + FLAGS_EXTRAS, p + HEADER_SIZE, shown)
                    memcpy(to + HEADER_SIZE + FLAGS_EXTRAS + shown, record + MUTATION_HEAD + klen, length)
                    used += HEADER_SIZE + FLAGS_EXTRAS + shown + length
                elif opcode == GET:
                    respond(to, GET, 0, 0, 1, 9, p + AT_OPAQUE, 0)
                    memcpy(to + HEADER_SIZE, chars(NOT_FOUND), 9)
                    used += HEADER_SIZE + 9
                elif opcode == GETK:
                    respond(to, GETK, klen, 0, 1, klen, p + AT_OPAQUE, 0)
                    memcpy(to + HEADER_SIZE, p + HEADER_SIZE, klen)
                    used += HEADER_SIZE + klen
                counted.gets += 1
                counted.misses += not live
            else:
                break
            if unseen:
                waits = True
            at += HEADER_SIZE + total
            place += 1
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
        if not PyBytes_Check(record) or PyBytes_GET_SIZE(record) < HEADER_SIZE:
            raise packets.short(len(record))
        partition = get16(chars(record) + AT_PARTITION)
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


def reach(list reached not None, bint exposed=True):
    cdef uint64_t high, furthest = 0
    cdef Table table
    for made in reached:
        table, high = <Table?> (<tuple?> made)[0], (<tuple> made)[1]
        if high > table.written:
            table.written = high
            furthest = max(furthest, high)
        if exposed and high > table.durable:
            table.durable = high
            furthest = max(furthest, high)
    return furthest
