# The thread of `_writer.h`, for Python; part of _compiled.pyx.

cdef extern from "_writer.h":
    ctypedef struct upper_batch:
        int fd, next
        uint8_t *frame
        size_t used, size, zeros, at, ahead
        size_t start "from"
        uint8_t head[32]
    ctypedef struct upper_writer:
        int bell
    int upper_writer_start(upper_writer *w)
    upper_batch *upper_writer_next(upper_writer *w)
    void upper_writer_begin(upper_writer *w)
    int upper_writer_done(upper_writer *w)
    int upper_writer_take_back(upper_writer *w, uint64_t *took)
    void upper_writer_take_byte(int bell)
    void upper_writer_wait(upper_writer *w) nogil
    void upper_writer_rest(upper_writer *w) nogil
    void upper_writer_leave(upper_writer *w) nogil


cdef class Writer:
    """Writes one batch at a time, and has a second one queued; `fileno()` becomes readable when one is on disk or has failed."""
    cdef upper_writer writer
    cdef bint runs
    cdef int bell
    cdef list logs  # of the batches that it has, in order

    def __cinit__(self):
        self.logs = []
        self.bell, self.writer.bell = os.pipe()
        os.set_blocking(self.bell, False)
        error = upper_writer_start(&self.writer)
        if error:
            os.close(self.bell)
            os.close(self.writer.bell)
            raise OSError(error, os.strerror(error))
        self.runs = True

    def __dealloc__(self):
        if self.runs:
            self.close()

    def fileno(self):
        return self.bell

    def begin(
        self, int fd, bytes head not None, Log records not None, size_t zeros=0, *, size_t at=0,
        int next=-1, size_t start=0, size_t ahead=0,
    ):
        """Write these records as one frame, after `head`; returns its size. Length, checksum and the count of sectors of zeros
        are filled in; `at` is the offset of the frame in the file.

        `zeros` bytes of zero are written behind it, if there is room; the position of `fd` is before them. Once the batch is
        on disk, `ahead` bytes of zero are written to `next` at `start`, which nothing waits for but `rest`."""
        cdef upper_batch *batch = upper_writer_next(&self.writer)
        if not self.runs:
            raise RuntimeError("the writer is closed")
        if batch == NULL:
            raise RuntimeError("the writer has a batch and one behind it")
        if PyBytes_GET_SIZE(head) != 32:
            raise ValueError("a frame's head has 32 bytes")
        records.reserve(0)
        records.sealed = True
        self.logs.append(records)
        memcpy(batch.head, chars(head), FRAME_HEAD)
        put64(batch.head + 16, records.bytes)
        batch.fd = fd
        batch.frame, batch.used = records.data, records.used
        batch.size = FRAME_HEAD + records.bytes
        batch.zeros, batch.at = zeros, at
        batch.next, batch.start, batch.ahead = next, start, ahead
        upper_writer_begin(&self.writer)
        return FRAME_HEAD + records.bytes

    def finish(self):
        """Wait for the first batch. Raises OSError if it is not on disk; returns the seconds that writing and syncing took.

        The loop calls this when the thread has rung, and keeps the interpreter's lock: otherwise a thread that computes
        (a compaction) takes it and delays the loop by up to five milliseconds."""
        cdef uint64_t took = 0
        if not self.logs:
            raise RuntimeError("the writer has nothing to finish")
        if not upper_writer_done(&self.writer):
            with nogil:
                upper_writer_wait(&self.writer)
        error = upper_writer_take_back(&self.writer, &took)
        del self.logs[0]
        if self.runs:
            upper_writer_take_byte(self.bell)
        if error:
            raise OSError(error, os.strerror(error))
        return took / <double> NANOSECONDS

    def rest(self):
        """Wait until all batches, and the zeros that follow them, are written."""
        if self.runs:
            with nogil:
                upper_writer_rest(&self.writer)

    def close(self):
        """End the thread, after the batches that it has."""
        if self.runs:
            self.runs = False
            with nogil:
                upper_writer_leave(&self.writer)
            os.close(self.bell)
            os.close(self.writer.bell)


def writer():
    return Writer()
