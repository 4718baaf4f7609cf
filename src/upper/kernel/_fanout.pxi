# The records of a commit by partition, compiled; part of _compiled.pyx. `plain_fanout` documents it.

cdef struct Group:
    uint32_t partition
    int32_t first, last, count  # of its records
    Py_ssize_t items, size  # as framed
    bint taken, reduced


cdef struct Member:
    Py_ssize_t at  # in the log
    int32_t following  # the next record of its partition; -1: there is none
    bint replaced  # by a later one of its key


cdef enum:
    FEW = 8  # records of a partition in a commit, up to which their keys are compared one by one


cdef int32_t group_of[65536]  # by partition: its group in the commit that is being split
memset(group_of, 0xFF, sizeof(group_of))


cdef inline bint is_change(const uint8_t *c) noexcept:
    return MUTATION <= c[AT_OPCODE] <= EXPIRATION or c[AT_OPCODE] == CELL_LARGE


cdef inline bint same_key(const uint8_t *c, const uint8_t *other) noexcept:
    cdef uint32_t length = cell_key_length(c)
    return length == cell_key_length(other) and memcmp(cell_key(c), cell_key(other), length) == 0


cdef class TailProgress:
    """`plain_fanout.TailProgress`."""
    cdef readonly Table store
    cdef readonly bint replicas
    cdef public uint64_t reached, items, bytes
    cdef public dict waiting

    def __cinit__(self, Table store not None, *, bint replicas):
        self.store, self.replicas, self.waiting = store, replicas, {}
        self.reached = store.written if replicas else store.durable

    def __init__(self, Table store not None, *, bint replicas):
        pass

    @property
    def limit(self):
        return self.store.written if self.replicas else self.store.durable


cdef class CommitGroups:
    """`plain_fanout.CommitGroups`."""
    cdef Log records
    cdef list tails
    cdef dict made
    cdef Group *groups
    cdef Member *members
    cdef int32_t used

    def __cinit__(self, Log records not None, list tails not None):
        cdef int32_t i = 0, group, unknown = -1
        cdef uint32_t partition
        cdef Py_ssize_t at = FRAME_HEAD
        cdef const uint8_t *c
        self.records, self.tails, self.made, self.used = records, tails, None, 0
        self.groups = <Group *> malloc(max(min(records.count, PyList_GET_SIZE(tails)), 1) * sizeof(Group))
        self.members = <Member *> malloc(max(records.count, 1) * sizeof(Member))
        if self.groups == NULL or self.members == NULL:
            raise MemoryError
        while at < records.used:
            c = records.data + at
            partition = get16(c + AT_PARTITION)
            if <Py_ssize_t> partition >= PyList_GET_SIZE(tails):
                unknown = partition
                break
            self.members[i] = Member(at, -1, False)
            group = group_of[partition]
            if group < 0:
                group_of[partition] = self.used
                self.groups[self.used] = Group(partition, i, i, 1, 0, 0, False, False)
                self.used += 1
                fetch_soon(PyList_GET_ITEM(tails, partition))  # `advance` needs its tail
                fetch_soon(<const uint8_t *> PyList_GET_ITEM(tails, partition) + 64)
            else:
                self.members[self.groups[group].last].following = i
                self.groups[group].last = i
                self.groups[group].count += 1
            at += cell_length(c)
            i += 1
        for i in range(self.used):
            group_of[self.groups[i].partition] = -1
        if unknown >= 0:
            raise packets.not_ours(unknown, PyList_GET_SIZE(tails))

    def __dealloc__(self):
        free(self.groups)
        free(self.members)

    def __len__(self):
        return self.used

    cdef list records_of(self, Group *group):
        cdef list found = []
        cdef int32_t i = group.first
        while i >= 0:
            PyList_Append(found, self.records.record_at(self.members[i].at))
            i = self.members[i].following
        return found

    cdef int reduce(self, Group *group) except -1:
        """Find the records of a group that later ones replace."""
        cdef uint8_t *data = self.records.data
        cdef int32_t i, k, room = 0
        cdef int32_t *places = NULL  # by hash: the last record of a key
        cdef const uint8_t *c
        cdef const uint8_t *other
        cdef uint32_t place
        if group.reduced:
            return 0
        group.reduced = True
        if group.count > FEW:
            room = 16
            while room < 2 * group.count:
                room *= 2
            places = <int32_t *> malloc(room * sizeof(int32_t))
            if places == NULL:
                raise MemoryError
            memset(places, 0xFF, room * sizeof(int32_t))
        i = group.first
        while i >= 0:
            c = data + self.members[i].at
            if is_change(c):
                if room:
                    place = map_tag(cell_key(c), cell_key_length(c)) & (room - 1)
                    while places[place] >= 0 and not same_key(c, data + self.members[places[place]].at):
                        place = (place + 1) & (room - 1)
                    if places[place] >= 0:
                        self.members[places[place]].replaced = True
                    places[place] = i
                else:
                    k = group.first
                    while k != i:
                        other = data + self.members[k].at
                        if not self.members[k].replaced and is_change(other) and same_key(c, other):
                            self.members[k].replaced = True
                        k = self.members[k].following
            i = self.members[i].following
        free(places)
        return 0

    @property
    def by_partition(self):
        cdef int32_t i
        if self.made is None:
            self.made = {
                self.groups[i].partition: self.records_of(&self.groups[i])
                for i in range(self.used)
                if not self.groups[i].taken
            }
        return self.made

    def take_flushed(self):
        cdef list found = []
        cdef TailProgress tail
        cdef int32_t i
        for i in range(self.used):
            tail = <TailProgress?> <object> PyList_GET_ITEM(self.tails, self.groups[i].partition)
            if not self.groups[i].taken and tail.store.purged > tail.reached:
                self.groups[i].taken, self.made = True, None
                found.append((self.groups[i].partition, self.records_of(&self.groups[i])))
        return found

    def frame(self, slots not None):
        cdef Py_buffer view
        cdef const int64_t *slot
        cdef Group *group
        cdef Py_ssize_t total = 0, items = 0, count, size
        cdef int32_t i, k
        cdef uint8_t *to
        cdef const uint8_t *c
        cdef uint32_t opaque
        PyObject_GetBuffer(slots, &view, PyBUF_SIMPLE)
        try:
            slot, count = <const int64_t *> view.buf, view.len // 8
            for i in range(self.used):
                group = &self.groups[i]
                if group.taken or group.partition >= count or slot[group.partition] < 0:
                    continue
                if group.count > 1:
                    self.reduce(group)
                group.items, group.size = 0, 2 * HEADER_SIZE
                k = group.first
                while k >= 0:
                    if not self.members[k].replaced:
                        group.items += 1
                        group.size += cell_record_length(self.records.data + self.members[k].at)
                    k = self.members[k].following
                items += group.items
                total += group.size
            framed = PyBytes_FromStringAndSize(NULL, total)
            to = fresh(framed)
            for i in range(self.used):
                group = &self.groups[i]
                if group.taken or group.partition >= count or slot[group.partition] < 0:
                    continue
                opaque = <uint32_t> (slot[group.partition] & 0xFFFFFFFF)
                edge(to, SNAPSHOT_START, group.partition, opaque)
                to += HEADER_SIZE
                k = group.first
                while k >= 0:
                    if not self.members[k].replaced:
                        c = self.records.data + self.members[k].at
                        size = cell_record_length(c)
                        memcpy(to, cell_record(c), size)
                        put32(to + AT_OPAQUE, opaque)
                        to += size
                    k = self.members[k].following
                edge(to, SNAPSHOT_END, group.partition, opaque)
                to += HEADER_SIZE
        finally:
            PyBuffer_Release(&view)
        return framed, items

    def advance(self):
        cdef list waiting = []
        cdef TailProgress tail
        cdef Group *group
        cdef int32_t i
        for i in range(self.used):
            group = &self.groups[i]
            if group.taken:
                continue
            tail = <TailProgress?> <object> PyList_GET_ITEM(self.tails, group.partition)
            tail.items += <uint64_t> group.items
            tail.bytes += <uint64_t> group.size
            if tail.waiting:
                waiting.append((group.partition, self.records_of(group)))
            else:
                tail.reached = tail.store.written if tail.replicas else tail.store.durable
        return waiting
