/* Files read with a checksum of each piece, while it is in the cache of the core: CRC-32 as zlib computes it.
 *
 * A library of its own, which compiles at once: engines on a GPU have no use for the others. What its functions are for:
 * headway/kv/disk_store.py. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__PCLMUL__) && !defined(HW_GENERIC)
#define HW_X86
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32) && !defined(HW_GENERIC)
#define HW_ARM_CRC
#include <arm_acle.h>
#endif

#define HW_EXPORT __attribute__((visibility("default")))
#define PIECE_BYTES (1 << 16)         /* what has a checksum of its own */
#define READ_BYTES (2 * PIECE_BYTES)  /* read at a time: a part of a core's cache */
#define PART_BYTES (8 * READ_BYTES)   /* of a file that one thread reads, so that all end at about the same time */
#define OTHER_LENGTH (-1)

static inline uint64_t load_u64(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

#if defined(HW_ARM_CRC)

static uint32_t update(uint32_t crc, const uint8_t *p, int64_t bytes) {
    for (; bytes >= 8; p += 8, bytes -= 8) crc = __crc32d(crc, load_u64(p));
    for (; bytes > 0; p++, bytes--) crc = __crc32b(crc, *p);
    return crc;
}

#else

/* tables[t][b]: of the byte b with t zeros behind it. */
static uint32_t tables[8][256];

static __attribute__((constructor)) void make_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
        tables[0][byte] = crc;
    }
    for (int t = 1; t < 8; t++) {
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = tables[t - 1][byte];
            tables[t][byte] = (crc >> 8) ^ tables[0][crc & 255];
        }
    }
}

static uint32_t update_by_tables(uint32_t crc, const uint8_t *p, int64_t bytes) {
    for (; bytes >= 8; p += 8, bytes -= 8) {
        uint64_t word = load_u64(p) ^ crc;
        crc = 0;
        for (int t = 0; t < 8; t++) crc ^= tables[7 - t][(word >> (8 * t)) & 255];
    }
    for (; bytes > 0; p++, bytes--) crc = (crc >> 8) ^ tables[0][(crc ^ *p) & 255];
    return crc;
}

#if defined(HW_X86)

/* `far` holds x^(d + 32) and x^(d - 32) modulo the polynomial, bits reversed, for data d bits further on. */
static inline __m128i fold(__m128i x, __m128i far, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(x, far, 0x00), high = _mm_clmulepi64_si128(x, far, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, next), high);
}

static inline __m128i load_128(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }

static uint32_t update(uint32_t crc, const uint8_t *p, int64_t bytes) {
    if (bytes < 64) return update_by_tables(crc, p, bytes);
    const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i x0 = _mm_xor_si128(load_128(p), _mm_cvtsi32_si128((int)crc));
    __m128i x1 = load_128(p + 16), x2 = load_128(p + 32), x3 = load_128(p + 48);
    for (p += 64, bytes -= 64; bytes >= 64; p += 64, bytes -= 64) {
        x0 = fold(x0, by_512, load_128(p));
        x1 = fold(x1, by_512, load_128(p + 16));
        x2 = fold(x2, by_512, load_128(p + 32));
        x3 = fold(x3, by_512, load_128(p + 48));
    }
    x0 = fold(fold(fold(x0, by_128, x1), by_128, x2), by_128, x3);
    for (; bytes >= 16; p += 16, bytes -= 16) x0 = fold(x0, by_128, load_128(p));
    uint8_t folded[16]; /* has the checksum of all that is behind */
    _mm_storeu_si128((__m128i *)folded, x0);
    return update_by_tables(update_by_tables(0, folded, 16), p, bytes);
}

#else

static uint32_t update(uint32_t crc, const uint8_t *p, int64_t bytes) { return update_by_tables(crc, p, bytes); }

#endif
#endif

/* One checksum for each PIECE_BYTES, the last piece may be shorter. */
HW_EXPORT void hw_crc32_pieces(const uint8_t *data, int64_t bytes, uint32_t *crcs) {
    for (int64_t at = 0; at < bytes; at += PIECE_BYTES) {
        *crcs++ = ~update(~0u, data + at, bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES);
    }
}

static int read_all(int file, uint8_t *out, int64_t bytes, int64_t offset) {
    while (bytes > 0) {
        ssize_t count = pread(file, out, (size_t)bytes, (off_t)offset);
        if (count == 0) return OTHER_LENGTH;
        if (count < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        out += count;
        offset += count;
        bytes -= count;
    }
    return 0;
}

/* A copy that this CPU is not going to read: whole lines of memory are written without being fetched first. */
static void copy_past_cache(uint8_t *to, const uint8_t *from, int64_t bytes) {
    int64_t at = 0;
#if defined(HW_X86)
    if ((uintptr_t)to % 64 == 0) {
        for (; at + 64 <= bytes; at += 64) {
            for (int part = 0; part < 64; part += 16) {
                _mm_stream_si128((__m128i *)(to + at + part), load_128(from + at + part));
            }
        }
        _mm_sfence();
    }
#endif
    memcpy(to + at, from + at, (size_t)(bytes - at));
}

static int read_checked(int file, int64_t offset, uint8_t *out, int64_t bytes, uint32_t *crcs, int past_cache) {
    _Alignas(64) uint8_t read[READ_BYTES];
    for (int64_t at = 0; at < bytes; at += READ_BYTES) {
        int64_t count = bytes - at < READ_BYTES ? bytes - at : READ_BYTES;
        uint8_t *into = past_cache ? read : out + at;
        int failure = read_all(file, into, count, offset + at);
        if (failure) return failure;
        hw_crc32_pieces(into, count, crcs + at / PIECE_BYTES);
        if (past_cache) copy_past_cache(out + at, read, count);
    }
    return 0;
}

/* Files that are read by several threads, part by part. Each is a header and `bytes` behind it. */
typedef struct {
    int64_t num_files, header_bytes, bytes, parts_per_file;
    const char *const *paths;
    uint8_t *const *out;  /* of each file, like all that follow: what is behind its header */
    uint8_t *headers;     /* [num_files][header_bytes] */
    uint32_t *crcs;       /* [num_files][pieces] */
    double *used_s;       /* its time of modification */
    int32_t *failures;    /* 0, OTHER_LENGTH if its length is another, or errno */
    int64_t *ended;       /* numbers of files, as they came to their end */
    int past_cache;       /* whether `out` is for a device to read */
    int64_t next_part;
    int32_t is_cancelled;
    int64_t num_ended;
    pthread_mutex_t lock; /* of `num_ended` and `ended` */
    pthread_cond_t has_ended;
    int64_t parts_left[];
} Reads;

HW_EXPORT void *hw_reads_begin(int64_t num_files, int64_t header_bytes, int64_t bytes, const char *const *paths,
                               uint8_t *const *out, uint8_t *headers, uint32_t *crcs, double *used_s,
                               int32_t *failures, int64_t *ended, int past_cache) {
    Reads *reads = calloc(1, sizeof(Reads) + (size_t)num_files * sizeof(int64_t));
    if (!reads) return NULL;
    reads->num_files = num_files;
    reads->header_bytes = header_bytes;
    reads->bytes = bytes;
    reads->parts_per_file = bytes > PART_BYTES ? (bytes + PART_BYTES - 1) / PART_BYTES : 1;
    reads->paths = paths;
    reads->out = out;
    reads->headers = headers;
    reads->crcs = crcs;
    reads->used_s = used_s;
    reads->failures = failures;
    reads->ended = ended;
    reads->past_cache = past_cache;
    for (int64_t file = 0; file < num_files; file++) reads->parts_left[file] = reads->parts_per_file;
    pthread_mutex_init(&reads->lock, NULL);
    pthread_cond_init(&reads->has_ended, NULL);
    return reads;
}

/* Only when no thread is in one of the others. */
HW_EXPORT void hw_reads_free(Reads *reads) {
    pthread_cond_destroy(&reads->has_ended);
    pthread_mutex_destroy(&reads->lock);
    free(reads);
}

/* As `why_not_private` in headway/cache_dir.py. */
static int check_private(int file, struct stat *status) {
    if (fstat(file, status)) return errno;
    if (!S_ISREG(status->st_mode) || status->st_uid != geteuid()) return EPERM;
    return status->st_mode & (S_IWGRP | S_IWOTH) ? EPERM : 0;
}

static int read_header(Reads *reads, int64_t number, int file, const struct stat *status) {
    if (status->st_size != reads->header_bytes + reads->bytes) return OTHER_LENGTH;
    reads->used_s[number] = (double)status->st_mtime;
    return read_all(file, reads->headers + number * reads->header_bytes, reads->header_bytes, 0);
}

static int read_part(Reads *reads, int64_t number, int64_t part) {
    int file;
    do {
        file = open(reads->paths[number], O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    } while (file < 0 && errno == EINTR);
    if (file < 0) return errno;
    int64_t at = part * PART_BYTES, pieces = (reads->bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    int64_t count = reads->bytes - at < PART_BYTES ? reads->bytes - at : PART_BYTES;
    struct stat status;
    int failure = check_private(file, &status);
    if (!failure && part == 0) failure = read_header(reads, number, file, &status);
    if (!failure) {
        uint32_t *crcs = reads->crcs + number * pieces + at / PIECE_BYTES;
        failure = read_checked(file, reads->header_bytes + at, reads->out[number] + at, count, crcs, reads->past_cache);
    }
    close(file);
    return failure;
}

/* Read parts until none is left to be begun. For any number of threads at once. */
HW_EXPORT void hw_reads_help(Reads *reads) {
    int64_t num_parts = reads->num_files * reads->parts_per_file, taken;
    while ((taken = __atomic_fetch_add(&reads->next_part, 1, __ATOMIC_RELAXED)) < num_parts) {
        int64_t number = taken / reads->parts_per_file;
        int32_t *failed = reads->failures + number, failure = 0;
        if (__atomic_load_n(&reads->is_cancelled, __ATOMIC_RELAXED)) {
            failure = ECANCELED;
        } else if (!__atomic_load_n(failed, __ATOMIC_RELAXED)) {
            failure = read_part(reads, number, taken % reads->parts_per_file);
        }
        if (failure) __atomic_store_n(failed, failure, __ATOMIC_RELAXED);
        if (__atomic_sub_fetch(&reads->parts_left[number], 1, __ATOMIC_ACQ_REL)) continue;
        pthread_mutex_lock(&reads->lock);
        reads->ended[reads->num_ended++] = number;
        pthread_cond_signal(&reads->has_ended);
        pthread_mutex_unlock(&reads->lock);
    }
}

/* Wait until so many files, of all, have come to their end. Returns how many have. For one thread. */
HW_EXPORT int64_t hw_reads_wait(Reads *reads, int64_t num_ended) {
    pthread_mutex_lock(&reads->lock);
    while (reads->num_ended < num_ended) pthread_cond_wait(&reads->has_ended, &reads->lock);
    int64_t found = reads->num_ended;
    pthread_mutex_unlock(&reads->lock);
    return found;
}

/* Files that have not been begun fail. */
HW_EXPORT void hw_reads_cancel(Reads *reads) { __atomic_store_n(&reads->is_cancelled, 1, __ATOMIC_RELAXED); }
