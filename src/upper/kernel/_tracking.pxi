# How far the replicas of active copies are, compiled; part of _compiled.pyx. `plain_tracking` documents it.

cdef extern from "Python.h":
    void PyUnicode_InternInPlace(PyObject **text)

cdef enum:
    FEW_REPLICAS = 2  # as many have their place in the object of their copy
    PAIRS = 32  # copies that are looked up before the first of them is used, so that they are on their way to the cache

cdef struct Replica:
    PyObject *node  # owned
    int64_t held  # -1: it has acknowledged nothing
    double since  # NaN: it is not behind
    bint waited


cdef inline object named(node):
    """The one object of this name, so that most comparisons are of addresses."""
    cdef PyObject *text
    if type(node) is not str:
        return node
    text = <PyObject *> node
    Py_INCREF(node)
    PyUnicode_InternInPlace(&text)
    found = <object> text
    Py_XDECREF(text)
    return found


cdef class CopyProgress:
    """`plain_tracking.CopyProgress`; its replicas are in one piece of memory."""
    cdef public uint64_t durable, replicated, epoch
    cdef frozenset _waited_for
    cdef Replica *replicas  # `few`, or memory of their own
    cdef Replica few[FEW_REPLICAS]
    cdef int used, room

    def __cinit__(self):
        self._waited_for, self.replicas, self.used, self.room = frozenset(), self.few, 0, FEW_REPLICAS

    def __dealloc__(self):
        cdef int i
        for i in range(self.used):
            Py_XDECREF(self.replicas[i].node)
        if self.replicas != self.few:
            free(self.replicas)

    cdef Replica *find(self, node, bint new) except? NULL:
        """The replica on this node; NULL if there is none and `new` is false."""
        cdef int i
        cdef Replica *more
        for i in range(self.used):
            if self.replicas[i].node == <PyObject *> node or <object> self.replicas[i].node == node:
                return &self.replicas[i]
        if not new:
            return NULL
        if self.used == self.room:
            more = <Replica *> malloc(2 * self.room * sizeof(Replica))
            if more == NULL:
                raise MemoryError
            memcpy(more, self.replicas, self.used * sizeof(Replica))
            if self.replicas != self.few:
                free(self.replicas)
            self.replicas = more
            self.room *= 2
        node = named(node)
        Py_INCREF(node)
        self.replicas[self.used] = Replica(<PyObject *> node, -1, NAN, False)
        self.used += 1
        return &self.replicas[self.used - 1]

    @property
    def waited_for(self):
        return self._waited_for

    @waited_for.setter
    def waited_for(self, frozenset nodes not None):
        cdef int i
        for i in range(self.used):
            self.replicas[i].waited = False
        for node in nodes:
            self.find(node, True).waited = True
        self._waited_for = nodes

    def held_by(self, node):
        cdef Replica *found = self.find(node, False)
        return -1 if found == NULL else found.held

    def hold(self, node, uint64_t seqno):
        self.find(node, True).held = <int64_t> seqno

    def silent_since(self, node):
        cdef Replica *found = self.find(node, False)
        return None if found == NULL or isnan(found.since) else found.since

    def set_silent(self, node, since):
        self.find(node, True).since = NAN if since is None else since

    def forget(self, held, silent):
        cdef int i
        for i in range(self.used):
            if held:
                self.replicas[i].held = -1
            if silent:
                self.replicas[i].since = NAN

    def tracked(self):
        return [<object> self.replicas[i].node for i in range(self.used)]


def wrote(reached not None, dict copies not None, double now):
    cdef list found = []
    cdef CopyProgress copy
    cdef PyObject *made
    cdef uint64_t high
    cdef int i
    for entry in reached:
        made = PyDict_GetItemWithError(copies, (<Table?> (<tuple?> entry)[0]).id)
        if made == NULL:
            continue
        found.append(entry)
        copy, high = <CopyProgress?> <object> made, (<tuple> entry)[1]
        if high > copy.durable:
            copy.durable = high
            if not copy._waited_for:
                copy.replicated = high
        for i in range(copy.used):
            if copy.replicas[i].waited and isnan(copy.replicas[i].since):
                copy.replicas[i].since = now
    return found


cdef inline PyObject *fetch_copy(dict copies, partition) except? NULL:
    """The copy of this partition, on its way to the cache; NULL if there is none."""
    cdef PyObject *made = PyDict_GetItemWithError(copies, partition)
    if made != NULL:
        fetch_soon(made)
        fetch_soon(<const uint8_t *> made + 64)
        fetch_soon(<const uint8_t *> made + 128)
    return made


def covered(list held not None, dict copies not None):
    cdef PyObject *made[PAIRS]
    cdef Table table
    cdef uint64_t seqno
    cdef Py_ssize_t start, i, count = PyList_GET_SIZE(held)
    for start in range(0, count, PAIRS):
        for i in range(start, min(start + PAIRS, count)):
            table = <Table?> (<tuple?> <object> PyList_GET_ITEM(held, i))[0]
            fetch_soon(&table.durable)  # what is covered is released next
            made[i - start] = fetch_copy(copies, table.id)
            if made[i - start] == NULL:
                return False
        for i in range(start, min(start + PAIRS, count)):
            seqno = (<tuple> <object> PyList_GET_ITEM(held, i))[1]
            copy = <object> made[i - start]
            if (<CopyProgress?> copy).replicated < seqno and copy.watermark < seqno:
                return False
    return True


def acknowledge(pairs, dict copies not None, node, dict epochs not None, double now):
    cdef Py_buffer view
    cdef const uint8_t *p
    cdef list left = []
    cdef CopyProgress copy
    cdef PyObject *made[PAIRS]
    cdef PyObject *epoch
    cdef Replica *replica
    cdef uint64_t seqno, reached
    cdef Py_ssize_t start, at
    cdef int i
    node = named(node)
    PyObject_GetBuffer(pairs, &view, PyBUF_SIMPLE)
    try:
        if view.len % 10:
            raise ValueError(f"{view.len} bytes are not pairs of 10")
        for start in range(0, view.len, 10 * PAIRS):
            for at in range(start, min(start + 10 * PAIRS, view.len), 10):
                made[(at - start) // 10] = fetch_copy(copies, get16(<const uint8_t *> view.buf + at))
            for at in range(start, min(start + 10 * PAIRS, view.len), 10):
                p = <const uint8_t *> view.buf + at
                partition, seqno = get16(p), get64(p + 2)
                if made[(at - start) // 10] == NULL:
                    left.append((partition, seqno))
                    continue
                copy = <CopyProgress?> <object> made[(at - start) // 10]
                epoch = PyDict_GetItemWithError(epochs, partition)
                replica = copy.find(node, False)
                if epoch == NULL or <uint64_t> <object> epoch != copy.epoch or replica == NULL or not replica.waited:
                    left.append((partition, seqno))
                    continue
                if replica.held < 0 or seqno > <uint64_t> replica.held:
                    reached = min(seqno, copy.durable)
                    replica.held = <int64_t> reached
                    for i in range(copy.used):
                        if copy.replicas[i].waited:
                            reached = min(reached, <uint64_t> max(copy.replicas[i].held, 0))
                    if reached > copy.replicated:
                        copy.replicated = reached
                replica.since = now if <uint64_t> replica.held < copy.durable else NAN
    finally:
        PyBuffer_Release(&view)
    return left
