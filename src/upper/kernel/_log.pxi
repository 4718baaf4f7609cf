# The records of a batch in one piece of memory, compiled; part of _compiled.pyx. `plain_log` documents it.
#
# A log begins with space for the head of its frame. Cells of `_map.h` follow: records as the journal stores them, and LARGE
# ones, whose bytes object the log shares with its partition. A log without large records is written without a copy.

cdef enum:
    FRAME_HEAD = 32  # bytes before the first record
    FIRST_ROOM = 64 << 10
    SHARED_VALUE = 8 << 10  # bytes of a value from which on a log refers to the record
    POOLED = 3  # buffers that are kept for the next logs, to save page faults
    POOLED_ROOM = 4 << 20  # bytes of a buffer that is kept, at most

cdef extern from *:
    """
    #ifdef UPPER_EXACT_BLOCKS /* so that a sanitizer detects an access past the end of a log */
    enum { EXACT_LOGS = 1 };
    #else
    enum { EXACT_LOGS = 0 };
    #endif
    """
    enum: EXACT_LOGS

cdef uint8_t *pool[POOLED]
cdef Py_ssize_t pool_rooms[POOLED]
cdef int pooled = 0


cdef class Log:
    """`plain_log.Log`."""
    cdef uint8_t *data
    cdef Py_ssize_t used, room  # bytes of `data`
    cdef Py_ssize_t count, bytes  # records, and how long they are
    cdef Py_ssize_t shared  # cells with an object
    cdef bint sealed  # a thread writes it

    def __cinit__(self, records=()):
        self.used = FRAME_HEAD

    def __init__(self, records=()):
        for record in records:
            self.append(record)

    def __dealloc__(self):
        global pooled
        cdef Py_ssize_t at = FRAME_HEAD
        while self.shared and at < self.used:
            if self.data[at + AT_OPCODE] == CELL_LARGE:
                Py_XDECREF(cell_object(self.data + at))
                self.shared -= 1
            at += cell_length(self.data + at)
        if self.data != NULL and self.room <= POOLED_ROOM and pooled < POOLED and not EXACT_LOGS:
            pool[pooled], pool_rooms[pooled] = self.data, self.room
            pooled += 1
        else:
            free(self.data)

    cdef uint8_t *reserve(self, Py_ssize_t length) except NULL:
        """A pointer to the next cell, with room for this length."""
        global pooled
        cdef Py_ssize_t room
        cdef uint8_t *data
        if self.sealed:
            raise RuntimeError("a log that is being written takes no records")
        if self.data == NULL and pooled:
            pooled -= 1
            self.data, self.room = pool[pooled], pool_rooms[pooled]
        if self.room - self.used < length:
            room = self.used + length
            if not EXACT_LOGS:
                room = max(<Py_ssize_t> FIRST_ROOM, room + self.room // 2)
            data = <uint8_t *> realloc(self.data, room)
            if data == NULL:
                raise MemoryError
            self.data, self.room = data, room
        return self.data + self.used

    cdef inline void took(self, Py_ssize_t length, Py_ssize_t size) noexcept:
        """Count the cell of this length that was written there, with a record of this size."""
        self.used += length
        self.bytes += size
        self.count += 1

    cdef uint8_t *reserve_record(self, object record) except NULL:
        """Make room for this record."""
        return self.reserve(PyBytes_GET_SIZE(record))

    cdef void add(self, object record) noexcept:
        """Add a well-formed record, for which `reserve` made room."""
        cdef const uint8_t *p = chars(record)
        cdef uint8_t *to = self.data + self.used
        cdef Py_ssize_t size = PyBytes_GET_SIZE(record), head = HEADER_SIZE + p[AT_EXTRAS_LENGTH] + get16(p + AT_KEY_LENGTH)
        if p[AT_OPCODE] == MUTATION and size - head >= SHARED_VALUE:
            memcpy(to, p, head)
            to[AT_OPCODE] = CELL_LARGE
            put32(to + AT_BODY, head + sizeof(PyObject *) - HEADER_SIZE)
            Py_INCREF(record)
            cell_set_object(to, <PyObject *> record)
            self.shared += 1
            self.took(head + sizeof(PyObject *), size)
        else:
            memcpy(to, p, size)
            self.took(size, size)

    def append(self, record):
        packets.check_packet(record)
        self.reserve_record(record)
        self.add(record)

    def take(self, record):
        """For the plain loops; here everything is checked."""
        self.append(record)

    def __len__(self):
        return self.count

    @property
    def size(self):
        return self.bytes

    cdef object record_at(self, Py_ssize_t at):
        cdef const uint8_t *c = self.data + at
        if c[AT_OPCODE] == CELL_LARGE:
            return <object> cell_object(c)
        return PyBytes_FromStringAndSize(<const char *> c, cell_length(c))

    def __iter__(self):
        cdef list found = []
        cdef Py_ssize_t at = FRAME_HEAD
        while at < self.used:
            found.append(self.record_at(at))
            at += cell_length(self.data + at)
        return iter(found)

    def __eq__(self, other):
        return list(self) == list(other)

    __hash__ = None

    def __repr__(self):
        return f"Log({list(self)})"

    def __reduce__(self):
        return Log, (list(self),)

    cdef Log chosen(self, int partition):
        """The same without the records of this partition, or without facts if it is -1."""
        cdef Log found = Log()
        cdef Py_ssize_t at = FRAME_HEAD, length
        cdef const uint8_t *c
        while at < self.used:
            c = self.data + at
            length = cell_length(c)
            if get16(c + AT_PARTITION) != partition if partition >= 0 else (
                MUTATION <= c[AT_OPCODE] <= FLUSH or c[AT_OPCODE] == CELL_LARGE
            ):
                memcpy(found.reserve(length), c, length)
                if c[AT_OPCODE] == CELL_LARGE:
                    Py_INCREF(<object> cell_object(c))
                    found.shared += 1
                found.took(length, cell_record_length(c))
            at += length
        return found

    def changes(self):
        return self.chosen(-1)

    def without(self, uint16_t partition):
        return self.chosen(partition)

    def partitions(self):
        cdef set found = set()
        cdef Py_ssize_t at = FRAME_HEAD
        while at < self.used:
            found.add(get16(self.data + at + AT_PARTITION))
            at += cell_length(self.data + at)
        return found

    def payload(self):
        if self.shared:
            return b"".join(self)
        return PyBytes_FromStringAndSize(<const char *> self.data + FRAME_HEAD, self.bytes) if self.count else b""
