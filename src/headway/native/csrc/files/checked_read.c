/* Files read with a checksum of each piece, while it is in the cache of the core: CRC-32 as zlib computes it.
 *
 * A library of its own, which compiles at once: engines on a GPU have no use for the others. What its functions are for:
 * headway/kv/disk_store.py. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__PCLMUL__) && !defined(HW_GENERIC)
#define HW_CARRYLESS
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32) && !defined(HW_GENERIC)
#define HW_ARM_CRC
#include <arm_acle.h>
#endif

#define HW_EXPORT __attribute__((visibility("default")))
#define PIECE_BYTES (1 << 16)         /* what has a checksum of its own */
#define READ_BYTES (4 * PIECE_BYTES) /* read at a time: a part of a core's cache */
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

#if defined(HW_CARRYLESS)

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

static int read_checked(int file, uint8_t *header, int64_t header_bytes, uint8_t *out, int64_t bytes, uint32_t *crcs) {
    int failure = read_all(file, header, header_bytes, 0);
    for (int64_t at = 0; at < bytes && !failure; at += READ_BYTES) {
        int64_t count = bytes - at < READ_BYTES ? bytes - at : READ_BYTES;
        failure = read_all(file, out + at, count, header_bytes + at);
        if (!failure) hw_crc32_pieces(out + at, count, crcs + at / PIECE_BYTES);
    }
    return failure;
}

/* A file that is a header and `bytes` behind it, which have checksums as above. `used_s`: its time of modification.
 * Returns 0, OTHER_LENGTH if its length is another, or errno. */
HW_EXPORT int hw_read_checked(const char *path, uint8_t *header, int64_t header_bytes, uint8_t *out, int64_t bytes,
                              uint32_t *crcs, double *used_s) {
    int file;
    do {
        file = open(path, O_RDONLY | O_CLOEXEC);
    } while (file < 0 && errno == EINTR);
    if (file < 0) return errno;
    struct stat status;
    int failure = fstat(file, &status) ? errno : 0;
    if (!failure) {
        *used_s = (double)status.st_mtime;
        failure = status.st_size == header_bytes + bytes
                      ? read_checked(file, header, header_bytes, out, bytes, crcs)
                      : OTHER_LENGTH;
    }
    close(file);
    return failure;
}
