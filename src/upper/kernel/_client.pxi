# Requests and responses of a client, compiled; part of _compiled.pyx. `plain_client` documents them.

from cpython.bytes cimport PyBytes_CheckExact
from cpython.exc cimport PyErr_CheckSignals
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, errno
from posix.unistd cimport getpid

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events, revents
    int poll(pollfd *descriptors, unsigned long count, int milliseconds)
    short POLLIN

cdef extern from "<sys/socket.h>" nogil:
    Py_ssize_t send(int fd, const void *data, size_t size, int flags)
    Py_ssize_t recv(int fd, void *data, size_t size, int flags)

cdef extern from *:
    """
    #include <sys/ioctl.h>
    #include <sys/socket.h>
    /* Bytes that can be read now; where that is not known, as many as are worth a call. */
    static inline Py_ssize_t upper_arrived(int fd) {
        int size = 0;
        return ioctl(fd, FIONREAD, &size) ? 65536 : size;
    }
    #ifdef MSG_NOSIGNAL
    #define UPPER_SEND (MSG_DONTWAIT | MSG_NOSIGNAL)
    #else
    #define UPPER_SEND MSG_DONTWAIT
    #endif
    /* The length of a key or value, and its bytes; -1 for what is neither str nor bytes, or has no bytes in UTF-8. */
    static inline Py_ssize_t upper_text(PyObject *text, const char **data) {
        Py_ssize_t size;
        if (PyBytes_CheckExact(text)) {
            *data = PyBytes_AS_STRING(text);
            return PyBytes_GET_SIZE(text);
        }
        if (!PyUnicode_CheckExact(text)) return -1;
        *data = PyUnicode_AsUTF8AndSize(text, &size);
        if (*data) return size;
        PyErr_Clear();
        return -1;
    }
    static inline void upper_fill(PyObject *made, Py_ssize_t at, PyObject *value) {
        Py_INCREF(value);
        PyTuple_SET_ITEM(made, at, value);
    }
    """
    int UPPER_SEND, MSG_DONTWAIT
    Py_ssize_t upper_arrived(int fd) nogil
    Py_ssize_t upper_text(object text, const char **data)
    void upper_fill(object made, Py_ssize_t at, object value)

cdef enum:
    SHORT = 16384  # bytes of a request or response that `Caller` sends or reads
    MANY = 65536  # bytes that have arrived at once from which on more are expected to follow

cdef object monotonic = time.monotonic
cdef Py_ssize_t MAX_VALUE = layout.MAX_VALUE


cdef inline int partition_of(const uint8_t *key, Py_ssize_t size, int mask) noexcept:
    return (crc_of(key, size) >> 16) & 0x7FFF & mask


cdef inline void put_request(
    uint8_t *to, int opcode, Py_ssize_t key, Py_ssize_t extras, int partition, Py_ssize_t body, uint32_t opaque
) noexcept:
    memset(to, 0, HEADER_SIZE)
    to[0], to[AT_OPCODE], to[AT_EXTRAS_LENGTH] = REQUEST, opcode, extras
    put16(to + AT_KEY_LENGTH, key)
    put16(to + AT_PARTITION, partition)
    put32(to + AT_BODY, body)
    put32(to + AT_OPAQUE, opaque)


cdef struct Part:
    const char *key
    const char *value
    Py_ssize_t key_size, value_size
    int partition


cdef object joined(const Part *parts, Py_ssize_t count, int opcode, bytes extras):
    """The packets of these parts, with their places here as opaques."""
    cdef Py_ssize_t head = PyBytes_GET_SIZE(extras), size = count * (HEADER_SIZE + head), i
    cdef const Part *part
    cdef uint8_t *at
    for i in range(count):
        size += parts[i].key_size + parts[i].value_size
    made = PyBytes_FromStringAndSize(NULL, size)
    at = fresh(made)
    for i in range(count):
        part = parts + i
        put_request(at, opcode, part.key_size, head, part.partition, head + part.key_size + part.value_size, i)
        at += HEADER_SIZE
        memcpy(at, chars(extras), head)
        memcpy(at + head, part.key, part.key_size)
        at += head + part.key_size
        if part.value_size:
            memcpy(at, part.value, part.value_size)
            at += part.value_size
    return made


def requests(int opcode, list keys not None, bytes extras not None, int mask):
    cdef Py_ssize_t count = PyList_GET_SIZE(keys), i
    cdef Part *parts
    packets.check_extras(extras, mask)
    parts = <Part *> malloc(max(1, count) * sizeof(Part))
    try:
        if parts == NULL:
            raise MemoryError
        for i in range(count):
            key = <object> PyList_GET_ITEM(keys, i)
            if not PyBytes_CheckExact(key) or PyBytes_GET_SIZE(key) > 0xFFFF:
                raise packets.bad_key()
            parts[i].key, parts[i].key_size = PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
            parts[i].value, parts[i].value_size = NULL, 0
            parts[i].partition = partition_of(chars(key), parts[i].key_size, mask)
        return joined(parts, count, opcode, extras)
    finally:
        free(parts)


def stores(pairs, Py_ssize_t most, Py_ssize_t size, bytes extras not None, int mask, as_key, as_value):
    cdef list keys = []
    cdef list values = []  # the parts point into them
    cdef Py_ssize_t count = 0, room = 64, total = 0
    cdef Part *more
    cdef Part *parts
    packets.check_extras(extras, mask)
    parts = <Part *> malloc(room * sizeof(Part))
    if parts == NULL:
        raise MemoryError
    try:
        for key, value in pairs:
            if count == room:
                more = <Part *> realloc(parts, 2 * room * sizeof(Part))
                if more == NULL:
                    raise MemoryError
                parts, room = more, 2 * room
            parts[count].key_size = upper_text(key, &parts[count].key)
            if parts[count].key_size < 0 or parts[count].key_size > 0xFFFF:
                key = as_key(key)
                parts[count].key_size = upper_text(key, &parts[count].key)
            parts[count].value_size = upper_text(value, &parts[count].value)
            if parts[count].value_size < 0 or parts[count].value_size > MAX_VALUE:
                value = as_value(value)
                parts[count].value_size = upper_text(value, &parts[count].value)
            if not 0 <= parts[count].key_size <= 0xFFFF or not 0 <= parts[count].value_size <= MAX_VALUE:
                raise packets.bad_key()
            parts[count].partition = partition_of(<const uint8_t *> parts[count].key, parts[count].key_size, mask)
            keys.append(key)
            values.append(value)
            total += parts[count].value_size
            count += 1
            if count >= most or total >= size:
                break
        return joined(parts, count, SET, extras), keys
    finally:
        free(parts)


def place(list batch not None, list placed not None):
    cdef Py_ssize_t count = PyList_GET_SIZE(placed), i
    cdef uint64_t opaque
    cdef list others = []
    for i in range(PyList_GET_SIZE(batch)):
        answer = <object> PyList_GET_ITEM(batch, i)
        if not isinstance(answer, tuple) or PyTuple_GET_SIZE(answer) < 4:
            raise packets.short_answer()
        opaque = <object> PyTuple_GET_ITEM(answer, 2)
        if <object> PyTuple_GET_ITEM(answer, 1) or opaque >= <uint64_t> count:
            others.append(answer)
        else:
            placed[opaque] = answer
    return others


def written(list batch not None, type kind not None):
    cdef Py_ssize_t i
    cdef list stored = []
    for i in range(PyList_GET_SIZE(batch)):
        answer = <object> PyList_GET_ITEM(batch, i)
        if not isinstance(answer, tuple) or PyTuple_GET_SIZE(answer) < 4:
            raise packets.short_answer()
        made = PyType_GenericAlloc(kind, 4)
        upper_fill(made, 0, <object> PyTuple_GET_ITEM(answer, 3))
        upper_fill(made, 1, None)
        upper_fill(made, 2, None)
        upper_fill(made, 3, None)
        stored.append(made)
    return stored


def answers(data, type kind not None):
    cdef Py_buffer view
    cdef const uint8_t *base
    cdef const uint8_t *p
    cdef Py_ssize_t at = 0, past, extras, klen
    cdef int opcode = 0
    cdef list found = []
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *> view.buf
        while True:
            past = packet(base, at, view.len, MAX_BODY, False, &opcode)
            if past == 0:
                break
            p = base + at
            if p[0] != RESPONSE:
                raise packets.no_response(at)
            extras, klen = p[AT_EXTRAS_LENGTH], get16(p + AT_KEY_LENGTH)
            made = PyType_GenericAlloc(kind, 8)
            upper_fill(made, 0, p[AT_OPCODE])
            upper_fill(made, 1, get16(p + AT_PARTITION))
            upper_fill(made, 2, get32(p + AT_OPAQUE))
            upper_fill(made, 3, get64(p + AT_CAS))
            p += HEADER_SIZE
            upper_fill(made, 4, PyBytes_FromStringAndSize(<const char *> p, extras))
            p += extras
            upper_fill(made, 5, PyBytes_FromStringAndSize(<const char *> p, klen))
            p += klen
            upper_fill(made, 6, PyBytes_FromStringAndSize(<const char *> p, base + past - p))
            upper_fill(made, 7, base[at + AT_DATA_TYPE])
            found.append(made)
            at = past
    finally:
        PyBuffer_Release(&view)
    return at, found


def receive(int fd, Py_ssize_t most, bytes rest not None=b""):
    cdef PyObject *made = NULL
    cdef uint8_t *to
    cdef Py_ssize_t size = 0, room = 0, arrived, got = 1, kept = PyBytes_GET_SIZE(rest)
    cdef int error = 0
    if most <= 0:
        raise ValueError(f"{most} bytes cannot be received")
    try:
        while size < most:
            arrived = upper_arrived(fd)
            if arrived <= 0 and size:
                break
            if room - size < min(arrived, most - size) or room == size:
                # What is left over is given back at the end, so a large piece gets its whole room at once.
                room = most if size or arrived >= MANY else min(most, max(arrived, 4096))
                if made == NULL:
                    made = new_bytes(NULL, kept + room)
                    memcpy(bytes_in(made), chars(rest), kept)
                else:
                    resize_bytes(&made, kept + room)
            to = bytes_in(made) + kept + size
            with nogil:
                got = recv(fd, to, room - size, MSG_DONTWAIT)
                error = errno if got < 0 else 0
            if error == EINTR and size == 0:
                PyErr_CheckSignals()
                continue
            if got <= 0:
                break  # also a signal that came behind some bytes: they must not be lost
            size += got
        if error and error != EAGAIN and size == 0:
            raise OSError(error, os.strerror(error))
        resize_bytes(&made, kept + size if size else 0)
        return <object> made, size == 0 and got == 0
    finally:
        Py_XDECREF(made)


cdef class Caller:
    cdef object pool, acquire, release, suspects
    cdef tuple owners, reads, writes
    cdef double most
    cdef int pid
    cdef uint8_t buffer[SHORT]

    def __init__(self, pool, lock, suspects):
        self.pool, self.acquire, self.release, self.suspects = pool, lock.acquire, lock.release, suspects
        self.owners = None

    def learn(self, tuple owners not None, tuple reads not None, tuple writes not None, double most):
        self.owners = None
        self.reads, self.writes, self.most, self.pid = reads, writes, most, getpid()
        self.owners = owners

    def forget(self):
        self.owners = None

    def ask(self, int opcode, bytes extras not None, type kind not None, tuple arguments not None, double timeout):
        cdef const char *key = NULL
        cdef const char *value = NULL
        cdef Py_ssize_t klen, vlen = 0, head = PyBytes_GET_SIZE(extras), size
        cdef tuple owners = self.owners
        cdef tuple lines = self.reads if opcode == GET else self.writes
        cdef int partition, owner, fd
        if owners is None or self.suspects or getpid() != self.pid:
            return None
        if PyTuple_GET_SIZE(arguments) != (1 if opcode == GET else 2):
            return None
        klen = upper_text(<object> PyTuple_GET_ITEM(arguments, 0), &key)
        if opcode != GET:
            vlen = upper_text(<object> PyTuple_GET_ITEM(arguments, 1), &value)
        size = HEADER_SIZE + head + klen + vlen
        if klen < 0 or vlen < 0 or size > SHORT:
            return None
        partition = partition_of(<const uint8_t *> key, klen, PyTuple_GET_SIZE(owners) - 1)
        owner = <object> PyTuple_GET_ITEM(owners, partition)
        if owner < 0 or owner >= PyTuple_GET_SIZE(lines):
            return None
        connection = <object> PyTuple_GET_ITEM(lines, owner)
        if connection is None or not self.acquire(False):
            return None
        try:
            fd = connection.fd
            if fd < 0:
                return None
            put_request(self.buffer, opcode, klen, head, partition, size - HEADER_SIZE, 0)
            memcpy(self.buffer + HEADER_SIZE, chars(extras), head)
            memcpy(self.buffer + HEADER_SIZE + head, key, klen)
            if vlen:
                memcpy(self.buffer + HEADER_SIZE + head + klen, value, vlen)
            return self.exchange(connection, fd, size, kind, opcode, partition, min(timeout, self.most))
        finally:
            self.release()

    cdef object exchange(
        self, object connection, int fd, Py_ssize_t size, type kind, int opcode, int partition, double timeout
    ):
        cdef pollfd waiting
        cdef Py_ssize_t sent, received = 0
        cdef int ready, error = 0
        cdef double deadline = monotonic() + timeout
        waiting.fd, waiting.events, waiting.revents = fd, POLLIN, 0
        with nogil:
            ready = poll(&waiting, 1, 0)
        if ready != 0:  # it is closed, or something came without a request
            return None
        try:
            with nogil:
                sent = send(fd, self.buffer, size, UPPER_SEND)
                error = errno if sent < 0 else 0
                if sent == size:
                    ready = poll(&waiting, 1, milliseconds(timeout))
                    if ready == 1 and waiting.revents == POLLIN:
                        received = recv(fd, self.buffer, SHORT, MSG_DONTWAIT)
            if received >= HEADER_SIZE:
                made = self.result(received, kind, opcode, partition)
                if made is not None:
                    return made
            if error == EAGAIN or error == EINTR:
                error = 0
            PyErr_CheckSignals()
            if received > 0:
                unsent, data = b"", PyBytes_FromStringAndSize(<char *> self.buffer, received)
            else:
                # The request is in the buffer as long as nothing was received.
                sent = max(0, sent)
                unsent, data = PyBytes_FromStringAndSize(<char *> self.buffer + sent, size - sent), b""
            return self.pool.finish(connection, unsent, data, error, deadline)
        except:
            self.pool.abandon(connection)
            raise

    cdef object result(self, Py_ssize_t size, type kind, int opcode, int partition):
        cdef const uint8_t *p = self.buffer
        cdef Py_ssize_t extras = p[AT_EXTRAS_LENGTH], klen = get16(p + AT_KEY_LENGTH), body = get32(p + AT_BODY), at
        if (
            p[0] != RESPONSE or get16(p + AT_PARTITION) or get32(p + AT_OPAQUE)
            or size != HEADER_SIZE + body or extras + klen > body
        ):
            return None
        cas = get64(p + AT_CAS)
        if opcode == GET:
            at = HEADER_SIZE + extras + klen
            made = PyType_GenericAlloc(kind, 3)
            upper_fill(made, 0, PyBytes_FromStringAndSize(<const char *> p + at, size - at))
            upper_fill(made, 1, cas)
            upper_fill(made, 2, get32(p + HEADER_SIZE) if extras >= FLAGS_EXTRAS else 0)
            return made
        made = PyType_GenericAlloc(kind, 4)
        upper_fill(made, 0, cas)
        if extras == TOKEN_EXTRAS:
            upper_fill(made, 1, get64(p + HEADER_SIZE))
            upper_fill(made, 2, get64(p + HEADER_SIZE + 8))
            upper_fill(made, 3, partition)
        else:
            for at in range(1, 4):
                upper_fill(made, at, None)
        return made


cdef inline int milliseconds(double seconds) noexcept nogil:
    return 2147483647 if seconds > 2147483.0 else <int> (seconds * 1000 + 0.999)
