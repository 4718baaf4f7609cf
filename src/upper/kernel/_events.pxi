# Changes as objects, compiled; part of _compiled.pyx. `plain_events` documents it.

cdef extern from *:
    """
    #include <structmember.h>
    /* The offset of an attribute of a class with __slots__; -1 if it has none. */
    static Py_ssize_t slot_offset(PyObject *descriptor) {
        if (!PyObject_TypeCheck(descriptor, &PyMemberDescr_Type)) return -1;
        return ((PyMemberDescrObject *)descriptor)->d_member->offset;
    }
    static inline void set_slot(PyObject *object, Py_ssize_t offset, PyObject *value) {
        Py_INCREF(value);
        *(PyObject **)((char *)object + offset) = value;
    }
    """
    Py_ssize_t slot_offset(object descriptor)
    void set_slot(object made, Py_ssize_t offset, object value)
    object PyType_GenericAlloc(type kind, Py_ssize_t items)

cdef enum:
    FIELDS = 12
    GONE_FIELDS = 7  # of a deletion or an expiration
    XATTR = 4  # of the data types: the value begins with extended attributes

FIELD_NAMES = (
    "partition", "seqno", "branch", "key", "revision", "cas", "xattrs",
    "value", "flags", "expiration", "lock_time", "data_type",
)


cdef class Shape:
    """Where the attributes of a class of changes are."""
    cdef type kind
    cdef Py_ssize_t offsets[FIELDS]

    def __cinit__(self, type kind not None, int fields):
        cdef int i
        self.kind = kind
        for i in range(fields):
            self.offsets[i] = slot_offset(getattr(kind, FIELD_NAMES[i]))
            if self.offsets[i] < 0:
                raise TypeError(f"{kind.__name__}.{FIELD_NAMES[i]} is not in a slot")


cdef object SHAPED = None  # the classes of the last call
cdef Shape LIVE = None
cdef Shape DELETED = None
cdef Shape EXPIRED = None


def events(data, Py_ssize_t start, Py_ssize_t end, consumers, tuple kinds not None, *, bint dcp=False):
    global SHAPED, LIVE, DELETED, EXPIRED
    cdef Py_buffer view
    cdef const uint8_t *base
    cdef const uint8_t *p
    cdef Py_ssize_t at = start, past, klen, begin, value_end
    cdef int opcode = 0
    cdef int64_t last = -1
    cdef uint32_t opaque
    cdef list found = []
    cdef Shape shape
    cdef object made, branch = None, partition = None
    if SHAPED is not kinds:
        LIVE, DELETED, EXPIRED = Shape(kinds[0], FIELDS), Shape(kinds[1], GONE_FIELDS), Shape(kinds[2], GONE_FIELDS)
        SHAPED = kinds
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        within(start, end, view.len)
        base = <const uint8_t *> view.buf
        while at < end:
            past = packet(base, at, end, MAX_RANGE, dcp, &opcode)
            if past == 0 or opcode < 0:
                break
            p = base + at
            opaque, klen, begin = get32(p + AT_OPAQUE), get16(p + AT_KEY_LENGTH), HEADER_SIZE + p[AT_EXTRAS_LENGTH]
            if klen == 0 or p[AT_DATA_TYPE] & XATTR:
                break
            if opaque != last:
                partition = opaque
                consumer = consumers.get(partition)
                if consumer is None or consumer.partition != opaque:
                    break
                branch, last = consumer.stream.branch, opaque
            if get16(p + AT_PARTITION) != opaque:
                break
            value_end = past - at
            if opcode == MUTATION:
                if dcp:
                    value_end -= get16(p + AT_DCP_META)
                    if value_end < begin + klen:
                        break
                shape = LIVE
            else:
                shape = EXPIRED if opcode == EXPIRATION else DELETED
            made = PyType_GenericAlloc(shape.kind, 0)
            set_slot(made, shape.offsets[0], partition)
            set_slot(made, shape.offsets[1], get64(p + AT_SEQNO))
            set_slot(made, shape.offsets[2], branch)
            set_slot(made, shape.offsets[3], PyBytes_FromStringAndSize(<const char *> p + begin, klen))
            set_slot(made, shape.offsets[4], get64(p + AT_REVISION))
            set_slot(made, shape.offsets[5], get64(p + AT_CAS))
            set_slot(made, shape.offsets[6], None)
            if opcode == MUTATION:
                begin += klen
                set_slot(made, shape.offsets[7], PyBytes_FromStringAndSize(<const char *> p + begin, value_end - begin))
                set_slot(made, shape.offsets[8], get32(p + AT_FLAGS))
                set_slot(made, shape.offsets[9], get32(p + AT_EXPIRATION))
                set_slot(made, shape.offsets[10], get32(p + AT_LOCK_TIME))
                set_slot(made, shape.offsets[11], p[AT_DATA_TYPE])
            found.append(made)
            at = past
    finally:
        PyBuffer_Release(&view)
    return at, found
