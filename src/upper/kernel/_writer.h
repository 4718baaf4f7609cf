/* A native thread that writes batches; included in _compiled.pyx through _writer.pxi.
 *
 * A Python thread needs the interpreter's lock before its first system call and after its last, and may wait for it longer
 * than for the disk. This thread never needs it. It fills in the checksum of the frame, writes and syncs; then it writes a
 * byte to a pipe that the loop watches. The frame is the log of the batch, or, where that refers to large records, a copy
 * that contains them. The caller keeps the log, unchanged, until it is written.
 *
 * Once a batch is on disk, zeros may be written to the file of the next segment: nothing waits for them.
 *
 * A second batch may be queued while the first is written. The thread begins it when the first is on disk, without waiting for
 * the loop. If the first fails, the second one fails too, and is not written. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "_crc.h"

enum { UPPER_QUEUE = 2 }; /* batches that it may have */

typedef struct {
    int fd, error;
    uint8_t *frame; /* space for its head, then cells of _map.h */
    size_t used;    /* bytes of it */
    uint8_t head[32];
    size_t size; /* of the frame with every record in its place */
    size_t zeros; /* bytes of them to be written behind it */
    size_t at;    /* offset of the frame in its file */
    int next;     /* the file of the next segment */
    size_t from, ahead; /* where in it, and how many, zeros are written once the batch is on disk */
    uint64_t took; /* nanoseconds that writing and syncing took */
} upper_batch;

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int bell, leaving, works;
    int error; /* of the last batch, and so of those that were queued behind it */
    upper_batch batches[UPPER_QUEUE]; /* batch n is at n % UPPER_QUEUE */
    uint64_t begun, written, finished; /* how many were queued, written by the thread and taken back by the loop */
    uint8_t *buffer;
    size_t room; /* in the buffer */
} upper_writer;

/* Make a file longer, so that later frames need not: a sync of a file that grew also waits for the journal of the file
 * system. The file position does not change. If the disk is full, the frames extend the file themselves. */
static void upper_write_zeros(int fd, off_t at, size_t size) {
    static const uint8_t zeros[64 << 10];
    while (at >= 0 && size) {
        ssize_t n = pwrite(fd, zeros, size < sizeof zeros ? size : sizeof zeros, at);
        if (n < 0 && errno != EINTR) return;
        if (n > 0) at += n, size -= (size_t)n;
    }
}

/* How many sectors of the frame are zeros, at most as many as can be stored; see storage/frames.py. */
static uint32_t upper_zero_sectors(const uint8_t *frame, size_t size, size_t file_offset) {
    static const uint8_t zeros[512];
    uint32_t count = 0;
    for (size_t at = 0, edge; at < size; at = edge) {
        edge = at + sizeof zeros - (file_offset + at) % sizeof zeros;
        if (edge > size) edge = size;
        count += !frame[at] && !memcmp(frame + at, zeros, edge - at);
    }
    return count > 0xffff ? 0xffff : count;
}

/* Copy the frame and its large records into the buffer. */
static int upper_gather(upper_writer *w, const upper_batch *b) {
    if (w->room < b->size || w->room > b->size + (64u << 20)) {
        size_t room = b->size + b->size / 2;
        uint8_t *larger = realloc(w->buffer, room);
        if (larger == NULL) return ENOMEM;
        w->buffer = larger;
        w->room = room;
    }
    uint8_t *to = w->buffer + sizeof b->head;
    for (size_t at = sizeof b->head; at < b->used; at += cell_length(b->frame + at)) {
        size_t size = cell_record_length(b->frame + at);
        memcpy(to, cell_record(b->frame + at), size);
        to += size;
    }
    return 0;
}

static int upper_write_batch(upper_writer *w, const upper_batch *b) {
    uint8_t *frame = b->frame;
    if (b->used != b->size) {
        int error = upper_gather(w, b);
        if (error) return error;
        frame = w->buffer;
    }
    memcpy(frame, b->head, sizeof b->head);
    put16(frame + 8, upper_zero_sectors(frame, b->size, b->at)); /* the highest bytes of its number */
    put32(frame + 4, crc_of(frame + 8, b->size - 8));
    for (size_t done = 0; done < b->size;) {
        ssize_t n = write(b->fd, frame + done, b->size - done);
        if (n < 0 && errno != EINTR) return errno;
        if (n > 0) done += (size_t)n;
    }
    if (b->zeros) upper_write_zeros(b->fd, lseek(b->fd, 0, SEEK_CUR), b->zeros);
    while (fdatasync(b->fd))
        if (errno != EINTR) return errno;
    return 0;
}

/* Zeros in the file of the next segment. The disk begins to store them, so that the sync of that file finds little to do. */
static void upper_write_ahead(const upper_batch *b) {
    upper_write_zeros(b->next, (off_t)b->from, b->ahead);
#ifdef SYNC_FILE_RANGE_WRITE
    sync_file_range(b->next, (off_t)b->from, (off_t)b->ahead, SYNC_FILE_RANGE_WRITE);
#endif
}

static uint64_t upper_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static upper_batch *upper_batch_at(upper_writer *w, uint64_t number) { return w->batches + number % UPPER_QUEUE; }

static void *upper_writer_main(void *me) {
    upper_writer *w = me;
    pthread_mutex_lock(&w->lock);
    while (!w->leaving) {
        if (w->written == w->begun) {
            pthread_cond_wait(&w->changed, &w->lock);
            continue;
        }
        upper_batch *b = upper_batch_at(w, w->written);
        if (w->error == 0) {
            pthread_mutex_unlock(&w->lock);
            uint64_t began = upper_now();
            int error = upper_write_batch(w, b);
            b->took = upper_now() - began;
            pthread_mutex_lock(&w->lock);
            w->error = error;
        }
        b->error = w->error;
        upper_batch done = *b; /* the loop takes it back */
        w->written++;
        w->works = 1;
        pthread_cond_broadcast(&w->changed);
        pthread_mutex_unlock(&w->lock); /* before it rings: the loop wakes up and takes the lock */
        while (write(w->bell, "!", 1) < 0 && errno == EINTR) {}
        if (done.ahead && !done.error) upper_write_ahead(&done);
        pthread_mutex_lock(&w->lock);
        w->works = 0;
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* The thread blocks all signals: Python handles them. */
static int upper_writer_start(upper_writer *w) {
    sigset_t all, before;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&w->thread, NULL, upper_writer_main, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* Where the next batch is to be described; NULL if the queue is full. */
static upper_batch *upper_writer_next(upper_writer *w) {
    return w->begun - w->finished < UPPER_QUEUE ? upper_batch_at(w, w->begun) : NULL;
}

static void upper_writer_begin(upper_writer *w) {
    pthread_mutex_lock(&w->lock);
    if (w->begun == w->finished) w->error = 0;
    int waits = w->written == w->begun++;
    pthread_mutex_unlock(&w->lock);
    if (waits) pthread_cond_broadcast(&w->changed); /* the thread wakes up and takes the lock */
}

/* Whether the oldest batch is written. */
static int upper_writer_done(upper_writer *w) {
    pthread_mutex_lock(&w->lock);
    int done = w->written > w->finished;
    pthread_mutex_unlock(&w->lock);
    return done;
}

/* Take back the oldest batch, which is written; returns its error, and how long it took. */
static int upper_writer_take_back(upper_writer *w, uint64_t *took) {
    pthread_mutex_lock(&w->lock);
    int error = upper_batch_at(w, w->finished)->error;
    *took = upper_batch_at(w, w->finished)->took;
    w->finished++;
    pthread_mutex_unlock(&w->lock);
    return error;
}

/* Take its byte from the pipe. It is there if the loop was woken by it; the thread rings as soon as it is done. */
static void upper_writer_take_byte(int bell) {
    struct pollfd ready = {.fd = bell, .events = POLLIN};
    char rung;
    while (read(bell, &rung, 1) < 0 && (errno == EINTR || errno == EAGAIN)) poll(&ready, 1, -1);
}

/* Wait for the oldest batch, if there is one. */
static void upper_writer_wait(upper_writer *w) {
    pthread_mutex_lock(&w->lock);
    while (w->begun > w->finished && w->written == w->finished) pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

/* Wait until the thread has nothing to do. */
static void upper_writer_rest(upper_writer *w) {
    pthread_mutex_lock(&w->lock);
    while (w->written < w->begun || w->works) pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

static void upper_writer_leave(upper_writer *w) {
    upper_writer_rest(w);
    pthread_mutex_lock(&w->lock);
    w->leaving = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    free(w->buffer);
}
