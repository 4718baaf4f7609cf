# The commands that read an item before they change it, compiled; part of _compiled.pyx. `plain_commands` documents them.

cdef enum:
    LEFT = -2  # the handler of the command has to process it


cdef object changed(Turn *turn, Request *asked, int data_type, uint32_t expiration, uint32_t lock):
    """A record of the next version of the requested item, with the same flags and value."""
    record = mutation(turn, asked, asked.length - MUTATION_HEAD - asked.klen, data_type, expiration, lock)
    memcpy(fresh(record) + AT_FLAGS, asked.record + AT_FLAGS, 4)
    memcpy(fresh(record) + MUTATION_HEAD, asked.record + MUTATION_HEAD, asked.length - MUTATION_HEAD)
    return record


cdef bint number_of(const uint8_t *text, Py_ssize_t length, uint64_t *number) noexcept:
    """Parse a value as a decimal number below 2^64."""
    cdef Py_ssize_t i
    cdef int digit
    while length and (text[length - 1] == c" " or text[length - 1] == 0 or text[length - 1] == c"\r" or text[length - 1] == c"\n"):
        length -= 1
    if length == 0 or length > 20:
        return False
    number[0] = 0
    for i in range(length):
        digit = text[i] - c"0"
        if digit < 0 or digit > 9 or number[0] > (MAX_CAS - digit) // 10:
            return False
        number[0] = number[0] * 10 + digit
    return True


cdef Py_ssize_t count(
    Turn *turn, Request *asked, Table part, Log pending, list expiring, uint8_t *to, object clock
) except? -1:
    """INCREMENT and DECREMENT."""
    cdef uint64_t delta = get64(asked.p + HEADER_SIZE), number = get64(asked.p + HEADER_SIZE + 8)
    cdef int64_t expiration = get32(asked.p + HEADER_SIZE + 16)
    cdef uint8_t digits[20]
    cdef int length = 0
    cdef uint64_t rest
    if asked.extras != COUNT_EXTRAS or asked.total != COUNT_EXTRAS + asked.klen or not admits(asked.cas, asked.record, asked.live, asked.locked):
        return LEFT
    if asked.live:
        if not number_of(asked.record + MUTATION_HEAD + asked.klen, asked.length - MUTATION_HEAD - asked.klen, &number):
            return LEFT
        if asked.opcode == INCREMENT or asked.opcode == INCREMENTQ:
            number += delta
        else:
            number -= min(delta, number)
        expiration = get32(asked.record + AT_EXPIRATION)
    elif expiration == NEVER_CREATE:
        return LEFT
    else:
        expiration = deadline(turn, expiration, clock)
        if expiration >> 32:
            return LEFT
    rest = number
    while length == 0 or rest:
        length += 1
        digits[20 - length] = c"0" + rest % 10
        rest //= 10
    record = mutation(turn, asked, length, 0, expiration, 0)
    if asked.live:
        memcpy(fresh(record) + AT_FLAGS, asked.record + AT_FLAGS, 4)
    else:
        memset(fresh(record) + AT_FLAGS, 0, 4)
    memcpy(fresh(record) + MUTATION_HEAD, asked.key, asked.klen)
    memcpy(fresh(record) + MUTATION_HEAD + asked.klen, digits + 20 - length, length)
    put(turn, asked, part, record, pending, expiring)
    if asked.opcode == INCREMENTQ or asked.opcode == DECREMENTQ:
        return 0
    cdef Py_ssize_t used = stored(to, turn, asked, part, turn.cas, 8)
    put64(to + used, number)
    return used + 8


cdef Py_ssize_t extend(Turn *turn, Request *asked, Table part, Log pending, list expiring, uint8_t *to) except? -1:
    """APPEND and PREPEND."""
    cdef Py_ssize_t held = asked.length - MUTATION_HEAD - asked.klen, more = asked.total - asked.klen
    cdef uint8_t *value
    if asked.extras or not asked.live or not admits(asked.cas, asked.record, asked.live, asked.locked) or held + more > turn.limit:
        return LEFT
    record = mutation(turn, asked, held + more, 0, get32(asked.record + AT_EXPIRATION), 0)
    memcpy(fresh(record) + AT_FLAGS, asked.record + AT_FLAGS, 4)
    memcpy(fresh(record) + MUTATION_HEAD, asked.key, asked.klen)
    value = fresh(record) + MUTATION_HEAD + asked.klen
    if asked.opcode == APPEND or asked.opcode == APPENDQ:
        memcpy(value, asked.record + MUTATION_HEAD + asked.klen, held)
        memcpy(value + held, asked.key + asked.klen, more)
    else:
        memcpy(value, asked.key + asked.klen, more)
        memcpy(value + more, asked.record + MUTATION_HEAD + asked.klen, held)
    put(turn, asked, part, record, pending, expiring)
    if asked.opcode == APPENDQ or asked.opcode == PREPENDQ:
        return 0
    return stored(to, turn, asked, part, turn.cas, 0)


cdef Py_ssize_t touch(
    Turn *turn, Request *asked, Table part, Log pending, list expiring, uint8_t *to, object clock
) except? -1:
    """TOUCH, and GAT in all its forms."""
    cdef bint shown = asked.opcode == GATK or asked.opcode == GATKQ
    cdef int64_t expiration
    if asked.extras != TOUCH_EXTRAS or asked.total != TOUCH_EXTRAS + asked.klen or asked.cas or asked.locked:
        return LEFT
    if not asked.live:
        if asked.opcode == TOUCH:
            return LEFT
        return missed(to, asked.p, asked.opcode, asked.key, asked.klen, asked.opcode == GATQ or asked.opcode == GATKQ, shown)
    expiration = deadline(turn, get32(asked.p + HEADER_SIZE), clock)
    if expiration >> 32:
        return LEFT
    cdef int data_type = asked.record[AT_DATA_TYPE]
    record = changed(turn, asked, data_type, expiration, 0)
    put(turn, asked, part, record, pending, expiring)
    if asked.opcode == TOUCH:
        respond(to, TOUCH, 0, 0, 0, 0, asked.p + AT_OPAQUE, turn.cas)
        return HEADER_SIZE
    return hit(
        to, asked.p, asked.opcode, asked.key, asked.klen, shown, chars(record), asked.length, data_type if turn.json else 0, turn.cas
    )


cdef Py_ssize_t lock(
    Turn *turn, Request *asked, Table part, Log pending, list expiring, uint8_t *to, object clock
) except? -1:
    """GET_LOCKED."""
    cdef uint32_t wanted = 0
    if asked.extras == TOUCH_EXTRAS:
        wanted = get32(asked.p + HEADER_SIZE)
    elif asked.extras:
        return LEFT
    if asked.total != asked.extras + asked.klen or asked.cas or asked.locked or not asked.live:
        return LEFT
    cdef int64_t until = lock_seconds(turn, clock) + 1 + min(wanted or <uint32_t> DEFAULT_LOCK, turn.longest_lock)
    if until >> 32:
        return LEFT
    record = changed(turn, asked, asked.record[AT_DATA_TYPE], get32(asked.record + AT_EXPIRATION), until)
    put(turn, asked, part, record, pending, expiring)
    return hit(to, asked.p, asked.opcode, asked.key, asked.klen, False, chars(record), asked.length, 0, turn.cas)


cdef Py_ssize_t unlock(Turn *turn, Request *asked, Table part, Log pending, list expiring, uint8_t *to) except? -1:
    """UNLOCK_KEY."""
    if asked.extras or asked.total != asked.klen or not asked.locked or asked.cas != get64(asked.record + AT_CAS):
        return LEFT
    record = changed(turn, asked, asked.record[AT_DATA_TYPE], get32(asked.record + AT_EXPIRATION), 0)
    put(turn, asked, part, record, pending, expiring)
    return stored(to, turn, asked, part, 0, 0)


cdef Py_ssize_t change_in_place(
    Turn *turn, Request *asked, Table part, Log pending, list expiring, uint8_t *to, object clock, bint reads
) except? -1:
    """Run one of these commands: the number of bytes of its response, or LEFT if nothing was changed."""
    cdef int opcode = asked.opcode
    if opcode == INCREMENT or opcode == DECREMENT or opcode == INCREMENTQ or opcode == DECREMENTQ:
        return count(turn, asked, part, pending, expiring, to, clock)
    if opcode == APPEND or opcode == PREPEND or opcode == APPENDQ or opcode == PREPENDQ:
        return extend(turn, asked, part, pending, expiring, to)
    if opcode == TOUCH or (reads and (opcode == GAT or opcode == GATQ or opcode == GATK or opcode == GATKQ)):
        return touch(turn, asked, part, pending, expiring, to, clock)
    if opcode == GET_LOCKED and reads:
        return lock(turn, asked, part, pending, expiring, to, clock)
    if opcode == UNLOCK_KEY:
        return unlock(turn, asked, part, pending, expiring, to)
    return LEFT
