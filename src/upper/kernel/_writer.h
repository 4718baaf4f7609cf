/* A native thread that writes batches; included in _compiled.pyx through _writer.pxi.
 *
 * A Python thread needs the interpreter's lock before its first system call and after its last, and may wait for it longer
 * than for the disk. This thread never needs it. It fills in the checksum of the frame, writes and syncs; then it writes a
 * byte to a pipe that the loop watches. The frame is the log of the batch, or, where that refers to large records, a copy
 * that contains them. The caller keeps the log, unchanged, until it is written. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "_crc.h"

enum { UPPER_IDLE, UPPER_WORKING, UPPER_DONE, UPPER_LEAVING };

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int state, fd, bell, error;
    uint8_t *frame; /* space for its head, then cells of _map.h */
    size_t used;    /* bytes of it */
    uint8_t head[32];
    size_t size; /* of the frame with every record in its place */
    size_t zeros; /* bytes of them to be written behind it */
    size_t at;    /* offset of the frame in its file */
    uint8_t *buffer;
    size_t room; /* in the buffer */
} upper_writer;

/* Make the file longer, so that the next frames need not: a sync of a file that grew also waits for the journal of the file
 * system. The file position does not change. If the disk is full, the next frames extend the file themselves. */
static void upper_write_zeros(int fd, size_t size) {
    static const uint8_t zeros[64 << 10];
    off_t at = lseek(fd, 0, SEEK_CUR);
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
static int upper_gather(upper_writer *w) {
    if (w->room < w->size || w->room > w->size + (64u << 20)) {
        size_t room = w->size + w->size / 2;
        uint8_t *larger = realloc(w->buffer, room);
        if (larger == NULL) return ENOMEM;
        w->buffer = larger;
        w->room = room;
    }
    uint8_t *to = w->buffer + sizeof w->head;
    for (size_t at = sizeof w->head; at < w->used; at += cell_length(w->frame + at)) {
        size_t size = cell_record_length(w->frame + at);
        memcpy(to, cell_record(w->frame + at), size);
        to += size;
    }
    return 0;
}

static int upper_write_batch(upper_writer *w) {
    uint8_t *frame = w->frame;
    if (w->used != w->size) {
        int error = upper_gather(w);
        if (error) return error;
        frame = w->buffer;
    }
    memcpy(frame, w->head, sizeof w->head);
    put16(frame + 8, upper_zero_sectors(frame, w->size, w->at)); /* the highest bytes of its number */
    put32(frame + 4, crc_of(frame + 8, w->size - 8));
    for (size_t done = 0; done < w->size;) {
        ssize_t n = write(w->fd, frame + done, w->size - done);
        if (n < 0 && errno != EINTR) return errno;
        if (n > 0) done += (size_t)n;
    }
    if (w->zeros) upper_write_zeros(w->fd, w->zeros);
    while (fdatasync(w->fd))
        if (errno != EINTR) return errno;
    return 0;
}

static void *upper_writer_main(void *me) {
    upper_writer *w = me;
    pthread_mutex_lock(&w->lock);
    while (w->state != UPPER_LEAVING) {
        if (w->state != UPPER_WORKING) {
            pthread_cond_wait(&w->changed, &w->lock);
            continue;
        }
        pthread_mutex_unlock(&w->lock);
        w->error = upper_write_batch(w);
        pthread_mutex_lock(&w->lock);
        w->state = UPPER_DONE;
        pthread_cond_broadcast(&w->changed);
        pthread_mutex_unlock(&w->lock); /* before it rings: the loop wakes up and takes the lock */
        while (write(w->bell, "!", 1) < 0 && errno == EINTR) {}
        pthread_mutex_lock(&w->lock);
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

static void upper_writer_begin(upper_writer *w) {
    pthread_mutex_lock(&w->lock);
    w->state = UPPER_WORKING;
    pthread_mutex_unlock(&w->lock);
    pthread_cond_broadcast(&w->changed); /* the thread wakes up and takes the lock */
}

/* Whether it is done with the batch that it has; if so, it takes the next one. */
static int upper_writer_done(upper_writer *w) {
    pthread_mutex_lock(&w->lock);
    int done = w->state != UPPER_WORKING;
    if (done) w->state = UPPER_IDLE;
    pthread_mutex_unlock(&w->lock);
    return done;
}

/* Take its byte from the pipe. It is there if the loop was woken by it; the thread rings as soon as it is done. */
static void upper_writer_take_byte(int bell) {
    struct pollfd ready = {.fd = bell, .events = POLLIN};
    char rung;
    while (read(bell, &rung, 1) < 0 && (errno == EINTR || errno == EAGAIN)) poll(&ready, 1, -1);
}

/* Wait for the present batch, if there is one. */
static void upper_writer_wait(upper_writer *w) {
    pthread_mutex_lock(&w->lock);
    while (w->state == UPPER_WORKING) pthread_cond_wait(&w->changed, &w->lock);
    w->state = UPPER_IDLE;
    pthread_mutex_unlock(&w->lock);
}

static void upper_writer_leave(upper_writer *w) {
    upper_writer_wait(w);
    pthread_mutex_lock(&w->lock);
    w->state = UPPER_LEAVING;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    free(w->buffer);
}
