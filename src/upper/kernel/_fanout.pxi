# The records of a commit by partition, compiled; part of _compiled.pyx. `plain_fanout` documents it.

cdef struct Group:
    uint32_t partition
    int32_t first, last, count  # of its records
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
    cdef public uint64_t reached
    cdef public dict waiting

    def __cinit__(self, Table store not None, *, bint replicas):
        self.store, self.replicas, self.waiting = store, replicas, {}
        self.reached = store.written if replicas else store.durable

    def __init__(self, Table store not None, *, bint replicas):
        pass

    @property
    def limit(self):
        return self.store.written if self.replicas else self.store.durable


@cython.final
cdef class StreamForm:
    """`plain_fanout.StreamForm`."""
    cdef object __weakref__
    cdef int dcp, operations
    cdef bint tap, keys_only, filters
    cdef bytes prefix
    cdef object matches
    cdef uint64_t *counts  # by partition: changes, bytes
    cdef Py_ssize_t partitions

    def __cinit__(
        self, Py_ssize_t partitions, *, int dcp=0, bint tap=False, bint keys_only=False, bytes prefix not None=b"",
        int operations=ALL_OPERATIONS, matches=None,
    ):
        if dcp and tap:
            raise packets.wrong_form()
        self.dcp, self.tap, self.keys_only, self.prefix, self.operations = dcp, tap, keys_only, prefix, operations
        self.matches, self.partitions = matches, partitions
        self.filters = bool(prefix) or operations != ALL_OPERATIONS or matches is not None
        self.counts = <uint64_t *> calloc(max(partitions, 1), 2 * sizeof(uint64_t))
        if self.counts == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.counts)

    def counted(self, Py_ssize_t partition):
        if not 0 <= partition < self.partitions:
            raise packets.not_ours(partition, self.partitions)
        return self.counts[2 * partition], self.counts[2 * partition + 1]

    cdef bint passes(self, const uint8_t *p) except -1:
        """Whether a record is sent."""
        cdef int opcode = p[AT_OPCODE]
        cdef const uint8_t *key = p + HEADER_SIZE + p[AT_EXTRAS_LENGTH]
        cdef Py_ssize_t length = get16(p + AT_KEY_LENGTH), prefix = PyBytes_GET_SIZE(self.prefix)
        if opcode < MUTATION or opcode > EXPIRATION:
            return True
        if not self.operations >> (opcode - MUTATION) & 1:
            return False
        if prefix and (length < prefix or memcmp(key, chars(self.prefix), prefix)):
            return False
        return self.matches is None or bool(self.matches(PyBytes_FromStringAndSize(<const char *> key, length)))

    cdef Py_ssize_t kept(self, const uint8_t *p, Py_ssize_t length) except -1:
        """How many bytes of a record are sent."""
        if self.keys_only and p[AT_OPCODE] == MUTATION:
            length = HEADER_SIZE + p[AT_EXTRAS_LENGTH] + get16(p + AT_KEY_LENGTH)
        return length

    cdef Py_ssize_t size(self, const uint8_t *p, Py_ssize_t length) except -1:
        """How long the packet of a record is."""
        cdef int opcode = p[AT_OPCODE]
        if self.dcp:
            if opcode < MUTATION or opcode > FLUSH:
                raise packets.not_a_change(opcode)
            return self.kept(p, length) + longer(opcode, self.dcp)
        if not self.tap:
            return self.kept(p, length)
        if opcode < MUTATION or opcode > EXPIRATION:
            raise packets.not_in_tap(opcode)
        if opcode == MUTATION:
            if p[AT_EXTRAS_LENGTH] != MUTATION_EXTRAS:
                raise packets.short(length)
            return self.kept(p, length) + TAP_MUTATION_EXTRAS - MUTATION_EXTRAS
        if p[AT_EXTRAS_LENGTH] != DELETION_EXTRAS or length != DELETION_HEAD + get16(p + AT_KEY_LENGTH):
            raise packets.short(length)
        return length + TAP_DELETION_EXTRAS - DELETION_EXTRAS

    cdef Py_ssize_t put(self, uint8_t *to, const uint8_t *p, Py_ssize_t length, uint32_t opaque) noexcept:
        """The packet of a record, of UPR or DCP; how long it is."""
        cdef bint cut = self.keys_only and p[AT_OPCODE] == MUTATION
        if cut:
            length = HEADER_SIZE + p[AT_EXTRAS_LENGTH] + get16(p + AT_KEY_LENGTH)
        length = emit(to, p, length, self.dcp, opaque)
        if cut:
            to[AT_DATA_TYPE] = 0
            put32(to + AT_BODY, length - HEADER_SIZE)
        return length

    cdef Py_ssize_t put_tap(self, uint8_t *to, const uint8_t *p, Py_ssize_t length, uint32_t opaque, bint ask) noexcept:
        """The packet of a record in TAP."""
        cdef Py_ssize_t key = get16(p + AT_KEY_LENGTH), rest
        cdef int marks = TAP_ACK if ask else 0
        memcpy(to, p, HEADER_SIZE)
        memset(to + HEADER_SIZE, 0, TAP_DELETION_EXTRAS)
        to[0], to[HEADER_SIZE + AT_TAP_HOPS] = REQUEST, TAP_HOPS
        put32(to + AT_OPAQUE, opaque)
        if p[AT_OPCODE] == MUTATION:
            rest = key if self.keys_only else length - MUTATION_HEAD
            if self.keys_only:
                to[AT_DATA_TYPE], marks = 0, marks | TAP_NO_VALUE
            to[AT_OPCODE], to[AT_EXTRAS_LENGTH] = TAP_MUTATION, TAP_MUTATION_EXTRAS
            memcpy(to + HEADER_SIZE + TAP_DELETION_EXTRAS, p + AT_FLAGS, AT_LOCK_TIME - AT_FLAGS)
            memcpy(to + HEADER_SIZE + TAP_MUTATION_EXTRAS, p + MUTATION_HEAD, rest)
            rest += TAP_MUTATION_EXTRAS
        else:
            to[AT_OPCODE], to[AT_EXTRAS_LENGTH], to[AT_DATA_TYPE] = TAP_DELETION, TAP_DELETION_EXTRAS, 0
            memcpy(to + HEADER_SIZE + TAP_DELETION_EXTRAS, p + DELETION_HEAD, key)
            rest = TAP_DELETION_EXTRAS + key
        put16(to + HEADER_SIZE + AT_TAP_MARKS, marks)
        put32(to + AT_BODY, rest)
        return HEADER_SIZE + rest


@cython.final
cdef class Framing:
    """What a form makes of the groups of one commit."""
    cdef StreamForm form
    cdef Py_ssize_t *items  # by group: changes that are sent; -1: not known yet
    cdef Py_ssize_t *sizes  # and the bytes of its snapshot
    cdef uint8_t *left_out  # by record, where the form filters

    def __cinit__(self, StreamForm form not None, Py_ssize_t groups, Py_ssize_t records):
        self.form = form
        self.items = <Py_ssize_t *> malloc(max(groups, 1) * sizeof(Py_ssize_t))
        self.sizes = <Py_ssize_t *> malloc(max(groups, 1) * sizeof(Py_ssize_t))
        self.left_out = <uint8_t *> malloc(max(records, 1)) if form.filters else NULL
        if self.items == NULL or self.sizes == NULL or (form.filters and self.left_out == NULL):
            raise MemoryError
        memset(self.items, 0xFF, groups * sizeof(Py_ssize_t))

    def __dealloc__(self):
        free(self.items)
        free(self.sizes)
        free(self.left_out)


cdef class CommitGroups:
    """`plain_fanout.CommitGroups`."""
    cdef Log records
    cdef list tails
    cdef list framings
    cdef Group *groups
    cdef Member *members
    cdef int32_t used

    def __cinit__(self, Log records not None, list tails not None):
        cdef int32_t i = 0, group, unknown = -1
        cdef uint32_t partition
        cdef Py_ssize_t at = FRAME_HEAD
        cdef const uint8_t *c
        self.records, self.tails, self.framings, self.used = records, tails, [], 0
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
                self.groups[self.used] = Group(partition, i, i, 1, False, False)
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

    cdef uint64_t last_seqno(self, Group *group) except *:
        cdef const uint8_t *c = self.records.data + self.members[group.last].at
        cdef TailProgress tail
        if c[AT_EXTRAS_LENGTH] >= sizeof(uint64_t):
            return cell_seqno(c)
        tail = <TailProgress?> <object> PyList_GET_ITEM(self.tails, group.partition)
        return tail.reached

    def ends(self):
        cdef int32_t i
        return {
            self.groups[i].partition: self.last_seqno(&self.groups[i]) for i in range(self.used) if not self.groups[i].taken
        }

    def of(self, wanted):
        cdef int32_t i
        return {
            self.groups[i].partition: self.records_of(&self.groups[i])
            for i in range(self.used)
            if not self.groups[i].taken and self.groups[i].partition in wanted
        }

    def take_flushed(self):
        cdef list found = []
        cdef TailProgress tail
        cdef int32_t i
        for i in range(self.used):
            tail = <TailProgress?> <object> PyList_GET_ITEM(self.tails, self.groups[i].partition)
            if not self.groups[i].taken and tail.store.purged > tail.reached:
                self.groups[i].taken = True
                found.append((self.groups[i].partition, self.records_of(&self.groups[i])))
        return found

    cdef Framing framing(self, StreamForm form):
        cdef Framing found
        for found in self.framings:
            if found.form is form:
                return found
        found = Framing(form, self.used, self.records.count)
        self.framings.append(found)
        return found

    cdef int look(self, Framing framing, int32_t number) except -1:
        """Count the changes of a group that are sent in a form, and their bytes."""
        cdef StreamForm form = framing.form
        cdef Group *group = &self.groups[number]
        cdef const uint8_t *p
        cdef Py_ssize_t items = 0, size = 0, length
        cdef int32_t k = group.first
        if group.count > 1:
            self.reduce(group)
        while k >= 0:
            if not self.members[k].replaced:
                p = cell_record(self.records.data + self.members[k].at)
                length = cell_record_length(self.records.data + self.members[k].at)
                if framing.left_out != NULL:
                    framing.left_out[k] = not form.passes(p)
                if framing.left_out == NULL or not framing.left_out[k]:
                    items += 1
                    size += form.size(p, length)
            k = self.members[k].following
        if not form.tap:
            size += HEADER_SIZE + (DCP_MARKER_EXTRAS if form.dcp else HEADER_SIZE)
            if framing.left_out != NULL and framing.left_out[group.last]:
                size += HEADER_SIZE + ADVANCED_EXTRAS
        framing.items[number], framing.sizes[number] = items, size
        return 0

    cdef Py_ssize_t total(self, Framing framing, Py_buffer *slots, Py_ssize_t *items) except -1:
        """The bytes and changes of the groups that have a slot."""
        cdef const int64_t *slot = <const int64_t *> slots.buf
        cdef Py_ssize_t total = 0, count = slots.len // 8
        cdef int32_t i
        items[0] = 0
        for i in range(self.used):
            if self.groups[i].taken or self.groups[i].partition >= count or slot[self.groups[i].partition] < 0:
                continue
            if framing.items[i] < 0:
                self.look(framing, i)
            items[0] += framing.items[i]
            total += framing.sizes[i]
        return total

    def measure(self, slots, StreamForm form not None):
        cdef Py_buffer view
        cdef Py_ssize_t items, size
        PyObject_GetBuffer(slots, &view, PyBUF_SIMPLE)
        try:
            size = self.total(self.framing(form), &view, &items)
        finally:
            PyBuffer_Release(&view)
        return size, items

    def frame(self, slots, StreamForm form not None):
        cdef Framing framing = self.framing(form)
        cdef TailProgress tail
        cdef Py_buffer view
        cdef const int64_t *slot
        cdef Py_ssize_t count, items
        cdef Group *group
        cdef int32_t i, k
        cdef uint8_t *to
        cdef uint32_t opaque
        if form.tap:
            raise packets.wrong_form()
        PyObject_GetBuffer(slots, &view, PyBUF_SIMPLE)
        try:
            slot, count = <const int64_t *> view.buf, view.len // 8
            framed = PyBytes_FromStringAndSize(NULL, self.total(framing, &view, &items))
            to = fresh(framed)
            for i in range(self.used):
                group = &self.groups[i]
                if group.taken or group.partition >= count or slot[group.partition] < 0:
                    continue
                opaque = <uint32_t> (slot[group.partition] & 0xFFFFFFFF)
                if form.dcp:
                    edge(to, DCP_MARKER, group.partition, opaque)
                    to[AT_EXTRAS_LENGTH] = DCP_MARKER_EXTRAS
                    put32(to + AT_BODY, DCP_MARKER_EXTRAS)
                    tail = <TailProgress?> <object> PyList_GET_ITEM(self.tails, group.partition)
                    put64(to + HEADER_SIZE, tail.reached)
                    put64(to + HEADER_SIZE + 8, self.last_seqno(group))
                    put32(to + HEADER_SIZE + 16, DCP_IN_MEMORY)
                    to += HEADER_SIZE + DCP_MARKER_EXTRAS
                else:
                    edge(to, SNAPSHOT_START, group.partition, opaque)
                    to += HEADER_SIZE
                k = group.first
                while k >= 0:
                    if not self.members[k].replaced and (framing.left_out == NULL or not framing.left_out[k]):
                        to += form.put(
                            to, cell_record(self.records.data + self.members[k].at),
                            cell_record_length(self.records.data + self.members[k].at), opaque,
                        )
                    k = self.members[k].following
                if framing.left_out != NULL and framing.left_out[group.last]:
                    edge(to, SEQNO_ADVANCED, group.partition, opaque)
                    to[AT_EXTRAS_LENGTH] = ADVANCED_EXTRAS
                    put32(to + AT_BODY, ADVANCED_EXTRAS)
                    put64(to + HEADER_SIZE, self.last_seqno(group))
                    to += HEADER_SIZE + ADVANCED_EXTRAS
                if not form.dcp:
                    edge(to, SNAPSHOT_END, group.partition, opaque)
                    to += HEADER_SIZE
        finally:
            PyBuffer_Release(&view)
        return framed

    def frame_tap(self, slots, StreamForm form not None, uint32_t opaque, *, uint32_t every, uint32_t since):
        cdef Framing framing = self.framing(form)
        cdef TailProgress tail
        cdef Py_buffer view
        cdef const int64_t *slot
        cdef const uint8_t *p
        cdef Py_ssize_t count, items, made = 0
        cdef Group *group
        cdef int32_t i, k
        cdef uint8_t *to
        cdef uint64_t last, start
        cdef list asked = [], progress = []
        cdef bint ask
        if not form.tap:
            raise packets.wrong_form()
        PyObject_GetBuffer(slots, &view, PyBUF_SIMPLE)
        try:
            slot, count = <const int64_t *> view.buf, view.len // 8
            framed = PyBytes_FromStringAndSize(NULL, self.total(framing, &view, &items))
            to = fresh(framed)
            for i in range(self.used):
                group = &self.groups[i]
                if group.taken or group.partition >= count or slot[group.partition] < 0:
                    continue
                tail = <TailProgress?> <object> PyList_GET_ITEM(self.tails, group.partition)
                start, last = tail.reached, self.last_seqno(group)
                k = group.first
                while k >= 0:
                    if not self.members[k].replaced and (framing.left_out == NULL or not framing.left_out[k]):
                        p = cell_record(self.records.data + self.members[k].at)
                        opaque, made = opaque % 0xFFFFFFFF + 1, made + 1
                        since += 1
                        ask = every and since >= every
                        if ask:
                            progress.append((group.partition, (tail.store.branch, get64(p + AT_SEQNO), start, last)))
                            asked.append((opaque, made, progress))
                            progress, since = [], 0
                        to += form.put_tap(
                            to, p, cell_record_length(self.records.data + self.members[k].at), opaque, ask
                        )
                    k = self.members[k].following
                if every:
                    progress.append((group.partition, (tail.store.branch, last, last, last)))
        finally:
            PyBuffer_Release(&view)
        return framed, asked, progress

    def advance(self):
        cdef list waiting = []
        cdef TailProgress tail
        cdef Framing framing
        cdef Group *group
        cdef int32_t i
        for framing in self.framings:
            for i in range(self.used):
                group = &self.groups[i]
                if not group.taken and framing.items[i] >= 0 and group.partition < framing.form.partitions:
                    framing.form.counts[2 * group.partition] += <uint64_t> framing.items[i]
                    framing.form.counts[2 * group.partition + 1] += <uint64_t> framing.sizes[i]
        for i in range(self.used):
            group = &self.groups[i]
            if group.taken:
                continue
            tail = <TailProgress?> <object> PyList_GET_ITEM(self.tails, group.partition)
            if tail.waiting:
                waiting.append((group.partition, self.records_of(group)))
            else:
                tail.reached = tail.store.written if tail.replicas else tail.store.durable
        return waiting
