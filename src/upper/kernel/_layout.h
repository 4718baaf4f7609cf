/* The numbers of `upper.record.layout`, `upper.record.location`, `upper.kernel.packets` and `upper.wire` that the compiled
 * kernel needs as constants; included in _compiled.pyx, before every other header. `LAYOUT` exports all of them under their
 * names there; tests/record/test_compiled_layout.py compares. */
#ifndef UPPER_LAYOUT
#define UPPER_LAYOUT
#define LAYOUT_NUMBERS(X) \
    X(HEADER_SIZE, 24) \
    X(AT_OPCODE, 1) \
    X(AT_KEY_LENGTH, 2) \
    X(AT_EXTRAS_LENGTH, 4) \
    X(AT_DATA_TYPE, 5) \
    X(AT_PARTITION, 6) \
    X(AT_BODY, 8) \
    X(AT_OPAQUE, 12) \
    X(AT_CAS, 16) \
    X(AT_SEQNO, 24) \
    X(AT_REVISION, 32) \
    X(AT_FLAGS, 40) \
    X(AT_EXPIRATION, 44) \
    X(AT_LOCK_TIME, 48) \
    X(REQUEST, 0x80) \
    X(RESPONSE, 0x81) \
    X(MUTATION, 0x56) \
    X(DELETION, 0x57) \
    X(EXPIRATION, 0x58) \
    X(FLUSH, 0x59) \
    X(SNAPSHOT_START, 0x54) \
    X(SNAPSHOT_END, 0x55) \
    X(MUTATION_EXTRAS, 28) \
    X(DELETION_EXTRAS, 16) \
    X(MUTATION_HEAD, 52) \
    X(DELETION_HEAD, 40) \
    X(MAX_KEY, 250) \
    X(SEQNO_SHIFT, 80) \
    X(LENGTH_BITS, 25) \
    X(BETWEEN, 0) \
    X(INSIDE, 1) \
    X(AT_DCP_META, 52) \
    X(DCP_MUTATION_EXTRAS, 31) \
    X(DCP_GONE_EXTRAS, 18) /* of a deletion or expiration, with the size of its metadata */ \
    X(DCP_DELETION_EXTRAS, 21) /* with the time of the deletion */ \
    X(DCP_EXPIRATION_EXTRAS, 20) \
    X(DELETE_TIMES, 2) /* bits of the form of DCP's changes */ \
    X(EXPIRATIONS, 4) \
    X(DATA_TYPES, 8) \
    X(NANOSECONDS, 1000000000) \
    X(DCP_MARKER, 0x56) \
    X(DCP_MARKER_EXTRAS, 20) \
    X(DCP_IN_MEMORY, 1) /* of a marker: its snapshot is a commit */ \
    X(SEQNO_ADVANCED, 0x64) \
    X(ADVANCED_EXTRAS, 8) /* of SEQNO_ADVANCED */ \
    X(TAP_MUTATION, 0x41) \
    X(TAP_DELETION, 0x42) \
    X(TAP_MUTATION_EXTRAS, 16) \
    X(TAP_DELETION_EXTRAS, 8) \
    X(AT_TAP_MARKS, 2) /* in the extras */ \
    X(AT_TAP_HOPS, 4) \
    X(TAP_HOPS, 255) \
    X(TAP_ACK, 1) \
    X(TAP_NO_VALUE, 2) \
    X(ALL_OPERATIONS, 7) /* a bit for each opcode of a change, from MUTATION */ \
    X(GET, 0x00) \
    X(SET, 0x01) \
    X(DELETE, 0x04) \
    X(GETQ, 0x09) \
    X(NOOP, 0x0A) \
    X(GETK, 0x0C) \
    X(GETKQ, 0x0D) \
    X(SETQ, 0x11) \
    X(DELETEQ, 0x14) \
    X(SET_WITH_META, 0xA2) \
    X(ADD, 0x02) \
    X(REPLACE, 0x03) \
    X(INCREMENT, 0x05) \
    X(DECREMENT, 0x06) \
    X(APPEND, 0x0E) \
    X(PREPEND, 0x0F) \
    X(ADDQ, 0x12) \
    X(REPLACEQ, 0x13) \
    X(INCREMENTQ, 0x15) \
    X(DECREMENTQ, 0x16) \
    X(APPENDQ, 0x19) \
    X(PREPENDQ, 0x1A) \
    X(TOUCH, 0x1C) \
    X(GAT, 0x1D) \
    X(GATQ, 0x1E) \
    X(GATK, 0x23) \
    X(GATKQ, 0x24) \
    X(GET_LOCKED, 0x94) \
    X(UNLOCK_KEY, 0x95) \
    X(STORE_EXTRAS, 8) /* of a SET: flags, expiration */ \
    X(COUNT_EXTRAS, 20) /* of a counter: delta, initial value, expiration */ \
    X(TOUCH_EXTRAS, 4) /* expiration or seconds of a lock */ \
    X(TOKEN_EXTRAS, 16) /* of the response to a write: branch, seqno */ \
    X(COPY_EXTRAS, 28) /* of a SET_WITH_META: flags, expiration, revision, CAS, options */ \
    X(FLAGS_EXTRAS, 4) /* of the response to a GET */ \
    X(MONTH, 2592000) /* seconds: an expiration up to here counts from now */ \
    X(DEFAULT_LOCK, 15) /* seconds */

#define LAYOUT_CONSTANT(name, number) name = number,
#define LAYOUT_ROW(name, number) {#name, number},

enum { LAYOUT_NUMBERS(LAYOUT_CONSTANT) };

typedef struct {
    const char *name;
    long number;
} layout_row;

static const layout_row layout_rows[] = {LAYOUT_NUMBERS(LAYOUT_ROW)};

enum { LAYOUT_COUNT = sizeof layout_rows / sizeof *layout_rows };
#endif
