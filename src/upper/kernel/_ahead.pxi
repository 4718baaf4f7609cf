# Looking ahead in a run of requests; part of _compiled.pyx.
#
# A request for one of a million keys waits for memory again and again: for the map, the slot of its index, the entry,
# the key and the record. Nothing else in a run costs as much. So the run looks at its next requests together, has all
# their maps fetched, then all slots, all entries, all keys and records, and comes to them when they are there.
#
# For that it must know where an interpreter keeps the index of a dict. It never acts on what it finds there: it
# asks the processor to fetch, which nobody notices where it is wrong. It reads a dict's own memory only where
# `layout_is_known` has seen, with a dict of its own, that this memory is what it takes it for.

cdef extern from *:
    """
    typedef struct {
        Py_ssize_t refcnt;
        uint8_t log2_size, log2_index_bytes, kind;
        uint32_t version;
        Py_ssize_t usable, entries;
        char indices[];
    } upper_keys;

    typedef struct { Py_hash_t hash; PyObject *key, *value; } upper_entry;

    /* The versions that were looked at; where threads run without a common lock, dicts look otherwise. */
    #if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030F0000 && !defined(Py_GIL_DISABLED)
    #define worth_asking 1
    #else
    #define worth_asking 0
    #endif

    #if PY_VERSION_HEX >= 0x030E0000
    #define hash_bytes Py_HashBuffer
    #else
    extern Py_hash_t _Py_HashBytes(const void *, Py_ssize_t);
    #define hash_bytes _Py_HashBytes
    #endif

    static inline const void *keys_of(PyObject *dict) { return ((PyDictObject *)dict)->ma_keys; }

    static inline const char *index_slot(PyObject *dict, Py_hash_t hash) {
        const upper_keys *keys = (const upper_keys *)((PyDictObject *)dict)->ma_keys;
        size_t slot = (size_t)hash & (((size_t)1 << keys->log2_size) - 1);
        return keys->indices + (slot << (keys->log2_index_bytes - keys->log2_size));
    }

    /* The entry that the index names first for this hash; NULL if it names none. */
    static inline const upper_entry *first_entry(PyObject *dict, Py_hash_t hash) {
        const upper_keys *keys = (const upper_keys *)((PyDictObject *)dict)->ma_keys;
        const char *slot = index_slot(dict, hash);
        int64_t number;
        switch (keys->log2_index_bytes - keys->log2_size) {
            case 0: number = *(const int8_t *)slot; break;
            case 1: number = *(const int16_t *)slot; break;
            case 2: number = *(const int32_t *)slot; break;
            default: number = *(const int64_t *)slot;
        }
        if (number < 0 || number >= keys->entries || keys->kind != 0) return NULL;
        return (const upper_entry *)(keys->indices + ((size_t)1 << keys->log2_index_bytes)) + number;
    }
    """
    ctypedef struct upper_entry:
        PyObject *key
        PyObject *value
    bint worth_asking
    Py_hash_t hash_bytes(const void *data, Py_ssize_t length)
    const void *keys_of(PyObject *items)
    const char *index_slot(PyObject *items, Py_hash_t hash)
    const upper_entry *first_entry(PyObject *items, Py_hash_t hash)

cdef enum:
    TOGETHER = 16  # requests that are looked at together


cdef bint layout_is_known():
    """Does a dict look as this file says, with an index of one, two and four bytes a slot?"""
    if not worth_asking:
        return False
    cdef const upper_entry *entry
    cdef dict probe
    for key in (b"", b"k", b"a key of some length"):
        if hash_bytes(chars(key), PyBytes_GET_SIZE(key)) != hash(key):
            return False
    for count in (5, 1000, 50_000):
        probe = dict.fromkeys(range(count), b"value")
        for key in (0, 1, count // 2, count - 1):
            entry = first_entry(<PyObject *> probe, hash(key))
            if entry == NULL or entry.key == NULL or entry.value != <PyObject *> probe[key]:
                return False
            if <object> entry.key != key:
                return False
    return True


cdef Py_ssize_t look_ahead(const uint8_t *data, Py_ssize_t at, Py_ssize_t size, list table) except -1:
    """Have what the next requests will ask for on its way; where those requests end."""
    cdef PyObject *maps[TOGETHER]
    cdef Py_hash_t hashes[TOGETHER]
    cdef const upper_entry *entries[TOGETHER]
    cdef int i, count = 0
    cdef const uint8_t *p
    cdef Py_ssize_t total, klen, partition
    while count < TOGETHER and size - at >= 24:
        p = data + at
        total, klen, partition = get32(p + 8), get16(p + 2), get16(p + 6)
        if total > size - at - 24 or klen + p[4] > total:
            break
        at += 24 + total
        if partition < PyList_GET_SIZE(table):
            store = <object> PyList_GET_ITEM(table, partition)
            if isinstance(store, Table) and (<Table> store).items is not None:
                maps[count] = <PyObject *> (<Table> store).items
                hashes[count] = hash_bytes(p + 24 + p[4], klen)
                fetch_soon(<const char *> maps[count] + 24)
                count += 1
    for i in range(count):
        fetch_soon(keys_of(maps[i]))
    for i in range(count):
        fetch_soon(index_slot(maps[i], hashes[i]))
    for i in range(count):
        entries[i] = first_entry(maps[i], hashes[i])
        fetch_soon(entries[i])
    for i in range(count):
        if entries[i] != NULL:
            fetch_soon(<const char *> entries[i].key + 32)
            fetch_soon(<const char *> entries[i].value + 16)
            fetch_soon(<const char *> entries[i].value + 80)
    return at


cdef bint LOOKS_AHEAD = layout_is_known()
looks_ahead = LOOKS_AHEAD
