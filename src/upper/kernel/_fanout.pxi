# The records of a commit by partition, compiled; part of _compiled.pyx. `plain_fanout` says what it means.

cdef struct Group:
    uint32_t partition
    int32_t first, last, count  # of its records; each one has the number of the next
    Py_ssize_t items, size  # as framed
    bint taken


cdef int32_t group_of[65536]  # by partition: the group that a commit has it in, while it is being cut
memset(group_of, 0xFF, sizeof(group_of))


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
    cdef list records, tails
    cdef dict made
    cdef Group *groups
    cdef int32_t *following
    cdef int32_t used

    def __cinit__(self, list records not None, list tails not None):
        cdef int32_t i, count = <int32_t> PyList_GET_SIZE(records), group, unknown = -1
        cdef uint32_t partition
        self.records, self.tails, self.made, self.used = records, tails, None, 0
        self.groups = <Group *> malloc(max(count, 1) * sizeof(Group))
        self.following = <int32_t *> malloc(max(count, 1) * sizeof(int32_t))
        if self.groups == NULL or self.following == NULL:
            raise MemoryError
        try:
            for i in range(count):
                record = <object> PyList_GET_ITEM(records, i)
                if not PyBytes_Check(record):
                    raise TypeError(f"a record is bytes, not {type(record).__name__}")
                if PyBytes_GET_SIZE(record) < HEADER_SIZE:
                    raise packets.short(PyBytes_GET_SIZE(record))
                partition = get16(chars(record) + AT_PARTITION)
                if <Py_ssize_t> partition >= PyList_GET_SIZE(tails):
                    unknown = partition if unknown < 0 else unknown
                    continue
                self.following[i] = -1
                group = group_of[partition]
                if group < 0:
                    group_of[partition] = self.used
                    self.groups[self.used] = Group(partition, i, i, 1, 0, 0, False)
                    self.used += 1
                else:
                    self.following[self.groups[group].last] = i
                    self.groups[group].last = i
                    self.groups[group].count += 1
        finally:
            for i in range(self.used):
                group_of[self.groups[i].partition] = -1
        if unknown >= 0:
            raise packets.not_ours(unknown, PyList_GET_SIZE(tails))

    def __dealloc__(self):
        free(self.groups)
        free(self.following)

    def __len__(self):
        return self.used

    cdef list members(self, Group *group):
        cdef list found = []
        cdef int32_t i = group.first
        while i >= 0:
            PyList_Append(found, <object> PyList_GET_ITEM(self.records, i))
            i = self.following[i]
        return found

    @property
    def by_partition(self):
        cdef int32_t i
        if self.made is None:
            self.made = {
                self.groups[i].partition: self.members(&self.groups[i])
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
                found.append((self.groups[i].partition, self.members(&self.groups[i])))
        return found

    def frame(self, slots not None):
        cdef Py_buffer view
        cdef const int64_t *slot
        cdef Group *group
        cdef list several
        cdef dict newest = {}
        cdef Py_ssize_t total = 0, items = 0, count, size
        cdef int32_t i, k
        cdef uint8_t *to
        cdef uint32_t opaque
        PyObject_GetBuffer(slots, &view, PyBUF_SIMPLE)
        try:
            slot, count = <const int64_t *> view.buf, view.len // 8
            for i in range(self.used):
                group = &self.groups[i]
                if group.taken or group.partition >= count or slot[group.partition] < 0:
                    continue
                group.size = 2 * HEADER_SIZE
                if group.count == 1:
                    group.items = 1
                    group.size += PyBytes_GET_SIZE(<object> PyList_GET_ITEM(self.records, group.first))
                else:
                    several = latest(self.members(group))
                    newest[i] = several
                    group.items = PyList_GET_SIZE(several)
                    for record in several:
                        group.size += PyBytes_GET_SIZE(record)
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
                if group.count == 1:
                    to = framed_record(to, <object> PyList_GET_ITEM(self.records, group.first), opaque)
                else:
                    for record in <list> newest[i]:
                        to = framed_record(to, record, opaque)
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
                waiting.append((group.partition, self.members(group)))
            else:
                tail.reached = tail.store.written if tail.replicas else tail.store.durable
        return waiting


cdef inline uint8_t *framed_record(uint8_t *to, record, uint32_t opaque):
    cdef Py_ssize_t size = PyBytes_GET_SIZE(record)
    memcpy(to, chars(record), size)
    put32(to + AT_OPAQUE, opaque)
    return to + size
