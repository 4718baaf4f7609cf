# How far the replicas of active copies are, compiled; part of _compiled.pyx. `plain_tracking` documents it.

cdef extern from "Python.h":
    void PyUnicode_InternInPlace(PyObject **text)

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
    cdef Replica *replicas
    cdef int used

    def __cinit__(self):
        self._waited_for, self.replicas, self.used = frozenset(), NULL, 0

    def __dealloc__(self):
        cdef int i
        for i in range(self.used):
            Py_XDECREF(self.replicas[i].node)
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
        more = <Replica *> realloc(self.replicas, (self.used + 1) * sizeof(Replica))
        if more == NULL:
            raise MemoryError
        self.replicas = more
        node = named(node)
        Py_INCREF(node)
        more[self.used] = Replica(<PyObject *> node, -1, NAN, False)
        self.used += 1
        return &more[self.used - 1]

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


def wrote(list reached not None, dict copies not None, double now):
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


def covered(list held not None, dict copies not None):
    cdef PyObject *made
    cdef uint64_t seqno
    for entry in held:
        made = PyDict_GetItemWithError(copies, (<Table?> (<tuple?> entry)[0]).id)
        if made == NULL:
            return False
        seqno = (<tuple> entry)[1]
        if (<CopyProgress?> <object> made).replicated < seqno and (<object> made).watermark < seqno:
            return False
    return True


def acknowledge(pairs, dict copies not None, node, dict epochs not None, double now):
    cdef Py_buffer view
    cdef const uint8_t *p
    cdef list left = []
    cdef CopyProgress copy
    cdef PyObject *made
    cdef Replica *replica
    cdef uint64_t seqno, reached
    cdef Py_ssize_t at
    cdef int i
    node = named(node)
    PyObject_GetBuffer(pairs, &view, PyBUF_SIMPLE)
    try:
        if view.len % 10:
            raise ValueError(f"{view.len} bytes are not pairs of 10")
        for at in range(0, view.len, 10):
            p = <const uint8_t *> view.buf + at
            partition, seqno = get16(p), get64(p + 2)
            made = PyDict_GetItemWithError(copies, partition)
            if made == NULL:
                left.append((partition, seqno))
                continue
            copy = <CopyProgress?> <object> made
            made = PyDict_GetItemWithError(epochs, partition)
            replica = copy.find(node, False)
            if made == NULL or <uint64_t> <object> made != copy.epoch or replica == NULL or not replica.waited:
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
