/* The thread pool: fork-join with dynamic item stealing, spinning briefly before sleeping.
 *
 * A job is published by setting the open bit of `state`; a worker joins by incrementing the count in the same word, so
 * a worker that is late (asleep, or not scheduled by the kernel) finds the job closed and never delays it. */
#include "headway.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ACTIVE_MASK 0xffffu
#define OPEN_BIT 0x10000u
#define EPOCH_ONE 0x20000u
#define SPIN_NS 80000

static _Alignas(64) _Atomic uint64_t state;
static _Alignas(64) _Atomic int64_t next_item;
static _Alignas(64) struct {
    hw_task task;
    void *context;
    int64_t items;
} job;

static pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static _Atomic int sleepers;
static _Atomic int stopping;
static _Atomic int wanted_threads = 1;
static int running_workers;
static pthread_t workers[HW_MAX_THREADS];
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t scratch_key;

typedef struct {
    void *data[HW_SCRATCH_SLOTS];
    size_t bytes[HW_SCRATCH_SLOTS];
} scratch_set;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void free_scratch(void *pointer) {
    scratch_set *set = pointer;
    for (int i = 0; i < HW_SCRATCH_SLOTS; i++) free(set->data[i]);
    free(set);
}

/* After fork only the calling thread exists: forget the workers, they are started again when needed. */
static void after_fork_in_child(void) {
    pthread_mutex_init(&caller_lock, NULL);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&wake, NULL);
    atomic_store(&state, 0);
    atomic_store(&sleepers, 0);
    atomic_store(&stopping, 0);
    running_workers = 0;
}

static void initialise(void) {
    pthread_key_create(&scratch_key, free_scratch);
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

void *hw_scratch(enum hw_scratch_slot slot, size_t bytes) {
    pthread_once(&once, initialise);
    scratch_set *set = pthread_getspecific(scratch_key);
    if (!set) {
        set = calloc(1, sizeof *set);
        if (!set) abort();
        pthread_setspecific(scratch_key, set);
    }
    if (set->bytes[slot] < bytes) {
        free(set->data[slot]);
        size_t size = (bytes + bytes / 4 + 4095) & ~(size_t)4095;
        if (posix_memalign(&set->data[slot], 64, size)) abort();
        set->bytes[slot] = size;
    }
    return set->data[slot];
}

void hw_advise_huge(void *data, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t)data + page - 1) & ~(page - 1), last = ((uintptr_t)data + bytes) & ~(page - 1);
    if (last > first && last - first >= (4u << 20)) madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

static void run_items(void) {
    hw_task task = job.task;
    void *context = job.context;
    int64_t items = job.items;
    for (;;) {
        int64_t item = atomic_fetch_add_explicit(&next_item, 1, memory_order_relaxed);
        if (item >= items) return;
        task(context, item);
    }
}

static uint64_t sleep_until_change(uint64_t seen_epoch) {
    uint64_t s;
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&sleepers, 1);
    while ((s = atomic_load(&state)) / EPOCH_ONE == seen_epoch && !atomic_load(&stopping))
        pthread_cond_wait(&wake, &sleep_lock);
    atomic_fetch_sub(&sleepers, 1);
    pthread_mutex_unlock(&sleep_lock);
    return s;
}

static uint64_t wait_for_job(uint64_t seen_epoch) {
    int64_t deadline = 0;
    for (unsigned spin = 1;; spin++) {
        uint64_t s = atomic_load_explicit(&state, memory_order_acquire);
        if (s / EPOCH_ONE != seen_epoch || atomic_load_explicit(&stopping, memory_order_relaxed)) return s;
        relax();
        if (spin % 64 == 0) {
            int64_t now = now_ns();
            if (!deadline)
                deadline = now + SPIN_NS;
            else if (now > deadline)
                return sleep_until_change(seen_epoch);
        }
    }
}

static void *worker_main(void *argument) {
    uint64_t seen = (uint64_t)(uintptr_t)argument;
    for (;;) {
        uint64_t s = wait_for_job(seen);
        if (atomic_load(&stopping)) return NULL;
        while (s & OPEN_BIT) {
            if (atomic_compare_exchange_weak_explicit(&state, &s, s + 1, memory_order_acq_rel, memory_order_acquire)) {
                run_items();
                atomic_fetch_sub_explicit(&state, 1, memory_order_release);
                break;
            }
        }
        seen = s / EPOCH_ONE;
    }
}

static void start_workers(int count) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (running_workers < count) {
        void *seen = (void *)(uintptr_t)(atomic_load(&state) / EPOCH_ONE);
        if (pthread_create(&workers[running_workers], NULL, worker_main, seen)) break;
        running_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void stop_workers(void) {
    pthread_mutex_lock(&sleep_lock);
    atomic_store(&stopping, 1);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_lock);
    for (int i = 0; i < running_workers; i++) pthread_join(workers[i], NULL);
    running_workers = 0;
    atomic_store(&stopping, 0);
}

void hw_parallel(hw_task task, void *context, int64_t items) {
    int threads = atomic_load_explicit(&wanted_threads, memory_order_relaxed);
    if (items <= 1 || threads <= 1 || pthread_mutex_trylock(&caller_lock)) {
        for (int64_t i = 0; i < items; i++) task(context, i);
        return;
    }
    pthread_once(&once, initialise);
    if (running_workers < threads - 1) start_workers(threads - 1);
    job.task = task;
    job.context = context;
    job.items = items;
    atomic_store_explicit(&next_item, 0, memory_order_relaxed);
    uint64_t epoch = atomic_load_explicit(&state, memory_order_relaxed) / EPOCH_ONE + 1;
    atomic_store(&state, epoch * EPOCH_ONE | OPEN_BIT);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&sleep_lock);
    }
    run_items();
    atomic_fetch_and_explicit(&state, ~(uint64_t)OPEN_BIT, memory_order_acq_rel);
    for (unsigned spin = 1; atomic_load_explicit(&state, memory_order_acquire) & ACTIVE_MASK; spin++) {
        relax();
        if (spin % 4096 == 0) sched_yield();
    }
    pthread_mutex_unlock(&caller_lock);
}

int hw_threads(void) { return atomic_load_explicit(&wanted_threads, memory_order_relaxed); }

void hw_set_num_threads(int n) {
    n = n < 1 ? 1 : n > HW_MAX_THREADS ? HW_MAX_THREADS : n;
    pthread_mutex_lock(&caller_lock);
    if (n - 1 < running_workers) stop_workers();
    atomic_store(&wanted_threads, n);
    pthread_mutex_unlock(&caller_lock);
}

int hw_get_num_threads(void) { return hw_threads(); }

#define BUSY_NS 3000

static void busy_task(void *context, int64_t item) {
    (void)context, (void)item;
    for (int64_t end = now_ns() + BUSY_NS; now_ns() < end;) relax();
}

double hw_fork_join_ns(int64_t repeats) {
    int64_t items = hw_threads();
    for (int i = 0; i < 20; i++) hw_parallel(busy_task, NULL, items);
    int64_t start = now_ns();
    for (int64_t i = 0; i < repeats; i++) hw_parallel(busy_task, NULL, items);
    return (double)(now_ns() - start) / (double)repeats - BUSY_NS;
}
