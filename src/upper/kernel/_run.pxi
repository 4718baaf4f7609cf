# The pipelined key-value run, compiled; part of _compiled.pyx. `plain_run` documents it.

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
    """`plain_run.Table`, with its numbers in C fields."""
    cdef public RecordMap items
    cdef public uint64_t high, durable, written, last_batch, branch, purged
    cdef public object first_batch, id

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


cdef extern from "_crc.h":
    void crc_prepare()
    uint32_t crc_of(const uint8_t *data, size_t length) nogil
    uint32_t crc_more(uint32_t crc, const uint8_t *data, size_t length) nogil

crc_prepare()


def crc32(data, uint32_t crc=0):
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    with nogil:
        crc = crc_more(crc, <const uint8_t *> view.buf, view.len)
    PyBuffer_Release(&view)
    return crc


cdef inline Py_ssize_t by_hash(const uint8_t *key, Py_ssize_t length, Py_ssize_t partitions) noexcept:
    """`model.values.partition_of`: the partition that a key belongs in, of a power of two of them."""
    return (crc_of(key, length) >> 16) & 0x7FFF & (partitions - 1)


cdef enum:
    TOGETHER = 16  # requests that are prefetched together
    STREAMED = 48  # packets of replica streams; most of them are markers


cdef object known_tables = Table  # the type of the last table seen; a partition is of a subclass


cdef inline bint is_table(object store) noexcept:
    """`isinstance(store, Table)`, without a walk through the bases for each request."""
    global known_tables
    if Py_TYPE(store) != <PyTypeObject *> known_tables:
        if not isinstance(store, Table):
            return False
        known_tables = type(store)
    return True


cdef inline upper_map *map_of(PyObject *store) noexcept:
    """The map of a partition; NULL if it has none."""
    if not is_table(<object> store) or (<Table> store).items is None:
        return NULL
    return &(<Table> store).items.map


cdef struct Ahead:  # what is known of the next requests
    Py_ssize_t end  # of the last of them
    Py_ssize_t homes[STREAMED]  # partitions
    uint32_t tags[STREAMED]  # of the keys
    uint64_t *slots[STREAMED]  # where GETs will probably find their keys; NULL: not known. Invalid after a put.


cdef int look_ahead(Ahead *ahead, const uint8_t *data, Py_ssize_t at, Py_ssize_t size, list table, bint routed, int together) except -1:
    """Fill in what is known of the next requests, and prefetch what they need.

    Each step is made for all requests before the next step, which reads what this one prefetched: partitions, heads of
    maps, slots, cells."""
    cdef PyObject *stores[STREAMED]
    cdef upper_map *maps[STREAMED]
    cdef uint32_t asked[STREAMED]
    cdef int which[STREAMED]  # of these requests each GET is
    cdef int i, opcode, looked = 0, gets = 0, puts = together  # gets are the first of `maps`, puts the last
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
        ahead.homes[looked], ahead.slots[looked] = partition, NULL
        if klen and partition < PyList_GET_SIZE(table):
            ahead.tags[looked] = map_tag(p + HEADER_SIZE + p[AT_EXTRAS_LENGTH], klen)
            opcode = p[AT_OPCODE]
            if opcode == GET or opcode == GETQ or opcode == GETK or opcode == GETKQ:
                which[gets] = looked
                i, gets = gets, gets + 1
            else:
                puts -= 1
                i = puts
            stores[i], asked[i] = PyList_GET_ITEM(table, partition), ahead.tags[looked]
            fetch_soon(stores[i])
            fetch_soon(<const uint8_t *> stores[i] + 64)
        looked += 1
    for i in range(gets):
        maps[i] = map_of(stores[i])
        if maps[i] != NULL:
            map_fetch_head(maps[i])
    for i in range(puts, together):
        maps[i] = map_of(stores[i])
        if maps[i] != NULL:
            map_fetch_all(maps[i])
    for i in range(gets):
        if maps[i] != NULL:
            map_fetch_slot(maps[i], asked[i], False)
    for i in range(puts, together):
        if maps[i] != NULL:
            map_fetch_slot(maps[i], asked[i], True)
    for i in range(gets):
        if maps[i] != NULL:
            ahead.slots[which[i]] = map_fetch_cell(maps[i], asked[i], False)
    for i in range(puts, together):
        if maps[i] != NULL:
            map_fetch_cell(maps[i], asked[i], True)
    for i in range(puts, together):
        if maps[i] != NULL:
            map_fetch_end(maps[i])
    ahead.end = at
    return 0


cdef struct Turn:
    uint64_t cas  # the last that was given out
    int64_t now, locks  # the clocks of expirations and of locks, in seconds; -1: not read yet
    Py_ssize_t made  # bytes of new records
    Py_ssize_t limit
    uint32_t longest_lock
    bint tokens, json


cdef struct Request:
    const uint8_t *p
    const uint8_t *key
    const uint8_t *record  # of the item, in memory; NULL: there is none. Invalid once another record was put.
    uint64_t *found
    Py_ssize_t klen, extras, total, length, partition  # `length` is that of the record
    int opcode
    uint32_t tag
    uint64_t cas
    bint live, locked


cdef int enlist(Turn *turn, Request *asked, Table part, object record, Log pending, list expiring) except -1:
    """Give a record its seqno and append it to its partition."""
    cdef uint8_t *to = fresh(record)
    put64(to + AT_SEQNO, part.high + 1)
    pending.reserve_record(record)
    if map_try_put_at(&part.items.map, to, PyBytes_GET_SIZE(record), <PyObject *> record, asked.tag, asked.found):
        PyErr_Clear()
        raise MemoryError
    pending.add(record)
    part.high += 1
    turn.made += PyBytes_GET_SIZE(record)
    if to[AT_OPCODE] == MUTATION and get32(to + AT_EXPIRATION):
        PyList_Append(expiring, record)
    return 0


cdef int put(Turn *turn, Request *asked, Table part, object record, Log pending, list expiring) except -1:
    """The same with the next revision of its key. The record has the CAS that follows the last one."""
    put64(fresh(record) + AT_REVISION, get64(asked.record + AT_REVISION) + 1 if asked.record != NULL else 1)
    enlist(turn, asked, part, record, pending, expiring)
    turn.cas += 1
    return 0


cdef inline Py_ssize_t stored(uint8_t *to, Turn *turn, Request *asked, Table part, uint64_t cas, Py_ssize_t value) noexcept:
    """The response to a write, without its value; with the token where the peer requested it."""
    cdef int extras = TOKEN_EXTRAS if turn.tokens else 0
    respond(to, asked.opcode, 0, extras, 0, extras + value, asked.p + AT_OPAQUE, cas)
    if extras:
        put64(to + HEADER_SIZE, part.branch)
        put64(to + HEADER_SIZE + 8, part.high)
    return HEADER_SIZE + extras


cdef inline uint64_t last_cas(Turn *turn, object clock, uint64_t *before) except? 0:
    """The last CAS; it is brought up to the present time before the first change."""
    if turn.cas == 0:
        clock.move()
        turn.cas = before[0] = clock.last
    return turn.cas


cdef inline bint admits(uint64_t cas, const uint8_t *record, bint live, bint locked) noexcept:
    """Whether the CAS of a write matches; a write without one requires an item that is not locked."""
    if cas == 0:
        return not locked
    return live and cas == get64(record + AT_CAS)


cdef int64_t seconds(Turn *turn, object clock) except? -1:
    if turn.now < 0:
        turn.now = clock.seconds()
    return turn.now


cdef int64_t lock_seconds(Turn *turn, object clock) except? -1:
    if turn.locks < 0:
        turn.locks = clock.lock_seconds()
    return turn.locks


cdef int64_t deadline(Turn *turn, uint32_t expiration, object clock) except? -1:
    """An expiration as clients send it, in seconds since the epoch; above 32 bits if it cannot be stored."""
    if expiration == 0 or expiration > MONTH:
        return expiration
    return seconds(turn, clock) + expiration


cdef int limited(Turn *turn, const uint8_t *record, object clock, bint *locked) except -1:
    """Of an item with an expiration or a lock: whether it lives, and whether it is locked."""
    cdef uint32_t expiration = get32(record + AT_EXPIRATION), lock = get32(record + AT_LOCK_TIME)
    if expiration and expiration <= seconds(turn, clock):
        return False
    locked[0] = lock != 0 and lock > lock_seconds(turn, clock)
    return True


cdef class Counts:
    """`plain_run.Counts`."""
    cdef public uint64_t gets, misses, sets, deletes, noops, others


cdef extern from "time.h" nogil:
    struct timespec:
        int64_t tv_sec, tv_nsec
    enum: CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec *now)


cdef inline uint64_t nanoseconds() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t> now.tv_sec * NANOSECONDS + now.tv_nsec


cdef class Timing:
    """`plain_run.Timing`, in nanoseconds."""
    cdef uint64_t spent
    cdef uint64_t powers[64]

    cdef void took(self, uint64_t duration) noexcept:
        cdef uint64_t left = duration // 1000
        cdef int power = 0
        while left:
            power += 1
            left >>= 1
        self.powers[power] += 1
        self.spent += duration

    def add(self, double seconds):
        self.took(<uint64_t> (max(0.0, min(seconds, 1e9)) * NANOSECONDS))

    @property
    def seconds(self):
        return self.spent / <double> NANOSECONDS

    @property
    def counts(self):
        return [self.powers[power] for power in range(64)]

    @property
    def count(self):
        return sum(self.counts)


cdef class RunOptions:
    """`plain_run.RunOptions`."""
    cdef public Py_ssize_t limit, room
    cdef public bint delete_cas, routed, tokens, json, reads, writes
    cdef public uint32_t longest_lock
    cdef public list expiring
    cdef public Counts counts
    cdef public Timing timing

    def __init__(
        self, *, Py_ssize_t limit=layout.MAX_VALUE, Py_ssize_t room=4 << 20, bint delete_cas=False, bint routed=False,
        bint tokens=False, bint json=False, bint reads=True, bint writes=True, uint32_t longest_lock=DEFAULT_LOCK,
        list expiring=None, Counts counts=None, Timing timing=None,
    ):
        self.limit, self.room, self.delete_cas, self.routed = limit, room, delete_cas, routed
        self.tokens, self.json, self.reads, self.writes, self.longest_lock = tokens, json, reads, writes, longest_lock
        self.expiring = [] if expiring is None else expiring
        self.counts = Counts() if counts is None else counts
        self.timing = Timing() if timing is None else timing


cdef inline void begin_record(uint8_t *to, int opcode, int extras, Py_ssize_t key, int partition, Py_ssize_t body, uint64_t cas) noexcept:
    to[0], to[AT_OPCODE], to[AT_EXTRAS_LENGTH], to[AT_DATA_TYPE] = REQUEST, opcode, extras, 0
    put16(to + AT_KEY_LENGTH, key)
    put16(to + AT_PARTITION, partition)
    put32(to + AT_BODY, body)
    put32(to + AT_OPAQUE, 0)
    put64(to + AT_CAS, cas)


cdef object blank(int opcode, int extras, Py_ssize_t key, int partition, Py_ssize_t body, uint64_t cas):
    """A record with its header filled in."""
    record = PyBytes_FromStringAndSize(NULL, HEADER_SIZE + body)
    begin_record(fresh(record), opcode, extras, key, partition, body, cas)
    return record


cdef int store(
    Turn *turn, Request *asked, Table part, Py_ssize_t value, int data_type, uint32_t expiration, Log pending, list expiring
) except -1:
    """A SET. A record that its partition copies is made in its place in the log, and is no object."""
    cdef Py_ssize_t size = MUTATION_HEAD + asked.klen + value
    cdef uint8_t *to
    cdef object record
    if value >= LARGE_VALUE:
        record = mutation(turn, asked, value, data_type, expiration, 0)
        memcpy(fresh(record) + AT_FLAGS, asked.p + HEADER_SIZE, 4)
        memcpy(fresh(record) + MUTATION_HEAD, asked.key, asked.klen + value)
        return put(turn, asked, part, record, pending, expiring)
    to = pending.reserve(size)
    begin_record(to, MUTATION, MUTATION_EXTRAS, asked.klen, asked.partition, size - HEADER_SIZE, turn.cas + 1)
    to[AT_DATA_TYPE] = data_type
    put64(to + AT_SEQNO, part.high + 1)
    put64(to + AT_REVISION, get64(asked.record + AT_REVISION) + 1 if asked.record != NULL else 1)
    memcpy(to + AT_FLAGS, asked.p + HEADER_SIZE, 4)
    put32(to + AT_EXPIRATION, expiration)
    put32(to + AT_LOCK_TIME, 0)
    memcpy(to + MUTATION_HEAD, asked.key, asked.klen + value)
    record = PyBytes_FromStringAndSize(<const char *> to, size) if expiration else None
    if map_try_put_at(&part.items.map, to, size, NULL, asked.tag, asked.found):
        PyErr_Clear()
        raise MemoryError
    pending.took(size, size)
    part.high += 1
    turn.cas += 1
    turn.made += size
    if expiration:
        PyList_Append(expiring, record)
    return 0


cdef inline object mutation(Turn *turn, Request *asked, Py_ssize_t value, int data_type, uint32_t expiration, uint32_t lock):
    """A mutation of the requested key, without flags, key and value."""
    record = blank(MUTATION, MUTATION_EXTRAS, asked.klen, asked.partition, MUTATION_EXTRAS + asked.klen + value, turn.cas + 1)
    cdef uint8_t *to = fresh(record)
    to[AT_DATA_TYPE] = data_type
    put32(to + AT_EXPIRATION, expiration)
    put32(to + AT_LOCK_TIME, lock)
    return record


cdef Py_ssize_t missed(
    uint8_t *to, const uint8_t *p, int opcode, const uint8_t *key, Py_ssize_t klen, bint quiet, bint shown
) noexcept:
    """The response to a read of an absent key: with the key if a hit would have it, else with an error text."""
    if quiet:
        return 0
    if shown:
        respond(to, opcode, klen, 0, 1, klen, p + AT_OPAQUE, 0)
        memcpy(to + HEADER_SIZE, key, klen)
        return HEADER_SIZE + klen
    respond(to, opcode, 0, 0, 1, 9, p + AT_OPAQUE, 0)
    memcpy(to + HEADER_SIZE, chars(NOT_FOUND), 9)
    return HEADER_SIZE + 9


cdef inline Py_ssize_t hit(
    uint8_t *to, const uint8_t *p, int opcode, const uint8_t *key, Py_ssize_t klen, bint shown,
    const uint8_t *record, Py_ssize_t length, int data_type, uint64_t cas
) noexcept:
    """The response to a read: flags, the key if the command returns it, and the value of this record."""
    cdef Py_ssize_t keys = klen if shown else 0
    length -= MUTATION_HEAD + klen
    respond(to, opcode, keys, FLAGS_EXTRAS, 0, FLAGS_EXTRAS + keys + length, p + AT_OPAQUE, cas)
    to[AT_DATA_TYPE] = data_type
    to += HEADER_SIZE
    memcpy(to, record + AT_FLAGS, FLAGS_EXTRAS)
    if shown:
        memcpy(to + FLAGS_EXTRAS, key, klen)
    memcpy(to + FLAGS_EXTRAS + keys, record + MUTATION_HEAD + klen, length)
    return HEADER_SIZE + FLAGS_EXTRAS + keys + length


def run(
    data, Py_ssize_t start, list table not None, clock, Log pending not None, bytearray out not None, RunOptions options=None
):
    cdef Py_buffer view
    cdef const uint8_t *p
    cdef const uint8_t *key
    cdef const uint8_t *record = NULL
    cdef uint64_t *found = NULL
    cdef Ahead ahead
    cdef int place = 0  # of the request among those
    cdef Py_ssize_t unchanged = 0  # `turn.made` when they were looked up
    cdef uint8_t *to
    cdef Py_ssize_t at = start, used = PyByteArray_GET_SIZE(out), space = used, need, total, length = 0, size
    cdef Py_ssize_t klen, extras, partition = 0, current = -1, answered
    cdef int opcode, kind
    cdef uint64_t before = 0, cas, revision, theirs, began = nanoseconds()
    cdef uint32_t flags, tag = 0
    cdef int64_t expiration
    cdef bint waits = False, live, locked, unseen
    cdef Request asked
    cdef Turn turn
    cdef object made
    cdef Table part = None
    cdef RunOptions chosen = RunOptions() if options is None else options
    cdef Counts counted = chosen.counts
    cdef Py_ssize_t room = chosen.room
    cdef bint routed = chosen.routed, json = chosen.json, reads = chosen.reads
    cdef list expiring = chosen.expiring
    turn.cas = 0  # not read yet; the clock moves before the first change
    turn.now = turn.locks = -1
    turn.made, turn.limit, turn.longest_lock, turn.tokens, turn.json = 0, chosen.limit, chosen.longest_lock, chosen.tokens, json
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        size = view.len
        within(start, size, size)
        ahead.end = start
        while size - at >= HEADER_SIZE and used < room and turn.made < room:
            if at >= ahead.end:
                look_ahead(&ahead, <const uint8_t *> view.buf, at, size, table, routed, TOGETHER)
                place, unchanged = 0, turn.made
            p = <const uint8_t *> view.buf + at
            opcode, klen, extras, total = p[AT_OPCODE], get16(p + AT_KEY_LENGTH), p[AT_EXTRAS_LENGTH], get32(p + AT_BODY)
            if p[0] != REQUEST or total > size - at - HEADER_SIZE or klen + extras > total:
                break
            kind, key = p[AT_DATA_TYPE], p + HEADER_SIZE + extras
            partition = get16(p + AT_PARTITION)
            if routed:
                if partition:
                    break
                if at < ahead.end:
                    partition = ahead.homes[place]
                else:
                    partition = by_hash(key, klen, PyList_GET_SIZE(table))
            record, live, locked, unseen = NULL, False, False, False
            if opcode == NOOP:
                if total or kind or get64(p + AT_CAS):
                    break
                need = HEADER_SIZE
            else:
                if klen == 0 or klen > MAX_KEY or partition >= PyList_GET_SIZE(table):
                    break
                if partition != current:
                    made = <object> PyList_GET_ITEM(table, partition)
                    if made is None:
                        break
                    part = <Table> made if is_table(made) else <Table?> made
                    current = partition
                tag = ahead.tags[place] if at < ahead.end else map_tag(key, klen)
                found = ahead.slots[place] if at < ahead.end and turn.made == unchanged else NULL
                if found == NULL or not map_has(&part.items.map, found, key, klen):
                    found = map_find(&part.items.map, key, klen, tag)
                need = HEADER_SIZE + FLAGS_EXTRAS + klen + TOKEN_EXTRAS + 9
                if found != NULL:
                    record = map_cell(&part.items.map, found[0])
                    if record[AT_OPCODE] == CELL_COLD:
                        break
                    length, record = cell_record_length(record), cell_record(record)
                    unseen = get64(record + AT_SEQNO) > part.durable
                    live = record[AT_OPCODE] == MUTATION
                    if live and get64(record + AT_EXPIRATION) and not limited(&turn, record, clock, &locked):
                        break
                    need += length
            if used + need > space:
                # Grown ahead in large steps, cut to what was used at the end.
                PyByteArray_Resize(out, used + need + (16 << 10) + used // 2)
                space = PyByteArray_GET_SIZE(out)
            to = <uint8_t *> PyByteArray_AS_STRING(out) + used
            if opcode == GET or opcode == GETQ or opcode == GETK or opcode == GETKQ:
                if extras or total != klen or kind or get64(p + AT_CAS) or not reads:
                    break
                if live:
                    used += hit(
                        to, p, opcode, key, klen, opcode == GETK or opcode == GETKQ, record, length,
                        record[AT_DATA_TYPE] if json else 0, MAX_CAS if locked else get64(record + AT_CAS),
                    )
                else:
                    used += missed(
                        to, p, opcode, key, klen, opcode == GETQ or opcode == GETKQ, opcode == GETK or opcode == GETKQ
                    )
                counted.gets += 1
                counted.misses += not live
                if unseen:
                    waits = True
                at += HEADER_SIZE + total
                place += 1
                continue
            cas = get64(p + AT_CAS)
            asked.p, asked.key, asked.record, asked.found, asked.tag = p, key, record, found, tag
            asked.opcode, asked.klen, asked.partition = opcode, klen, partition
            if opcode == NOOP:
                respond(to, NOOP, 0, 0, 0, 0, p + AT_OPAQUE, 0)
                used += HEADER_SIZE
                counted.noops += 1
            elif not chosen.writes or part.high >= MAX_SEQNO or last_cas(&turn, clock, &before) >= MAX_CAS:
                break
            elif SET <= opcode <= REPLACE or SETQ <= opcode <= REPLACEQ:
                if extras != STORE_EXTRAS or total - klen < STORE_EXTRAS or kind > 1 or not admits(cas, record, live, locked):
                    break
                if total - klen - STORE_EXTRAS > turn.limit:
                    break
                if opcode != SET and opcode != SETQ:
                    if live == (opcode == ADD or opcode == ADDQ):
                        break
                expiration = get32(p + HEADER_SIZE + 4)
                if expiration:
                    expiration = deadline(&turn, expiration, clock)
                    if expiration >> 32:
                        break
                store(&turn, &asked, part, total - STORE_EXTRAS - klen, kind if json else 0, expiration, pending, expiring)
                counted.sets += 1
                if opcode <= REPLACE:
                    used += stored(to, &turn, &asked, part, turn.cas, 0)
            elif opcode == DELETE or opcode == DELETEQ:
                if extras or total != klen or kind:
                    break
                if live:
                    if not admits(cas, record, live, locked):
                        break
                    made = blank(DELETION, DELETION_EXTRAS, klen, partition, DELETION_EXTRAS + klen, turn.cas + 1)
                    memcpy(fresh(made) + DELETION_HEAD, key, klen)
                    put(&turn, &asked, part, made, pending, expiring)
                    if opcode == DELETE:
                        used += stored(to, &turn, &asked, part, turn.cas if chosen.delete_cas else 0, 0)
                else:
                    used += missed(to, p, opcode, key, klen, False, False)
                counted.deletes += 1
            elif opcode == SET_WITH_META:
                if extras != COPY_EXTRAS or total - klen < COPY_EXTRAS or cas or kind or locked:
                    break
                if total - klen - COPY_EXTRAS > turn.limit:
                    break
                revision, theirs, flags = get64(p + HEADER_SIZE + 8), get64(p + HEADER_SIZE + 16), get32(p + HEADER_SIZE + 24)
                if flags > 1 or revision == 0 or revision >> 62 or theirs == 0 or theirs > turn.cas or theirs >> 62:
                    break
                if record != NULL and flags == 0:
                    if revision < get64(record + AT_REVISION):
                        break
                    if revision == get64(record + AT_REVISION) and theirs <= get64(record + AT_CAS):
                        break
                made = mutation(&turn, &asked, total - COPY_EXTRAS - klen, 0, get32(p + HEADER_SIZE + 4), 0)
                memcpy(fresh(made) + AT_FLAGS, p + HEADER_SIZE, 4)
                memcpy(fresh(made) + MUTATION_HEAD, key, total - COPY_EXTRAS)
                put64(fresh(made) + AT_CAS, theirs)
                put64(fresh(made) + AT_REVISION, revision)
                enlist(&turn, &asked, part, made, pending, expiring)
                counted.sets += 1
                used += stored(to, &turn, &asked, part, theirs, 0)
            else:
                if kind:
                    break
                asked.extras, asked.total, asked.length = extras, total, length
                asked.cas, asked.live, asked.locked = cas, live, locked
                answered = change_in_place(&turn, &asked, part, pending, expiring, to, clock, reads)
                if answered < 0:
                    break
                used += answered
                if opcode in (APPEND, APPENDQ, PREPEND, PREPENDQ):
                    counted.sets += 1
                else:
                    counted.others += 1
            if unseen:
                waits = True
            at += HEADER_SIZE + total
            place += 1
    finally:
        PyBuffer_Release(&view)
        if space != used:
            PyByteArray_Resize(out, used)
        if turn.cas != before:
            clock.last = turn.cas
        if at > start:
            chosen.timing.took(nanoseconds() - began)
    return at, waits or turn.made > 0, turn.made


def weigh(list tables not None):
    cdef uint64_t size = 0, memory = 0
    cdef RecordMap items
    for table in tables:
        items = (<Table?> table).items
        size += items.map.size
        memory += map_memory(&items.map)
    return size, memory


cdef class Reached:
    """What `touched` returns: pairs of a table and its seqno, without an object for each pair."""
    cdef list tables
    cdef uint64_t *seqnos  # as many

    def __dealloc__(self):
        free(self.seqnos)

    def __len__(self):
        return PyList_GET_SIZE(self.tables)

    def __iter__(self):
        return iter([(table, self.seqnos[i]) for i, table in enumerate(self.tables)])

    def __eq__(self, other):
        return list(self) == list(other)

    __hash__ = None


def touched(Log records not None, list tables not None, uint64_t batch):
    cdef Reached found = Reached.__new__(Reached)
    cdef Table table
    cdef Py_ssize_t at = FRAME_HEAD, last = -1, partition, i
    cdef const uint8_t *c
    found.tables = []
    while at < records.used:
        c = records.data + at
        at += cell_length(c)
        partition = get16(c + AT_PARTITION)
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
            found.tables.append(table)
    found.seqnos = <uint64_t *> malloc((PyList_GET_SIZE(found.tables) + 1) * sizeof(uint64_t))
    if found.seqnos == NULL:
        raise MemoryError
    for i in range(PyList_GET_SIZE(found.tables)):
        found.seqnos[i] = (<Table> PyList_GET_ITEM(found.tables, i)).high
    return found


cdef inline uint64_t reach_one(Table table, uint64_t high, bint exposed):
    """The seqno, if anything moved to it."""
    cdef uint64_t moved = 0
    if high > table.written:
        table.written = moved = high
    if exposed and high > table.durable:
        table.durable = moved = high
    return moved


def reach(reached not None, bint exposed=True):
    cdef uint64_t furthest = 0
    cdef Reached pairs
    cdef Py_ssize_t i
    if type(reached) is Reached:
        pairs = <Reached> reached
        for i in range(PyList_GET_SIZE(pairs.tables)):
            furthest = max(furthest, reach_one(<Table> PyList_GET_ITEM(pairs.tables, i), pairs.seqnos[i], exposed))
    else:
        for made in reached:
            furthest = max(furthest, reach_one(<Table?> (<tuple?> made)[0], (<tuple> made)[1], exposed))
    return furthest
