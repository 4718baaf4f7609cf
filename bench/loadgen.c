/* Load for a node, from a program that is never the bottleneck: one thread a connection, no allocation per request.
 *
 *   loadgen write|read  -p PORT -c CONNECTIONS -d DEPTH -n REQUESTS [-k KEY -v VALUE -V PARTITIONS -r RATE -b BASE]
 *       pipelined SETs or GETs of keys from number BASE on, RATE a second in all (0: as fast as they are answered);
 *       prints requests a second and the distribution of their latencies
 *   loadgen live        the same SETs, and -f FOLLOWERS connections that follow every partition;
 *       prints how long after its response each change reached each follower
 *       [-D 1: over DCP, 2: TAP, 3: TAP with acknowledgements] [-F 1: with a key prefix, 2: keys only]
 *       in all three, -x DEAF more connections follow every partition and never read
 *   loadgen drain       -p PORT -V PARTITIONS [-n TIMES] [-D 1: over DCP]
 *       opens a stream of each partition up to now and reads until all have ended; prints items and bytes a second
 *   loadgen start       the same for streams from now on: prints the time until all are accepted and started
 *   loadgen loopback    -n MEGABYTES: two sockets and nothing between them, for comparison
 *
 * Output is one JSON object. Build: cc -O2 -pthread -o loadgen loadgen.c
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEADER = 24, GET = 0x00, SET = 0x01, STREAM_REQ = 0x50, STREAM_START = 0x52, STREAM_END = 0x53, MUTATION = 0x56 };
enum { DCP_OPEN = 0x50, DCP_STREAM_REQ = 0x53, DCP_STREAM_END = 0x55 };
enum { TAP_CONNECT = 0x40, TAP_MUTATION = 0x41, TAP_BACKFILL = 0x01, TAP_ACKS = 0x10, TAP_KEYS_ONLY = 0x20, CONTROL = 0x5e };
enum { BATCH = 1 << 20, UNTIL_NOW = 8, DCP_UNTIL_NOW = 4, KEYS_ONLY = 4 };
enum { UPR, DCP, TAP, TAP_ACKED }; /* -D */
enum { PREFIX = 1, KEYS = 2 };     /* -F */

static int port = 11210, connections = 1, depth = 1, key_size = 16, value_size = 100, partitions = 1024, followers = 1, deaf = 0, dialect = UPR, filter = 0;
static long requests = 100000, base = 0;
static double rate = 0;
static int opcode = SET;

static pthread_barrier_t go;
static double *answered;              /* live: when the response of change i came */
static volatile int writers_done = 0; /* live: all responses are in */

typedef struct {
    int id;
    long done, failed;
    double began, ended;
    double *times; /* one a request: its latency; live followers: delay behind the response */
    long count;
} job;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what) {
    perror(what);
    exit(2);
}

static int dial(void) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int s = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (s < 0 || connect(s, (struct sockaddr *)&to, sizeof to)) fail("connect");
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return s;
}

static void put(int s, const uint8_t *data, size_t size) {
    while (size) {
        ssize_t n = send(s, data, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) fail("send");
        data += n;
        size -= (size_t)n;
    }
}

static uint32_t u32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return ntohl(v);
}

static size_t head(uint8_t *o, int op, int key, int extras, uint32_t body, int vbucket, uint32_t opaque) {
    memset(o, 0, HEADER);
    o[0] = 0x80, o[1] = (uint8_t)op, o[2] = (uint8_t)(key >> 8), o[3] = (uint8_t)key, o[4] = (uint8_t)extras;
    o[6] = (uint8_t)(vbucket >> 8), o[7] = (uint8_t)vbucket;
    body = htonl(body), opaque = htonl(opaque);
    memcpy(o + 8, &body, 4);
    memcpy(o + 12, &opaque, 4);
    return HEADER;
}

/* A buffer of received bytes that hands out whole packets. */
typedef struct {
    int socket;
    uint8_t *data;
    size_t at, end, room;
} inbox;

static inbox open_inbox(int s) {
    inbox in = {.socket = s, .room = 4 * BATCH};
    in.data = malloc(in.room);
    return in;
}

static int more(inbox *in) {
    if (in->at) {
        memmove(in->data, in->data + in->at, in->end - in->at);
        in->end -= in->at;
        in->at = 0;
    }
    for (;;) {
        ssize_t n = recv(in->socket, in->data + in->end, in->room - in->end, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return 0;
        in->end += (size_t)n;
        return 1;
    }
}

static uint8_t *packet(inbox *in) {
    if (in->end - in->at < HEADER) return NULL;
    uint8_t *p = in->data + in->at;
    size_t size = HEADER + (size_t)u32(p + 8);
    if (size > in->room) fail("a packet larger than the buffer");
    if (in->end - in->at < size) return NULL;
    in->at += size;
    return p;
}

/* ── Requests ─────────────────────────────────────────────────────────────────────────────────── */

static size_t request(uint8_t *o, long number, uint32_t opaque) {
    int extras = opcode == SET ? 8 : 0, value = opcode == SET ? value_size : 0;
    int vbucket = partitions ? (int)(number % partitions) : 0;
    uint8_t *p = o + head(o, opcode, key_size, extras, (uint32_t)(extras + key_size + value), vbucket, opaque);
    memset(p, 0, (size_t)extras);
    p += extras;
    number += base;
    for (int i = key_size - 1; i >= 0; i--, number /= 10) p[i] = (uint8_t)('0' + number % 10);
    p += key_size;
    memset(p, 'v', (size_t)value);
    return (size_t)(p + value - o);
}

static void *ask(void *argument) {
    job *j = argument;
    int s = dial();
    inbox in = open_inbox(s);
    size_t largest = (size_t)(HEADER + 8 + key_size + value_size);
    uint8_t *out = malloc(largest * (size_t)depth);
    double *sent_at = malloc(sizeof(double) * (size_t)depth);
    long sent = 0, first = j->id * requests;
    pthread_barrier_wait(&go);
    j->began = now();
    while (j->done < requests) {
        double t = now();
        long due = requests;
        if (rate > 0) {
            /* Connections take turns within an interval, and sleep through it: many of them must not be a storm. */
            double turn = (double)j->id / connections, each = connections / rate;
            due = (long)((t - j->began) / each + turn);
            if (due > requests) due = requests;
            if (due == sent && sent == j->done) {
                double wait = j->began + ((double)(sent + 1) - turn) * each - t;
                usleep(wait > 200e-6 ? (useconds_t)(wait * 1e6) : 200);
                continue;
            }
        }
        size_t size = 0;
        /* Half a window at a time: the other side sees batches, as it would from real clients. */
        if (sent - j->done <= depth / 2)
            for (; sent < due && sent - j->done < depth; sent++) {
                sent_at[sent % depth] = t;
                size += request(out + size, first + sent, (uint32_t)(sent % depth));
            }
        if (size) put(s, out, size);
        if (sent == j->done) continue;
        if (!more(&in)) fail("the node closed the connection");
        t = now();
        for (uint8_t *p; (p = packet(&in));) {
            int status = p[6] << 8 | p[7];
            if (status) j->failed++;
            if (answered) answered[first + j->done] = t;
            j->times[j->done++] = t - sent_at[u32(p + 12) % (uint32_t)depth];
        }
    }
    j->ended = now();
    j->count = j->done;
    close(s);
    return NULL;
}

/* ── Streams ──────────────────────────────────────────────────────────────────────────────────── */

static void connect_tap(int s) {
    uint8_t out[64], *p = out;
    uint32_t flags = TAP_BACKFILL | (dialect == TAP_ACKED ? TAP_ACKS : 0) | (filter == KEYS ? TAP_KEYS_ONLY : 0);
    p += head(p, TAP_CONNECT, 0, 4, 12, 0, 0);
    flags = htonl(flags);
    memcpy(p, &flags, 4);
    memset(p + 4, 0xff, 8); /* from a time that has not come: what is new */
    p[4] = 0;
    put(s, out, (size_t)(p + 12 - out));
}

static void follow_all(int s, uint32_t flags) {
    int dcp = dialect == DCP, size = dcp ? 48 : 40; /* DCP also states the snapshot around the start */
    uint8_t *out = malloc((size_t)(HEADER + size) * (size_t)partitions + 128), *p = out;
    if (dialect >= TAP) {
        connect_tap(s);
        free(out);
        return;
    }
    if (dcp) {
        char name[16];
        int length = snprintf(name, sizeof name, "bench%d", s);
        p += head(p, DCP_OPEN, length, 8, (uint32_t)(8 + length), 0, 0);
        memcpy(p, "\0\0\0\0\0\0\0\1", 8);
        if (filter == KEYS) p[7] |= 8;
        memcpy(p + 8, name, (size_t)length);
        p += 8 + length;
    } else if (filter == KEYS) {
        flags |= KEYS_ONLY;
    }
    if (filter == PREFIX) {
        p += head(p, CONTROL, 17, 0, 18, 0, 0);
        memcpy(p, "filter.key.prefix0", 18);
        p += 18;
    }
    for (int i = 0; i < partitions; i++) {
        p += head(p, dcp ? DCP_STREAM_REQ : STREAM_REQ, 0, size, size, i, (uint32_t)i);
        memset(p, 0, (size_t)size);
        flags = htonl(flags);
        memcpy(p, &flags, 4);
        flags = ntohl(flags);
        memset(p + 16, 0xff, 8);
        p += size;
    }
    put(s, out, (size_t)(p - out));
    free(out);
}

static void await_starts(inbox *in) {
    for (int started = 0; started < partitions && dialect < TAP;) {
        uint8_t *p = packet(in);
        if (!p) {
            if (!more(in)) fail("the node closed the connection");
            continue;
        }
        if (p[0] == 0x81 && (p[6] || p[7])) fail("a stream was refused");
        if (dialect == DCP ? p[0] == 0x81 && p[1] == DCP_STREAM_REQ : p[0] == 0x80 && p[1] == STREAM_START) started++;
    }
    if (dialect >= TAP) sleep(1); /* TAP has no message for the start of a stream */
}

/* The answer to a message of TAP that requests one. */
static void acknowledge(int s, const uint8_t *p) {
    uint8_t out[HEADER] = {0x81, p[1]};
    memcpy(out + 12, p + 12, 4);
    put(s, out, HEADER);
}

static void *follow(void *argument) {
    job *j = argument;
    int s = dial();
    inbox in = open_inbox(s);
    long total = requests * connections;
    int mutation = dialect >= TAP ? TAP_MUTATION : MUTATION + dialect;
    double *seen = calloc((size_t)total, sizeof(double));
    follow_all(s, 0);
    await_starts(&in);
    pthread_barrier_wait(&go);
    while (j->done < total) {
        uint8_t *p = packet(&in);
        if (!p) {
            if (!more(&in)) fail("the node closed the connection");
            continue;
        }
        if (dialect == TAP_ACKED && p[0] == 0x80 && p[HEADER + 3] & 1) acknowledge(s, p);
        if (p[0] != 0x80 || p[1] != mutation) continue;
        long number = 0;
        for (int i = 0; i < key_size; i++) number = number * 10 + (p[HEADER + p[4] + i] - '0');
        number -= base;
        if (number < 0 || number >= total || seen[number] != 0) continue;
        seen[number] = now();
        j->done++;
    }
    j->ended = now();
    while (!writers_done) usleep(1000);
    j->times = seen;
    for (long i = 0; i < total; i++) seen[i] = seen[i] > answered[i] ? seen[i] - answered[i] : 0;
    j->count = total;
    close(s);
    return NULL;
}

static void drain(void) {
    for (long turn = 0; turn < (requests > 100 ? 1 : requests); turn++) {
        int s = dial();
        inbox in = open_inbox(s);
        long items = 0, bytes = 0;
        double began = now();
        int dcp = dialect == DCP, end = dcp ? DCP_STREAM_END : STREAM_END, first = MUTATION + dcp;
        follow_all(s, dcp ? DCP_UNTIL_NOW : UNTIL_NOW);
        for (int ended = 0; ended < partitions;) {
            uint8_t *p = packet(&in);
            if (!p) {
                if (!more(&in)) fail("the node closed the connection");
                continue;
            }
            bytes += HEADER + u32(p + 8);
            if (p[0] == 0x80 && p[1] == end) ended++;
            else if (p[0] == 0x80 && p[1] >= first && p[1] < first + 3) items++;
            else if (p[0] == 0x81 && (p[6] || p[7])) fail("a stream was refused");
        }
        double took = now() - began;
        printf("{\"items\": %ld, \"bytes\": %ld, \"seconds\": %.4f, \"items_per_second\": %.0f, \"bytes_per_second\": %.0f}\n",
               items, bytes, took, (double)items / took, (double)bytes / took);
        close(s);
    }
}

static void start(void) {
    int s = dial();
    inbox in = open_inbox(s);
    double began = now();
    follow_all(s, 0);
    await_starts(&in);
    printf("{\"streams\": %d, \"seconds\": %.5f}\n", partitions, now() - began);
    close(s);
}

/* ── Loopback ─────────────────────────────────────────────────────────────────────────────────── */

static void *pour(void *argument) {
    int s = *(int *)argument;
    uint8_t *data = calloc(1, BATCH);
    for (long i = 0; i < requests; i++) put(s, data, BATCH);
    shutdown(s, SHUT_WR);
    return NULL;
}

static void loopback(void) {
    struct sockaddr_in at = {.sin_family = AF_INET};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    int listening = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listening, (struct sockaddr *)&at, size) || listen(listening, 1)) fail("listen");
    getsockname(listening, (struct sockaddr *)&at, &size);
    port = ntohs(at.sin_port);
    int near = dial(), far = accept(listening, NULL, NULL);
    pthread_t thread;
    inbox in = open_inbox(near);
    double began = now();
    pthread_create(&thread, NULL, pour, &far);
    long bytes = 0;
    while (more(&in)) bytes += (long)in.end, in.end = 0;
    double took = now() - began;
    pthread_join(thread, NULL);
    printf("{\"bytes\": %ld, \"seconds\": %.4f, \"bytes_per_second\": %.0f}\n", bytes, took, (double)bytes / took);
}

/* ── Together ─────────────────────────────────────────────────────────────────────────────────── */

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void distribution(const char *name, job *jobs, int count) {
    long total = 0, at = 0;
    for (int i = 0; i < count; i++) total += jobs[i].count;
    double *all = malloc(sizeof(double) * (size_t)(total + 1));
    for (int i = 0; i < count; i++) {
        memcpy(all + at, jobs[i].times, sizeof(double) * (size_t)jobs[i].count);
        at += jobs[i].count;
    }
    if (!total) return;
    qsort(all, (size_t)total, sizeof(double), by_size);
    printf(", \"%s\": {\"p50\": %.6f, \"p90\": %.6f, \"p99\": %.6f, \"p999\": %.6f, \"max\": %.6f}", name,
           all[total / 2], all[total * 9 / 10], all[total * 99 / 100], all[total * 999 / 1000], all[total - 1]);
    free(all);
}

static void ignore_all(void) {
    for (int i = 0; i < deaf; i++) {
        int s = dial(), little = 16 << 10;
        setsockopt(s, SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
        follow_all(s, 0);
    }
    if (deaf) sleep(2); /* what they take in before they fall behind is not what is measured */
}

static void load(int live) {
    int following = live ? followers : 0;
    ignore_all();
    job *jobs = calloc((size_t)(connections + following), sizeof(job));
    pthread_t *threads = calloc((size_t)(connections + following), sizeof(pthread_t));
    pthread_barrier_init(&go, NULL, (unsigned)(connections + following));
    if (live) answered = calloc((size_t)(requests * connections), sizeof(double));
    for (int i = 0; i < connections + following; i++) {
        jobs[i].id = i;
        if (i < connections) jobs[i].times = malloc(sizeof(double) * (size_t)requests);
        pthread_create(&threads[i], NULL, i < connections ? ask : follow, &jobs[i]);
    }
    double began = 1e18, ended = 0;
    long done = 0, failed = 0;
    for (int i = 0; i < connections; i++) {
        pthread_join(threads[i], NULL);
        began = jobs[i].began < began ? jobs[i].began : began;
        ended = jobs[i].ended > ended ? jobs[i].ended : ended;
        done += jobs[i].done;
        failed += jobs[i].failed;
    }
    writers_done = 1;
    for (int i = connections; i < connections + following; i++) pthread_join(threads[i], NULL);
    printf("{\"requests\": %ld, \"failed\": %ld, \"seconds\": %.4f, \"per_second\": %.0f", done, failed, ended - began,
           (double)done / (ended - began));
    distribution("latency", jobs, connections);
    if (live) distribution("behind", jobs + connections, following);
    printf("}\n");
    if (failed) exit(3);
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    for (int option; (option = getopt(count - 1, words + 1, "p:c:d:n:k:v:V:r:f:b:x:D:F:")) != -1;) switch (option) {
        case 'p': port = atoi(optarg); break;
        case 'c': connections = atoi(optarg); break;
        case 'd': depth = atoi(optarg); break;
        case 'n': requests = atol(optarg); break;
        case 'k': key_size = atoi(optarg); break;
        case 'v': value_size = atoi(optarg); break;
        case 'V': partitions = atoi(optarg); break;
        case 'r': rate = atof(optarg); break;
        case 'b': base = atol(optarg); break;
        case 'f': followers = atoi(optarg); break;
        case 'x': deaf = atoi(optarg); break;
        case 'D': dialect = atoi(optarg); break;
        case 'F': filter = atoi(optarg); break;
        default: return 2;
        }
    if (!strcmp(what, "write")) load(0);
    else if (!strcmp(what, "read")) opcode = GET, load(0);
    else if (!strcmp(what, "live")) load(1);
    else if (!strcmp(what, "drain")) drain();
    else if (!strcmp(what, "start")) start();
    else if (!strcmp(what, "loopback")) loopback();
    else return fprintf(stderr, "usage: see the comment at the top of loadgen.c\n"), 2;
    return 0;
}
