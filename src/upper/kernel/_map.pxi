# The records of a partition, compiled; part of _compiled.pyx. `plain_map` documents it, `_map.h` has the data structure.

cdef extern from "_map.h":
    enum:
        CELL_COLD
        CELL_LARGE
        COLD_HEAD
        AT_COLD_PLACE
        AT_COLD_LENGTH
        LARGE_VALUE
    uint64_t map_secret[2]
    uint64_t map_held
    ctypedef struct upper_map:
        uint64_t count, size, evicted, tombstones, last, slot_count
        uint32_t epoch, blocks
        int died
    ctypedef struct upper_view:
        uint32_t piece, at
    void map_init(upper_map *m)
    void map_clear(upper_map *m)
    uint64_t map_memory(const upper_map *m)
    uint32_t map_tag(const uint8_t *key, size_t length)
    uint64_t *map_find(const upper_map *m, const uint8_t *key, size_t length, uint32_t tag)
    uint8_t *map_cell(const upper_map *m, uint64_t slot)
    void map_fetch_head(const upper_map *m)
    void map_fetch_all(const upper_map *m)
    void map_fetch_slot(const upper_map *m, uint32_t tag, int put)
    bint map_has(const upper_map *m, const uint64_t *slot, const uint8_t *key, size_t length)
    uint64_t *map_fetch_cell(const upper_map *m, uint32_t tag, int put)
    void map_fetch_end(const upper_map *m)
    int map_put(upper_map *m, const uint8_t *record, size_t length, PyObject *object) except -1
    int map_put_at(upper_map *m, const uint8_t *record, size_t length, PyObject *object, uint32_t tag, uint64_t *slot) except -1
    int map_try_put_at "map_put_at"(upper_map *m, const uint8_t *record, size_t length, PyObject *object, uint32_t tag, uint64_t *slot)
    int map_move_out(upper_map *m, uint64_t slot, uint64_t place, uint32_t length) except -1
    void map_forget(upper_map *m, uint64_t *slot)
    int view_open(upper_view *v, upper_map *m, uint64_t seqno)
    const uint8_t *view_cell(const upper_view *v, uint32_t *piece, uint32_t *at)
    size_t view_room(const upper_view *v, size_t most)
    void view_advance(upper_view *v, uint32_t piece, uint32_t at)
    void view_close(upper_view *v)
    uint32_t cell_length(const uint8_t *c)
    uint32_t cell_key_length(const uint8_t *c)
    const uint8_t *cell_key(const uint8_t *c)
    uint64_t cell_seqno(const uint8_t *c)
    const uint8_t *cell_record(const uint8_t *c)
    size_t cell_record_length(const uint8_t *c)
    PyObject *cell_object(const uint8_t *c)
    void cell_set_object(uint8_t *c, PyObject *object)
    int cell_is_deletion(const uint8_t *c)

cdef extern from "Python.h":
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *data, Py_ssize_t size) except NULL
    int resize_bytes "_PyBytes_Resize"(PyObject **data, Py_ssize_t size) except -1
    uint8_t *bytes_in "(uint8_t *)PyBytes_AS_STRING"(PyObject *data)

cdef enum:
    DCP_MORE = 8  # bytes that a form of DCP adds to a record, at most
    LAST_RECORD = 2048  # bytes: one that is larger makes `join` grow its result

memcpy(map_secret, chars(os.urandom(16)), 16)


cdef object entry_of(const uint8_t *c):
    """A cell as the bytes of its record, or as its location."""
    cdef object record
    if c[AT_OPCODE] == CELL_COLD:
        return (
            (<object> cell_seqno(c)) << SEQNO_SHIFT | (<object> get64(c + AT_COLD_PLACE)) << LENGTH_BITS | get32(c + AT_COLD_LENGTH)
        )
    if c[AT_OPCODE] == CELL_LARGE:
        return <object> cell_object(c)
    record = PyBytes_FromStringAndSize(<const char *> c, cell_length(c))
    put32(fresh(record) + AT_OPAQUE, 0)  # a view may see what died since
    return record


cdef object key_of(const uint8_t *c):
    return PyBytes_FromStringAndSize(<const char *> cell_key(c), cell_key_length(c))


cdef class RecordMap:
    """`plain_map.RecordMap`."""
    cdef upper_map map

    def __cinit__(self):
        map_init(&self.map)

    def __dealloc__(self):
        map_clear(&self.map)

    def __len__(self):
        return self.map.count

    @property
    def size(self):
        return self.map.size

    @property
    def evicted(self):
        return self.map.evicted

    @property
    def tombstones(self):
        return self.map.tombstones

    @property
    def memory(self):
        return map_memory(&self.map)

    @property
    def last(self):
        return self.map.last

    cdef uint64_t *find(self, key) except? NULL:
        if not PyBytes_Check(key):
            raise TypeError(f"a key is bytes, not {type(key).__name__}")
        return map_find(&self.map, chars(key), PyBytes_GET_SIZE(key), map_tag(chars(key), PyBytes_GET_SIZE(key)))

    def get(self, key):
        cdef uint64_t *slot = self.find(key)
        return None if slot == NULL else entry_of(map_cell(&self.map, slot[0]))

    def __getitem__(self, key):
        cdef uint64_t *slot = self.find(key)
        if slot == NULL:
            raise KeyError(key)
        return entry_of(map_cell(&self.map, slot[0]))

    def __contains__(self, key):
        return self.find(key) != NULL

    def put(self, record):
        packets.check_change(record)
        map_put(&self.map, chars(record), PyBytes_GET_SIZE(record), <PyObject *> record)

    def take(self, key, record):
        """For the plain loops; here everything is checked."""
        self.put(record)

    def move_out(self, key, uint64_t seqno, place):
        cdef uint64_t *slot = self.find(key)
        if slot == NULL or cell_seqno(map_cell(&self.map, slot[0])) != seqno:
            return False
        return map_move_out(&self.map, slot[0], place >> LENGTH_BITS & PLACE_MASK, place & LENGTH_MASK) == 1

    def forget(self, key, uint64_t seqno):
        cdef uint64_t *slot = self.find(key)
        if slot == NULL or cell_seqno(map_cell(&self.map, slot[0])) != seqno:
            return False
        map_forget(&self.map, slot)
        return True

    def clear(self):
        map_clear(&self.map)

    def after(self, seqno):
        cdef RecordView view = RecordView.__new__(RecordView)
        if view_open(&view.view, &self.map, 0 if seqno <= 0 else min(seqno, MAX_CAS)):
            raise MemoryError
        view.evicted = self.map.evicted != 0
        view.last = self.map.last if self.map.last > seqno else 0
        return view

    def expiring(self):
        cdef RecordView view = self.after(0)
        cdef uint32_t piece = view.view.piece, at = view.view.at
        cdef const uint8_t *c
        cdef list found = []
        while True:
            c = view_cell(&view.view, &piece, &at)
            if c == NULL:
                return found
            at += cell_length(c)
            if (c[AT_OPCODE] == MUTATION or c[AT_OPCODE] == CELL_LARGE) and get32(c + AT_EXPIRATION):
                found.append((get32(c + AT_EXPIRATION), key_of(c)))

    def oldest_deletion(self):
        cdef RecordView view = self.after(0)
        cdef uint32_t piece = view.view.piece, at = view.view.at
        cdef const uint8_t *c
        if not self.map.tombstones:
            return None
        while True:
            c = view_cell(&view.view, &piece, &at)
            if c == NULL or cell_seqno(c) == self.map.last:
                return None
            if cell_is_deletion(c):
                return get64(c + AT_CAS)
            at += cell_length(c)

    def some_keys(self, Py_ssize_t start, Py_ssize_t count):
        cdef RecordView view = self.after(0)
        cdef uint32_t piece = view.view.piece, at = view.view.at
        cdef const uint8_t *c
        cdef list found = []
        while count > 0:
            c = view_cell(&view.view, &piece, &at)
            if c == NULL:
                break
            at += cell_length(c)
            if start > 0:
                start -= 1
                continue
            count -= 1
            found.append(key_of(c))
        return found

    def keys(self):
        return self.some_keys(0, self.map.count)

    def __iter__(self):
        return iter(self.keys())

    def values(self):
        return self.after(0).take(1 << 62)

    def items(self):
        return list(zip(self.keys(), self.values(), strict=True))

    def __eq__(self, other):
        return dict(self.items()) == dict(other)

    __hash__ = None


cdef object PLACE_MASK = (<object> 1 << (SEQNO_SHIFT - LENGTH_BITS)) - 1
cdef object LENGTH_MASK = (1 << LENGTH_BITS) - 1


cdef class RecordView:
    """`plain_map.RecordView`."""
    cdef upper_view view
    cdef readonly bint evicted
    cdef readonly object last

    def __dealloc__(self):
        view_close(&self.view)

    def __len__(self):
        cdef uint32_t piece = self.view.piece, at = self.view.at
        cdef Py_ssize_t count = 0
        cdef const uint8_t *c
        while True:
            c = view_cell(&self.view, &piece, &at)
            if c == NULL:
                return count
            count += 1
            at += cell_length(c)

    def close(self):
        view_close(&self.view)

    def take(self, Py_ssize_t size, Py_ssize_t most=1 << 62):
        cdef uint32_t piece = self.view.piece, at = self.view.at
        cdef Py_ssize_t filled = 0
        cdef const uint8_t *c
        cdef list found = []
        while most > 0 and (filled < size or not found):
            c = view_cell(&self.view, &piece, &at)
            if c == NULL:
                break
            found.append(entry_of(c))
            filled += cell_record_length(c)
            most -= 1
            at += cell_length(c)
        view_advance(&self.view, piece, at)
        return found

    def join(self, Py_ssize_t size, opaque, *, int dcp=0, Py_ssize_t below=1 << 62):
        cdef uint32_t number = packets.fits_opaque(opaque)
        cdef uint32_t piece = self.view.piece, at = self.view.at
        cdef Py_ssize_t filled = 0, written = 0, length, items = 0
        cdef Py_ssize_t room = view_room(&self.view, max(size, 0))
        cdef uint64_t last = 0
        cdef const uint8_t *c
        # A record is read from memory once: it is copied before the size of all of them is known. The last one may
        # exceed `size`, and a form of DCP is longer.
        room += room // 32 + LAST_RECORD
        cdef PyObject *joined = new_bytes(NULL, room)
        try:
            while filled < size or not items:
                c = view_cell(&self.view, &piece, &at)
                if c == NULL or <Py_ssize_t> cell_record_length(c) >= below:
                    break
                if c[AT_OPCODE] == CELL_COLD:
                    raise ValueError("a record of this view is not in memory; use `take`")
                length = cell_record_length(c)
                if written + length + DCP_MORE > room:
                    room += length + room // 2 + DCP_MORE
                    resize_bytes(&joined, room)
                written += emit(bytes_in(joined) + written, cell_record(c), length, dcp, number)
                filled += length
                items += 1
                last = cell_seqno(c)
                at += cell_length(c)
            resize_bytes(&joined, written)
            view_advance(&self.view, piece, at)
            return <object> joined, items, last
        finally:
            Py_XDECREF(joined)

    def deletions(self):
        cdef uint32_t piece = self.view.piece, at = self.view.at
        cdef const uint8_t *c
        cdef list found = []
        while True:
            c = view_cell(&self.view, &piece, &at)
            if c == NULL:
                return found
            if cell_is_deletion(c):
                found.append(entry_of(c))
            at += cell_length(c)

    def places(self):
        cdef uint32_t piece = self.view.piece, at = self.view.at
        cdef const uint8_t *c
        cdef list found = []
        while True:
            c = view_cell(&self.view, &piece, &at)
            if c == NULL:
                return found
            if c[AT_OPCODE] == CELL_COLD:
                found.append(entry_of(c))
            at += cell_length(c)


def map_memory_held():
    """Bytes that all maps of this process have from the system for their blocks."""
    return map_held
