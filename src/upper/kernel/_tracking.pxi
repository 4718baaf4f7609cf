# How far the replicas of active copies are, compiled; part of _compiled.pyx. `plain_tracking` says what it means.

cdef class CopyProgress:
    """`plain_tracking.CopyProgress`."""
    cdef public uint64_t durable, replicated, epoch
    cdef public frozenset waited_for
    cdef public dict _held, _silent_since

    def __cinit__(self):
        self.waited_for, self._held, self._silent_since = frozenset(), {}, {}


def wrote(list reached not None, dict copies not None, now):
    cdef list found = []
    cdef CopyProgress copy
    cdef PyObject *made
    cdef uint64_t high
    for entry in reached:
        made = PyDict_GetItemWithError(copies, (<tuple?> entry)[0].id)
        if made == NULL:
            continue
        found.append(entry)
        copy, high = <CopyProgress?> <object> made, (<tuple> entry)[1]
        if high > copy.durable:
            copy.durable = high
            if not copy.waited_for:
                copy.replicated = high
        for node in copy.waited_for:
            copy._silent_since.setdefault(node, now)
    return found


def covered(list held not None, dict copies not None):
    cdef PyObject *made
    cdef uint64_t seqno
    for entry in held:
        made = PyDict_GetItemWithError(copies, (<tuple?> entry)[0].id)
        if made == NULL:
            return False
        seqno = (<tuple> entry)[1]
        if (<CopyProgress?> <object> made).replicated < seqno and (<object> made).watermark < seqno:
            return False
    return True


def acknowledge(pairs, dict copies not None, node, dict epochs not None, now):
    cdef Py_buffer view
    cdef const uint8_t *p
    cdef list left = []
    cdef CopyProgress copy
    cdef PyObject *made
    cdef uint64_t seqno, reached, other
    cdef int64_t has
    cdef Py_ssize_t at
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
            if made == NULL or <object> made != copy.epoch or node not in copy.waited_for:
                left.append((partition, seqno))
                continue
            made = PyDict_GetItemWithError(copy._held, node)
            has = -1 if made == NULL else <uint64_t> <object> made
            if has < 0 or seqno > <uint64_t> has:
                has = min(seqno, copy.durable)
                PyDict_SetItem(copy._held, node, has)
                reached = <uint64_t> has
                for each in copy.waited_for:
                    made = PyDict_GetItemWithError(copy._held, each)
                    other = 0 if made == NULL else <uint64_t> <object> made
                    reached = min(reached, other)
                if reached > copy.replicated:
                    copy.replicated = reached
            if <uint64_t> has < copy.durable:
                PyDict_SetItem(copy._silent_since, node, now)
            elif PyDict_GetItemWithError(copy._silent_since, node) != NULL:
                PyDict_DelItem(copy._silent_since, node)
    finally:
        PyBuffer_Release(&view)
    return left
