/* The records of one partition, by key and in the order of their seqnos; included in _compiled.pyx through _map.pxi.
 *
 * A map is a chain of blocks and an index. Blocks hold *cells* one after the other, in the order of seqnos over the whole
 * chain. A cell is one of three:
 *   - a record as it goes over the wire. Its opaque is 0, or, once it is dead, the epoch of its death;
 *   - LARGE: head and key of a mutation and a pointer to the bytes object that has all of it. The open batch and streams
 *     refer to the same object, so a large value is never copied;
 *   - COLD: key, seqno and the location of a record that is not in memory.
 * The body length in a cell's header is that of the cell, so that a walk needs nothing else.
 *
 * A view is a list of blocks with the epoch in which it was taken: it sees the cells that were alive then. A change
 * to a cell that a view could see is made in a copy of its block, and cleaning copies live cells to other blocks, so what a
 * view sees in its blocks never changes.
 *
 * The index has 8 bytes a slot: 24 bits of a keyed hash, 20 for the block, 20 for the offset of the cell. The place of a
 * slot follows from its 24 bits alone, so the index grows without touching a cell. A large index is in parts by the first
 * bits of the hash, each of which grows alone: no put waits for all of it.
 *
 * Everything is called with the interpreter's lock. A function that fails for lack of memory has changed nothing. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "_layout.h"

enum {
    CELL_COLD = 0x00,
    CELL_LARGE = MUTATION | 0x80,
    COLD_EXTRAS = 20,  /* seqno, slot and offset of the file, length of the record */
    COLD_HEAD = HEADER_SIZE + COLD_EXTRAS,
    AT_COLD_PLACE = 32,
    AT_COLD_LENGTH = 40,
    LARGE_VALUE = 1024, /* bytes: values of at least this size are not in a block */
    FIRST_BLOCK = 1 << 10, /* bytes of the first block of a map, and of the smallest and largest of the others, about */
    SMALLEST_BLOCK = 4 << 10,
    LARGEST_BLOCK = 256 << 10,
    TAG_BITS = 24,
    BLOCK_BITS = 20,
    OFFSET_BITS = 20,
    FEWEST_SLOTS = 8,
    MARKS = 8, /* offsets in the last block that a map stores */
    HUGE_INDEX = 4 << 20, /* bytes: parts of an index of at least this size have pages of their own */
    PART_BITS = 8,
    PARTS = 1 << PART_BITS,
#ifdef UPPER_EXACT_BLOCKS /* so that the small maps of tests have parts too */
    SPLIT_AT = 24,
#else
    SPLIT_AT = 64 << 10, /* keys at which an index is split into parts */
#endif
    EMPTY_REGIONS = 4 << 20, /* bytes of empty regions that are kept */
    UNIT = 64 << 10,         /* bytes: regions have a power of two of them */
    ARENA = 2 << 20,         /* bytes of an arena, which are a large page of x86-64 and ARM */
    ARENAS_TRIED = 16,       /* that are searched for room for a region before a new one is made */
    AHEAD = 1024,            /* bytes of a block that are prefetched while it is cleaned */
    WORTH_CLEANING = 1024, /* dead bytes below which a map is not cleaned */
    DEAD_SHARE = 5         /* one part in this many of the live bytes may be dead */
};

/* ── Memory of blocks ────────────────────────────────────────────────────────────────────────────────────────────────────
 * Blocks of one size share a region, which goes back to the system when the last of them is free. Up to EMPTY_REGIONS bytes of
 * empty regions are kept: overwriting empties and fills regions all the time, and new pages cost more than the
 * copies that it makes. The C library's heap would not return memory below a block that is in use.
 *
 * Regions lie in arenas, for which the system is asked for large pages: records are read in no order, and the processor
 * finds the addresses of few small pages in its own tables. */

#define CLASSES 5 /* of blocks: 1, 4, 16, 64 and 256 KB. Fewer sizes leave fewer regions that are almost empty. */

typedef struct map_arena {
    struct map_arena *next, *before; /* among those with a free unit */
    uint8_t *memory;                 /* at a multiple of its size */
    uint32_t free;                   /* a bit for each free unit */
} map_arena;

typedef struct map_region {
    map_arena *arena;
    struct map_region *next, *before; /* among those with a free block */
    void *free;                       /* a list of free blocks */
    uint32_t used, made, most;        /* blocks in use, ever handed out, and that fit */
    uint32_t kind;
} map_region;

typedef struct map_block {
    map_region *region; /* NULL: from malloc */
    uint64_t first;     /* seqno of its first cell */
    uint32_t references, id;
    uint32_t room, used, dead; /* bytes of cells */
    uint32_t large;            /* cells with a large record */
    uint64_t kept;             /* bytes of large records that are dead, for views */
    uint8_t cells[];
} map_block;

static map_arena *map_arenas;            /* with a free unit */
static map_region *map_regions[CLASSES]; /* with a free block */
static uint64_t map_empty;               /* bytes of regions without a block in use */
static uint64_t map_held;                /* bytes of all regions and other blocks */

static size_t map_region_size(uint32_t kind) { return kind < 2 ? UNIT : kind < 3 ? 4 * UNIT : 16 * UNIT; }

/* Bytes of a block of this class: a little less than its nominal size, because the region has a header. */
static inline size_t map_class_size(uint32_t kind) {
    size_t all = map_region_size(kind);
    return (all - sizeof(map_region)) / (all / ((size_t)FIRST_BLOCK << 2 * kind)) & ~(size_t)15;
}

static void map_unlist(map_region *r) {
    if (r->before) r->before->next = r->next;
    else map_regions[r->kind] = r->next;
    if (r->next) r->next->before = r->before;
    r->next = r->before = NULL;
}

static void map_enlist(map_region *r) {
    r->before = NULL;
    r->next = map_regions[r->kind];
    if (r->next) r->next->before = r;
    map_regions[r->kind] = r;
}

static void map_enlist_arena(map_arena *a) {
    a->before = NULL;
    a->next = map_arenas;
    if (a->next) a->next->before = a;
    map_arenas = a;
}

static void map_unlist_arena(map_arena *a) {
    if (a->before) a->before->next = a->next;
    else map_arenas = a->next;
    if (a->next) a->next->before = a->before;
}

static map_arena *map_new_arena(void) {
    map_arena *a = malloc(sizeof *a);
    if (a == NULL) return NULL;
    /* The system places a mapping below the last one, so most are aligned by themselves. */
    uint8_t *memory = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED && (uintptr_t)memory % ARENA) {
        munmap(memory, ARENA);
        memory = mmap(NULL, 2 * ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory != MAP_FAILED) {
            size_t before = ARENA - (uintptr_t)memory % ARENA;
            munmap(memory, before);
            memory += before;
            if (before < ARENA) munmap(memory + ARENA, ARENA - before);
        }
    }
    if (memory == MAP_FAILED) {
        free(a);
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    madvise(memory, ARENA, MADV_HUGEPAGE);
#endif
    a->memory = memory;
    a->free = 0xffffffff;
    map_enlist_arena(a);
    return a;
}

static uint32_t map_units(uint32_t kind) { return ((uint32_t)1 << (map_region_size(kind) / UNIT)) - 1; }

/* A region of this class, not initialised. NULL if there is no memory. */
static map_region *map_new_region(uint32_t kind) {
    uint32_t count = (uint32_t)(map_region_size(kind) / UNIT), units = map_units(kind), at = 0;
    map_arena *a = map_arenas;
    for (int tried = 0; a != NULL; a = ++tried < ARENAS_TRIED ? a->next : NULL) {
        for (at = 0; at < ARENA / UNIT && (a->free >> at & units) != units; at += count) {}
        if (at < ARENA / UNIT) break;
    }
    if (a == NULL) {
        a = map_new_arena();
        if (a == NULL) return NULL;
        at = 0;
    }
    a->free &= ~(units << at);
    if (a->free == 0) map_unlist_arena(a);
    map_region *r = (map_region *)(a->memory + (size_t)at * UNIT);
    r->arena = a;
    map_held += map_region_size(kind);
    return r;
}

static void map_free_region(map_region *r) {
    map_arena *a = r->arena;
    uint32_t kind = r->kind, at = (uint32_t)(((uint8_t *)r - a->memory) / UNIT);
    map_held -= map_region_size(kind);
    if (a->free == 0) map_enlist_arena(a);
    a->free |= map_units(kind) << at;
    if (a->free == 0xffffffff) {
        map_unlist_arena(a);
        munmap(a->memory, ARENA);
        free(a);
    } else {
        madvise(r, map_region_size(kind), MADV_DONTNEED);
    }
}

/* A block with room for `need` bytes of cells; of the largest class up to `wanted` bytes, if that is more. NULL if there is
 * no memory. */
static map_block *map_new_block(size_t wanted, size_t need) {
    map_block *b;
#ifdef UPPER_EXACT_BLOCKS /* a block for each cell, so that a sanitizer detects an access past its end */
    wanted = 0;
    size_t size = sizeof(map_block) + need;
    uint32_t kind = CLASSES;
#else
    uint32_t kind = 0;
    while (kind < CLASSES - 1 && ((size_t)FIRST_BLOCK << 2 * (kind + 1) <= wanted || map_class_size(kind) < need + sizeof(map_block))) kind++;
    size_t size = map_class_size(kind);
    if (size < need + sizeof(map_block)) {
        kind = CLASSES;
        size = need + sizeof(map_block);
    }
#endif
    if (kind == CLASSES) {
        b = malloc(size);
        if (b == NULL) return NULL;
        map_held += size;
        b->region = NULL;
    } else {
        map_region *r = map_regions[kind];
        if (r == NULL) {
            size_t all = map_region_size(kind);
            r = map_new_region(kind);
            if (r == NULL) return NULL;
            r->free = NULL;
            r->used = r->made = 0;
            r->kind = kind;
            r->most = (uint32_t)((all - sizeof(map_region)) / size);
            map_enlist(r);
            map_empty += all;
        }
        if (r->used == 0) map_empty -= map_region_size(kind);
        if (r->free != NULL) {
            b = r->free;
            r->free = *(void **)b;
        } else {
            b = (map_block *)((uint8_t *)r + sizeof(map_region) + (size_t)r->made++ * size);
        }
        if (++r->used == r->most) map_unlist(r);
        b->region = r;
    }
    b->references = 1;
    b->room = (uint32_t)(size - sizeof(map_block));
    b->used = b->dead = b->large = b->id = 0;
    b->first = b->kept = 0;
    return b;
}

/* Bytes of memory that a block takes. */
static inline size_t map_weight(const map_block *b) { return b->room + sizeof(map_block); }

static void map_free_memory(map_block *b) {
    map_region *r = b->region;
    if (r == NULL) {
        map_held -= map_weight(b);
        free(b);
        return;
    }
    uint32_t kind = r->kind;
    if (r->used-- == r->most) map_enlist(r);
    *(void **)b = r->free;
    r->free = b;
    if (r->used) return;
    size_t all = map_region_size(kind);
    if (map_empty + all > EMPTY_REGIONS) {
        map_unlist(r);
        map_free_region(r);
    } else {
        map_empty += all;
    }
}

/* ── Cells ──────────────────────────────────────────────────────────────────────────────────────────────────────────── */

static inline uint32_t cell_length(const uint8_t *c) { return HEADER_SIZE + get32(c + AT_BODY); }
static inline uint32_t cell_key_length(const uint8_t *c) { return get16(c + AT_KEY_LENGTH); }
static inline const uint8_t *cell_key(const uint8_t *c) { return c + HEADER_SIZE + c[AT_EXTRAS_LENGTH]; }
static inline uint64_t cell_seqno(const uint8_t *c) { return get64(c + AT_SEQNO); }
static inline uint32_t cell_died(const uint8_t *c) { return get32(c + AT_OPAQUE); }

/* Bytes of a cell that count as live: a cell that was made cold in place is longer than its contents. */
static inline uint32_t cell_needs(const uint8_t *c) {
    return c[AT_OPCODE] == CELL_COLD ? COLD_HEAD + cell_key_length(c) : cell_length(c);
}

static inline PyObject *cell_object(const uint8_t *c) {
    PyObject *object;
    memcpy(&object, c + cell_length(c) - sizeof object, sizeof object);
    return object;
}

static inline void cell_set_object(uint8_t *c, PyObject *object) {
    memcpy(c + cell_length(c) - sizeof object, &object, sizeof object);
}

/* The record of a cell that is not cold. */
static inline const uint8_t *cell_record(const uint8_t *c) {
    return c[AT_OPCODE] == CELL_LARGE ? (const uint8_t *)PyBytes_AS_STRING(cell_object(c)) : c;
}

static inline size_t cell_record_length(const uint8_t *c) {
    if (c[AT_OPCODE] == CELL_COLD) return get32(c + AT_COLD_LENGTH);
    return c[AT_OPCODE] == CELL_LARGE ? (size_t)PyBytes_GET_SIZE(cell_object(c)) : cell_length(c);
}

static inline int cell_is_deletion(const uint8_t *c) { return c[AT_OPCODE] != MUTATION && c[AT_OPCODE] != CELL_LARGE && c[AT_OPCODE] != CELL_COLD; }

static void block_release(map_block *b) {
    if (--b->references) return;
    for (uint32_t at = 0; b->large && at < b->used; at += cell_length(b->cells + at))
        if (b->cells[at + 1] == CELL_LARGE) {
            Py_XDECREF(cell_object(b->cells + at));
            b->large--;
        }
    map_free_memory(b);
}

/* ── A keyed hash: SipHash with one and three rounds ──────────────────────────────────────────────────────────────────── */

static uint64_t map_secret[2];

#define ROTATED(x, b) ((x) << (b) | (x) >> (64 - (b)))
#define SIP_ROUND                                                                                                              \
    do {                                                                                                                       \
        v0 += v1; v1 = ROTATED(v1, 13); v1 ^= v0; v0 = ROTATED(v0, 32);                                                        \
        v2 += v3; v3 = ROTATED(v3, 16); v3 ^= v2;                                                                              \
        v0 += v3; v3 = ROTATED(v3, 21); v3 ^= v0;                                                                              \
        v2 += v1; v1 = ROTATED(v1, 17); v1 ^= v2; v2 = ROTATED(v2, 32);                                                        \
    } while (0)

static inline uint32_t map_tag(const uint8_t *key, size_t length) {
    uint64_t v0 = map_secret[0] ^ 0x736f6d6570736575ULL, v1 = map_secret[1] ^ 0x646f72616e646f6dULL;
    uint64_t v2 = map_secret[0] ^ 0x6c7967656e657261ULL, v3 = map_secret[1] ^ 0x7465646279746573ULL;
    uint64_t m, last = (uint64_t)length << 56;
    for (; length >= 8; length -= 8, key += 8) {
        memcpy(&m, key, 8);
        v3 ^= m;
        SIP_ROUND;
        v0 ^= m;
    }
    m = 0;
    memcpy(&m, key, length);
    last |= m; /* on a big-endian machine the hash differs, which is harmless */
    v3 ^= last;
    SIP_ROUND;
    v0 ^= last;
    v2 ^= 0xff;
    SIP_ROUND;
    SIP_ROUND;
    SIP_ROUND;
    return (uint32_t)((v0 ^ v1 ^ v2 ^ v3) >> (64 - TAG_BITS));
}

/* ── The map ────────────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    uint64_t *slots;
    uint64_t slot_count, count; /* and those in use */
} map_index;

typedef struct {
    map_block **chain; /* in the order of seqnos */
    uint32_t blocks, chain_room;
    map_block **by_id; /* as the index names them; 0 is no block */
    uint32_t *free_ids;
    uint32_t ids, id_room, ids_free;
    map_index whole;  /* the index, until it is split */
    map_index *parts; /* NULL, or PARTS of them */
    uint64_t slot_count, count; /* of the whole index */
    uint64_t live, dead;                  /* bytes of cells */
    uint64_t size, evicted, tombstones;   /* bytes of all records and of those not in memory; how many are deletions */
    uint64_t blocks_bytes, objects_bytes; /* what blocks and large records take */
    uint64_t kept;                        /* of the latter, dead */
    uint64_t last;                        /* the highest seqno of an entry */
    uint32_t epoch, cleaned;              /* of the next deaths; the block to be cleaned next */
    int died;                             /* whether a cell died in this epoch */
    uint32_t marked;                      /* how many `marks` there are */
    /* Places in the last block, so that a view of what is near the end need not walk all of it: cells that begin there, the
     * oldest first. There are none after anything else than a put has changed the chain. */
    struct {
        uint64_t seqno;
        uint32_t at;
    } marks[MARKS];
} upper_map;

#define LOCATION_BITS (BLOCK_BITS + OFFSET_BITS)
#define LOCATION_MASK (((uint64_t)1 << LOCATION_BITS) - 1)
#define LAST_EPOCH 0xFFFFFFF0u

static inline map_block *map_block_of(const upper_map *m, uint64_t slot) {
    return m->by_id[slot >> OFFSET_BITS & (((uint64_t)1 << BLOCK_BITS) - 1)];
}

static inline uint8_t *map_cell(const upper_map *m, uint64_t slot) {
    return map_block_of(m, slot)->cells + (slot & (((uint64_t)1 << OFFSET_BITS) - 1));
}

/* The slot of the cell that is about to be written to the end of a block. */
static inline uint64_t map_slot(uint32_t tag, const map_block *b) {
    return (uint64_t)tag << LOCATION_BITS | (uint64_t)b->id << OFFSET_BITS | b->used;
}

/* The part of the index that a key is in. */
static inline map_index *map_part(const upper_map *m, uint32_t tag) {
    return m->parts ? m->parts + (tag >> (TAG_BITS - PART_BITS)) : (map_index *)&m->whole;
}

/* The slot of the part at which a search begins. */
static inline uint64_t map_home(const upper_map *m, const map_index *index, uint32_t tag) {
    if (m->parts) tag = tag << PART_BITS & (((uint32_t)1 << TAG_BITS) - 1);
    return (uint64_t)tag * index->slot_count >> TAG_BITS;
}

static inline uint64_t map_next(const map_index *index, uint64_t at) { return at + 1 == index->slot_count ? 0 : at + 1; }

static inline uint64_t map_memory(const upper_map *m) {
    return m->blocks_bytes + m->objects_bytes + 8 * m->slot_count + (m->parts ? PARTS * sizeof *m->parts : 0) + sizeof(map_block *) * (m->chain_room + m->id_room) + 4 * m->id_room;
}

static void map_init(upper_map *m) {
    memset(m, 0, sizeof *m);
    m->epoch = 1;
}

static void map_free_index(upper_map *m);

static void map_clear(upper_map *m) {
    for (uint32_t i = 0; i < m->blocks; i++) block_release(m->chain[i]);
    free(m->chain);
    free(m->by_id);
    free(m->free_ids);
    map_free_index(m);
    map_init(m);
}

/* A pointer to the slot of a key; NULL if the map does not have it. */
static uint64_t *map_find(const upper_map *m, const uint8_t *key, size_t length, uint32_t tag) {
    if (m->count == 0) return NULL;
    const map_index *index = map_part(m, tag);
    uint64_t *slots = index->slots;
    for (uint64_t at = map_home(m, index, tag); slots[at]; at = map_next(index, at)) {
        if (slots[at] >> LOCATION_BITS != tag) continue;
        const uint8_t *c = map_cell(m, slots[at]);
        if (cell_key_length(c) == length && memcmp(cell_key(c), key, length) == 0) return slots + at;
    }
    return NULL;
}

/* Prefetch what a search or a put will need, in steps: each reads what the one before it has prefetched, and is taken
 * for several keys before the next. A search needs the slot and the cell; a put changes the map itself, too, and the
 * end of its last block. Always inlined: a compiler drops the call of a function that only
 * prefetches. */
#if defined(__GNUC__)
#define INLINED static inline __attribute__((always_inline))
#else
#define INLINED static inline
#endif
INLINED void map_fetch_head(const upper_map *m) { /* as much of the map as a search reads */
    fetch_soon(m);
    fetch_soon((const uint8_t *)m + 64);
}

INLINED void map_fetch_all(const upper_map *m) {
    const uint8_t *p = (const uint8_t *)m;
    fetch_soon(p);
    fetch_soon(p + 64);
    fetch_soon(p + 128);
    fetch_soon(p + 192);
}

INLINED void map_fetch_slot(const upper_map *m, uint32_t tag, int put) {
    if (m->count == 0) return;
    const map_index *index = map_part(m, tag);
    fetch_soon(index->slots + map_home(m, index, tag));
    fetch_soon(m->by_id + 1);
    if (put) fetch_soon(m->chain + m->blocks - 1);
}

/* Returns the slot that the key has, probably: one with the same tag. NULL if there is none near. */
INLINED uint64_t *map_fetch_cell(const upper_map *m, uint32_t tag, int put) {
    if (m->count == 0) return NULL;
    const map_index *index = map_part(m, tag);
    uint64_t at = map_home(m, index, tag);
    if (put) fetch_soon(m->chain[m->blocks - 1]);
    for (int looked = 0; looked < 8 && index->slots[at]; looked++) {
        if (index->slots[at] >> LOCATION_BITS == tag) {
            const uint8_t *c = map_cell(m, index->slots[at]);
            fetch_soon(c);
            fetch_soon(c + 64);
            if (put) fetch_soon(map_block_of(m, index->slots[at]));
            else { /* a value of 100 bytes ends in the fourth line of memory; the processor continues by itself */
                fetch_soon(c + 128);
                fetch_soon(c + 192);
            }
            return index->slots + at;
        }
        at = map_next(index, at);
    }
    return NULL;
}

/* Whether the cell of this slot has this key. */
INLINED int map_has(const upper_map *m, const uint64_t *slot, const uint8_t *key, size_t length) {
    const uint8_t *c = map_cell(m, *slot);
    return cell_key_length(c) == length && memcmp(cell_key(c), key, length) == 0;
}

/* For a put: prefetch the place of the new cell. */
INLINED void map_fetch_end(const upper_map *m) {
    if (m->blocks == 0) return;
    const map_block *b = m->chain[m->blocks - 1];
    fetch_to_write(b->cells + b->used);
    fetch_to_write(b->cells + b->used + 64);
    fetch_to_write(b->cells + b->used + 128);
}

/* The slot that refers to a live cell. */
static uint64_t *map_slot_of(const upper_map *m, uint32_t tag, uint64_t location) {
    uint64_t wanted = (uint64_t)tag << LOCATION_BITS | location;
    const map_index *index = map_part(m, tag);
    uint64_t at = map_home(m, index, tag);
    while (index->slots[at] != wanted) at = map_next(index, at);
    return index->slots + at;
}

static void map_occupy(const upper_map *m, map_index *index, uint64_t slot) {
    uint64_t at = map_home(m, index, (uint32_t)(slot >> LOCATION_BITS));
    while (index->slots[at]) at = map_next(index, at);
    index->slots[at] = slot;
    index->count++;
}

/* Slots that are all empty. Large indexes request large pages, because page faults took most of the time of growing one. */
static uint64_t *map_new_slots(uint64_t count) {
    size_t size = count * sizeof(uint64_t);
    if (size < HUGE_INDEX) return calloc(count, sizeof(uint64_t));
    uint64_t *slots = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (slots == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(slots, size, MADV_HUGEPAGE);
#endif
    return slots;
}

static void map_free_slots(uint64_t *slots, uint64_t count) {
    if (count * sizeof(uint64_t) < HUGE_INDEX) free(slots);
    else munmap(slots, count * sizeof(uint64_t));
}

static void map_free_index(upper_map *m) {
    for (uint32_t i = 0; m->parts && i < PARTS; i++) map_free_slots(m->parts[i].slots, m->parts[i].slot_count);
    free(m->parts);
    m->parts = NULL;
    map_free_slots(m->whole.slots, m->whole.slot_count);
    m->whole.slots = NULL;
    m->whole.slot_count = m->whole.count = 0;
}

/* Split the index into parts, each as large as it needs to be. */
static int map_split(upper_map *m) {
    upper_map split = *m;
    uint64_t keys[PARTS] = {0};
    memset(&split.whole, 0, sizeof split.whole);
    split.parts = calloc(PARTS, sizeof *split.parts);
    if (split.parts == NULL) return -1;
    split.slot_count = 0;
    for (uint64_t i = 0; i < m->whole.slot_count; i++)
        if (m->whole.slots[i]) keys[m->whole.slots[i] >> (64 - PART_BITS)]++;
    for (uint32_t i = 0; i < PARTS; i++) {
        uint64_t count = 2 * keys[i] < FEWEST_SLOTS ? FEWEST_SLOTS : 2 * keys[i];
        split.parts[i].slots = map_new_slots(count);
        if (split.parts[i].slots == NULL) {
            map_free_index(&split);
            return -1;
        }
        split.parts[i].slot_count = count;
        split.slot_count += count;
    }
    for (uint64_t i = 0; i < m->whole.slot_count; i++) {
        uint64_t slot = m->whole.slots[i];
        if (slot) map_occupy(&split, map_part(&split, (uint32_t)(slot >> LOCATION_BITS)), slot);
    }
    map_free_index(m);
    *m = split;
    return 0;
}

/* Make room for one more key with this tag. */
static int map_reserve_slot(upper_map *m, uint32_t tag) {
    map_index *index = map_part(m, tag);
    if ((index->count + 1) * 4 <= index->slot_count * 3) return 0;
    if (m->parts == NULL && m->count >= SPLIT_AT) {
        if (map_split(m)) return -1;
        index = map_part(m, tag);
        if ((index->count + 1) * 4 <= index->slot_count * 3) return 0;
    }
    map_index grown = {NULL, index->slot_count < FEWEST_SLOTS ? FEWEST_SLOTS : index->slot_count + index->slot_count / 2, 0};
    grown.slots = map_new_slots(grown.slot_count);
    if (grown.slots == NULL) return -1;
    for (uint64_t i = 0; i < index->slot_count; i++)
        if (index->slots[i]) map_occupy(m, &grown, index->slots[i]);
    m->slot_count += grown.slot_count - index->slot_count;
    map_free_slots(index->slots, index->slot_count);
    *index = grown;
    return 0;
}

/* Empty a slot, and move up those behind it that are not in their first place. */
static void map_vacate(upper_map *m, uint64_t *slot) {
    map_index *index = map_part(m, (uint32_t)(*slot >> LOCATION_BITS));
    uint64_t *slots = index->slots, hole = (uint64_t)(slot - slots), at = hole;
    for (;;) {
        at = map_next(index, at);
        if (!slots[at]) break;
        uint64_t home = map_home(m, index, (uint32_t)(slots[at] >> LOCATION_BITS));
        /* whether its first place is outside of (hole, at] */
        if (hole <= at ? home <= hole || home > at : home <= hole && home > at) {
            slots[hole] = slots[at];
            hole = at;
        }
    }
    slots[hole] = 0;
    index->count--;
    m->count--;
}

/* Make room for one more block in the chain and among the ids. */
static int map_reserve_block(upper_map *m) {
    if (m->blocks == m->chain_room) {
        uint32_t room = m->chain_room + m->chain_room / 2 + 4;
        map_block **chain = realloc(m->chain, room * sizeof *chain);
        if (chain == NULL) return -1;
        m->chain = chain;
        m->chain_room = room;
    }
    if (m->ids_free == 0 && m->ids == m->id_room) {
        uint32_t room = m->id_room + m->id_room / 2 + 4;
        if (room > (uint32_t)1 << BLOCK_BITS) room = (uint32_t)1 << BLOCK_BITS;
        if (room == m->id_room) return -1;
        map_block **by_id = realloc(m->by_id, room * sizeof *by_id);
        if (by_id == NULL) return -1;
        m->by_id = by_id;
        uint32_t *free_ids = realloc(m->free_ids, room * sizeof *free_ids);
        if (free_ids == NULL) return -1;
        m->free_ids = free_ids;
        m->id_room = room;
    }
    return 0;
}

/* Insert a block into the chain, which has room for it. */
static void map_insert_block(upper_map *m, uint32_t place, map_block *b) {
    if (m->ids == 0) m->by_id[m->ids++] = NULL;
    b->id = m->ids_free ? m->free_ids[--m->ids_free] : m->ids++;
    m->by_id[b->id] = b;
    memmove(m->chain + place + 1, m->chain + place, (m->blocks - place) * sizeof *m->chain);
    m->chain[place] = b;
    m->blocks++;
    m->blocks_bytes += map_weight(b);
}

static void map_remove_block(upper_map *m, uint32_t place) {
    map_block *b = m->chain[place];
    m->by_id[b->id] = NULL;
    m->free_ids[m->ids_free++] = b->id;
    m->blocks_bytes -= map_weight(b);
    m->dead -= b->dead;
    m->objects_bytes -= b->kept;
    m->kept -= b->kept;
    m->blocks--;
    memmove(m->chain + place, m->chain + place + 1, (m->blocks - place) * sizeof *m->chain);
    block_release(b);
}

/* The block in which the entries past a seqno begin, or the one before it. */
static uint32_t map_block_at(const upper_map *m, uint64_t seqno) {
    uint32_t low = 0, high = m->blocks;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (m->chain[middle]->first <= seqno) low = middle;
        else high = middle;
    }
    return low;
}

static size_t map_block_size(const upper_map *m) {
    uint64_t size = (m->live + m->dead) / 16;
    if (m->blocks == 0) return FIRST_BLOCK;
    return size < SMALLEST_BLOCK ? SMALLEST_BLOCK : size > LARGEST_BLOCK ? LARGEST_BLOCK : (size_t)size;
}

/* Make room for a cell of this length at the end of the chain. */
static int map_reserve_cell(upper_map *m, uint32_t length) {
    if (m->blocks) {
        map_block *b = m->chain[m->blocks - 1];
        if (b->room - b->used >= length) return 0;
    }
    if (map_reserve_block(m)) return -1;
    map_block *b = map_new_block(map_block_size(m), length);
    if (b == NULL) return -1;
    map_insert_block(m, m->blocks, b);
    return 0;
}

/* Remove an entry: its cell is dead for views that are taken from now on. */
static void map_kill(upper_map *m, uint64_t slot) {
    map_block *b = map_block_of(m, slot);
    uint8_t *c = map_cell(m, slot);
    size_t length = cell_record_length(c);
    m->size -= length;
    if (c[AT_OPCODE] == CELL_COLD) m->evicted -= length;
    if (cell_is_deletion(c)) m->tombstones--;
    m->live -= cell_needs(c);
    m->dead += cell_needs(c);
    b->dead += cell_needs(c);
    put32(c + AT_OPAQUE, m->epoch);
    m->died = 1;
    if (c[AT_OPCODE] == CELL_LARGE) {
        if (b->references == 1) { /* no view needs it */
            PyObject *object = cell_object(c);
            cell_set_object(c, NULL);
            m->objects_bytes -= length;
            Py_DECREF(object);
        } else {
            b->kept += length;
            m->kept += length;
        }
    }
}

/* Move the live cells of a block to the end of the one before it, or to a new block if that is full or `apart` is set. */
static int map_clean_block(upper_map *m, uint32_t place, int apart) {
    map_block *b = m->chain[place], *to = place && !apart ? m->chain[place - 1] : NULL, *made = NULL;
    m->marked = 0;
    uint32_t left = b->used - b->dead;
    if (left && (to == NULL || to->room - to->used < left)) {
        if (map_reserve_block(m)) return -1;
        made = map_new_block(left, left); /* for all that is left, so that nothing can fail after this */
        if (made == NULL) return -1;
        map_insert_block(m, place++, made);
        if (to == NULL) to = made;
    }
    /* Nothing else has read the block lately, and a walk finds each cell by the one before: the rest is prefetched meanwhile. */
    for (uint32_t at = 0, ahead = 0, length; left && at < b->used; at += length) {
        for (; ahead < at + AHEAD && ahead < b->used; ahead += 64) fetch_soon(b->cells + ahead);
        const uint8_t *c = b->cells + at;
        length = cell_length(c);
        if (cell_died(c)) continue;
        uint32_t needs = cell_needs(c), tag = map_tag(cell_key(c), cell_key_length(c));
        if (to->room - to->used < needs) to = made;
        uint8_t *copy = to->cells + to->used;
        memcpy(copy, c, needs);
        if (c[AT_OPCODE] == CELL_COLD) put32(copy + AT_BODY, needs - HEADER_SIZE);
        if (c[AT_OPCODE] == CELL_LARGE) {
            Py_INCREF(cell_object(c));
            to->large++;
        }
        *map_slot_of(m, tag, (uint64_t)b->id << OFFSET_BITS | at) = map_slot(tag, to);
        if (to->used == 0) to->first = cell_seqno(c);
        to->used += needs;
    }
    map_remove_block(m, place);
    return 0;
}

/* Clean the next block that is worth it, if too much of the map is dead. If there is no memory, do so later. */
static void map_clean(upper_map *m) {
    if ((m->dead + m->kept) * DEAD_SHARE <= m->live + m->objects_bytes - m->kept + DEAD_SHARE * WORTH_CLEANING) return;
    for (uint32_t tried = 0; tried < m->blocks && tried < 256; tried++) {
        if (m->cleaned >= m->blocks) m->cleaned = 0;
        map_block *b = m->chain[m->cleaned];
        if ((b->dead + b->kept) * 8 >= b->used) {
            uint32_t before = m->blocks;
            if (map_clean_block(m, m->cleaned, 0) == 0 && m->blocks == before) m->cleaned++;
            return;
        }
        m->cleaned++;
    }
}

/* Rebuild the map without dead cells, in blocks that no view has, and count epochs from the start. */
static int map_renew(upper_map *m) {
    for (uint32_t place = 0, left = m->blocks; left; left--) {
        uint32_t before = m->blocks;
        if (map_clean_block(m, place, 1)) return -1;
        if (m->blocks == before) place++;
    }
    m->epoch = 1;
    m->died = 0;
    m->cleaned = 0;
    return 0;
}

/* Add a well-formed record as the newest entry. `slot` and `tag` are those of its key; `object` is its bytes object, or
 * NULL if it has none. */
static int map_put_at(upper_map *m, const uint8_t *record, size_t length, PyObject *object, uint32_t tag, uint64_t *slot) {
    uint32_t head = HEADER_SIZE + record[AT_EXTRAS_LENGTH] + cell_key_length(record);
    int large = record[AT_OPCODE] == MUTATION && length - head >= LARGE_VALUE;
    uint32_t needs = large ? head + (uint32_t)sizeof object : (uint32_t)length;
    if (large) {
        if (object != NULL) Py_INCREF(object);
        else {
            object = PyBytes_FromStringAndSize((const char *)record, (Py_ssize_t)length);
            if (object == NULL) return -1;
            put32((uint8_t *)PyBytes_AS_STRING(object) + AT_OPAQUE, 0);
        }
    }
    if ((slot == NULL && map_reserve_slot(m, tag)) || map_reserve_cell(m, needs)) {
        if (large) Py_DECREF(object);
        PyErr_NoMemory();
        return -1;
    }
    if (slot != NULL) map_kill(m, *slot);
    map_block *b = m->chain[m->blocks - 1];
    uint8_t *c = b->cells + b->used;
    memcpy(c, record, large ? head : length);
    put32(c + AT_OPAQUE, 0);
    if (large) {
        c[AT_OPCODE] = CELL_LARGE;
        put32(c + AT_BODY, needs - HEADER_SIZE);
        cell_set_object(c, object);
        b->large++;
        m->objects_bytes += length;
    }
    if (slot != NULL) {
        *slot = map_slot(tag, b);
    } else {
        map_occupy(m, map_part(m, tag), map_slot(tag, b));
        m->count++;
    }
    m->last = cell_seqno(c);
    if (b->used == 0) {
        b->first = m->last;
        m->marked = 0;
    }
    if (m->marked < MARKS && b->used >= (m->marked + 1) * (b->room / (MARKS + 1))) {
        m->marks[m->marked].seqno = m->last;
        m->marks[m->marked++].at = b->used;
    }
    b->used += needs;
    m->live += needs;
    m->size += length;
    m->tombstones += cell_is_deletion(c);
    if (slot != NULL) map_clean(m);
    return 0;
}

static int map_put(upper_map *m, const uint8_t *record, size_t length, PyObject *object) {
    uint32_t keys = cell_key_length(record), tag = map_tag(cell_key(record), keys);
    return map_put_at(m, record, length, object, tag, map_find(m, cell_key(record), keys, tag));
}

/* Evict the record of an entry to this location. Returns 0 for a deletion, which stays in memory. */
static int map_move_out(upper_map *m, uint64_t slot, uint64_t place, uint32_t length) {
    map_block *b = map_block_of(m, slot);
    uint8_t *c = map_cell(m, slot);
    if (cell_is_deletion(c)) return 0;
    if (b->references > 1) { /* a view may see the cell: the map continues with a copy of the block */
        map_block *copy = map_new_block(b->room, b->room);
        if (copy == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(copy->cells, b->cells, b->used);
        copy->first = b->first, copy->id = b->id, copy->used = b->used, copy->dead = b->dead;
        copy->large = b->large, copy->kept = b->kept;
        for (uint32_t at = 0, left = b->large; left && at < b->used; at += cell_length(b->cells + at))
            if (b->cells[at + 1] == CELL_LARGE) {
                Py_XINCREF(cell_object(b->cells + at));
                left--;
            }
        m->blocks_bytes += map_weight(copy) - map_weight(b);
        uint32_t i = map_block_at(m, b->first);
        while (m->chain[i] != b) i++;
        m->chain[i] = m->by_id[b->id] = copy;
        block_release(b);
        b = copy;
        c = map_cell(m, slot);
    }
    if (c[AT_OPCODE] != CELL_COLD) {
        uint32_t keys = cell_key_length(c), spared = cell_length(c) - COLD_HEAD - keys;
        PyObject *object = c[AT_OPCODE] == CELL_LARGE ? cell_object(c) : NULL;
        m->size -= cell_record_length(c);
        m->size += length;
        m->evicted += length;
        if (object != NULL) {
            m->objects_bytes -= (uint64_t)PyBytes_GET_SIZE(object);
            b->large--;
        }
        memmove(c + COLD_HEAD, cell_key(c), keys);
        c[AT_OPCODE] = CELL_COLD;
        c[AT_EXTRAS_LENGTH] = COLD_EXTRAS;
        b->dead += spared;
        m->dead += spared;
        m->live -= spared;
        Py_XDECREF(object);
    }
    put64(c + AT_COLD_PLACE, place);
    put32(c + AT_COLD_LENGTH, length);
    map_clean(m);
    return 1;
}

/* The seqno of the newest entry. */
static uint64_t map_newest(const upper_map *m) {
    for (uint32_t i = m->blocks; i--;) {
        const map_block *b = m->chain[i];
        uint64_t found = 0;
        for (uint32_t at = 0; at < b->used; at += cell_length(b->cells + at))
            if (!cell_died(b->cells + at)) found = cell_seqno(b->cells + at);
        if (found) return found;
    }
    return 0;
}

/* Remove an entry; no tombstone takes its place. */
static void map_forget(upper_map *m, uint64_t *slot) {
    uint64_t was = *slot;
    int newest = cell_seqno(map_cell(m, was)) == m->last;
    map_kill(m, was);
    map_vacate(m, slot);
    if (newest) m->last = map_newest(m);
    map_clean(m);
}

/* ── Views ──────────────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    map_block *block;
    uint32_t end;
} view_piece;

typedef struct {
    view_piece *pieces;
    uint32_t count, piece, at; /* pieces; the present one, and where in it */
    uint32_t epoch;
} upper_view;

/* A view of the live cells past a seqno. */
static int view_open(upper_view *v, upper_map *m, uint64_t seqno) {
    memset(v, 0, sizeof *v);
    if (m->died && m->epoch >= LAST_EPOCH && map_renew(m)) return -1;
    uint32_t first = seqno ? map_block_at(m, seqno) : 0;
    uint32_t at = 0;
    if (seqno && m->last <= seqno) first = m->blocks;
    if (first < m->blocks) {
        const map_block *b = m->chain[first];
        for (uint32_t i = 0; seqno && first == m->blocks - 1 && i < m->marked && m->marks[i].seqno <= seqno; i++)
            at = m->marks[i].at;
        while (seqno && at < b->used && cell_seqno(b->cells + at) <= seqno) at += cell_length(b->cells + at);
        v->pieces = malloc((m->blocks - first) * sizeof *v->pieces);
        if (v->pieces == NULL) return -1;
        for (uint32_t i = first; i < m->blocks; i++) {
            m->chain[i]->references++;
            v->pieces[v->count].block = m->chain[i];
            v->pieces[v->count++].end = m->chain[i]->used;
        }
        v->at = at;
    }
    v->epoch = m->epoch - 1;
    if (m->died) {
        v->epoch = m->epoch++;
        m->died = 0;
    }
    return 0;
}

/* The cell at a place of a view, or the next one that the view sees; NULL at the end. */
static const uint8_t *view_cell(const upper_view *v, uint32_t *piece, uint32_t *at) {
    for (; *piece < v->count; ++*piece, *at = 0) {
        const view_piece *p = v->pieces + *piece;
        for (; *at < p->end; *at += cell_length(p->block->cells + *at)) {
            const uint8_t *c = p->block->cells + *at;
            uint32_t died = cell_died(c);
            if (died == 0 || died > v->epoch) return c;
        }
    }
    return NULL;
}

/* Bytes of the cells from the place of a view on, `most` at most; those that it does not see count too. */
static size_t view_room(const upper_view *v, size_t most) {
    size_t room = 0;
    for (uint32_t piece = v->piece; piece < v->count && room < most; ++piece)
        room += v->pieces[piece].end - (piece == v->piece ? v->at : 0);
    return room < most ? room : most;
}

/* Release the blocks before this place. */
static void view_advance(upper_view *v, uint32_t piece, uint32_t at) {
    while (v->piece < piece) block_release(v->pieces[v->piece++].block);
    v->at = at;
}

static void view_close(upper_view *v) {
    view_advance(v, v->count, 0);
    free(v->pieces);
    v->pieces = NULL;
    v->count = v->piece = 0;
}
