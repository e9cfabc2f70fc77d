/* Processes that meet in shared memory, each with a part of every sum.
 *
 *   hw_meeting | a line for each rank | places: [2][ranks][bytes]
 *
 * A rank writes its part to its place, says so, and waits until all have. The places are used in turns: who writes one
 * for the second time after has been told that all have come to the turn between, so all have read what was there. */
#include "headway.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define LINE 64
#define SPINS 4096
#define YIELDS 20000

typedef struct {
    _Atomic uint32_t aborted;
    char rest[LINE - 4];
} hw_meeting;

typedef struct {
    _Atomic uint64_t turn;
    char rest[LINE - 8];
} rank_line;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static rank_line *line_of(void *memory, int64_t rank) { return (rank_line *)((char *)memory + LINE) + rank; }

static char *place_of(void *memory, int64_t ranks, int64_t place_bytes, uint64_t turn, int64_t rank) {
    return (char *)memory + LINE * (1 + ranks) + place_bytes * ((int64_t)(turn & 1) * ranks + rank);
}

static int await(void *memory, int64_t ranks, uint64_t turn) {
    hw_meeting *meeting = memory;
    for (int64_t rank = 0; rank < ranks; rank++) {
        rank_line *line = line_of(memory, rank);
        for (int64_t tries = 0; atomic_load_explicit(&line->turn, memory_order_acquire) < turn; tries++) {
            if (atomic_load_explicit(&meeting->aborted, memory_order_relaxed)) return 0;
            if (tries < SPINS) {
                relax();
            } else if (tries < YIELDS) {
                sched_yield();
            } else {
                nanosleep(&(struct timespec){0, 50000}, NULL);
            }
        }
    }
    return 1;
}

int64_t hw_meeting_bytes(int64_t ranks, int64_t place_bytes) { return LINE * (1 + ranks) + 2 * ranks * place_bytes; }

void hw_meeting_abort(void *memory) {
    atomic_store_explicit(&((hw_meeting *)memory)->aborted, 1, memory_order_relaxed);
}

/* Parts of `bytes` each, of which `place_bytes` is a multiple of 64 and the most. Returns 0 if the meeting is off. */
static int meet(void *memory, int64_t rank, int64_t ranks, int64_t place_bytes, uint64_t turn, const void *part,
                int64_t bytes) {
    memcpy(place_of(memory, ranks, place_bytes, turn, rank), part, (size_t)bytes);
    atomic_store_explicit(&line_of(memory, rank)->turn, turn, memory_order_release);
    return await(memory, ranks, turn);
}

int hw_ranks_sum(void *memory, int64_t rank, int64_t ranks, int64_t place_bytes, uint64_t turn, float *x,
                 int64_t count) {
    if (!meet(memory, rank, ranks, place_bytes, turn, x, count * 4)) return 0;
    for (int64_t other = 0; other < ranks; other++) {
        const float *part = (const float *)place_of(memory, ranks, place_bytes, turn, other);
        if (other == 0) {
            memcpy(x, part, (size_t)count * 4);
        } else {
            for (int64_t i = 0; i < count; i++) x[i] += part[i];
        }
    }
    return 1;
}

int hw_ranks_gather(void *memory, int64_t rank, int64_t ranks, int64_t place_bytes, uint64_t turn, const void *part,
                    int64_t bytes, char *out, int64_t stride) {
    if (!meet(memory, rank, ranks, place_bytes, turn, part, bytes)) return 0;
    for (int64_t other = 0; other < ranks; other++)
        memcpy(out + other * stride, place_of(memory, ranks, place_bytes, turn, other), (size_t)bytes);
    return 1;
}
