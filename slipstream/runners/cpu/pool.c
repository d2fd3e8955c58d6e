/* The thread pool.
 *
 * A job is divided into chunks; a 64-bit ticket (generation | number of chunks | next chunk) hands them out by one
 * atomic add, so a late worker can never mix one job's chunk with the next job's function. The caller works too and
 * waits only for chunks that a worker has claimed: a worker that the system has put aside delays no job.
 * Workers spin for half a millisecond (about the gap between two steps of a small model), then sleep.
 * A worker put aside in the middle of a chunk does cost a time slice: then another process wants its core, and the
 * caller goes on alone for four times as long as it was made to wait.
 *
 * After fork() the child has no workers: it runs jobs alone until it calls ss_set_threads itself. Forking while a
 * job runs is not supported.
 */
#include "pool.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define MAX_THREADS 256
#define INDEX_BITS 20
#define INDEX_MASK ((1u << INDEX_BITS) - 1)
#define SPIN_NS 500000
#define LATE_NS 200000 /* no chunk takes this much longer than its neighbour */
#define ALONE_FACTOR 4

typedef struct {
  chunk_fn fn;
  void *job;
  _Alignas(64) atomic_uint_fast64_t ticket; /* generation << 40 | num_chunks << 20 | next */
  _Alignas(64) atomic_int done;
  atomic_int stop;
  atomic_int sleepers;
  atomic_int busy; /* a caller is inside: there may be one only */
  pthread_mutex_t lock;
  pthread_cond_t wake;
  pthread_t workers[MAX_THREADS];
  int num_threads; /* workers and the caller */
  int64_t alone_until; /* 0: not alone */
} pool_t;

static pool_t pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .num_threads = 1};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline uint32_t ticket_next(uint64_t t) { return (uint32_t)t & INDEX_MASK; }
static inline uint32_t ticket_count(uint64_t t) { return (uint32_t)(t >> INDEX_BITS) & INDEX_MASK; }
static inline int has_work(uint64_t t) { return ticket_next(t) < ticket_count(t); }

/* Claim and run chunks until none is left. fn and job are read after a claim: they stay until that chunk is done. */
static void work(void) {
  while (has_work(atomic_load_explicit(&pool.ticket, memory_order_relaxed))) {
    uint64_t t = atomic_fetch_add_explicit(&pool.ticket, 1, memory_order_acq_rel);
    if (!has_work(t)) return;
    pool.fn(pool.job, (int)ticket_next(t));
    atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
  }
}

static int wanted(void) { return atomic_load(&pool.stop) || has_work(atomic_load(&pool.ticket)); }

/* True once there is work (or the end); false when it was worth no more waiting. */
static int spin(void) {
  int64_t until = now_ns() + SPIN_NS;
  do {
    for (int i = 0; i < 64; i++) {
      if (wanted()) return 1;
      relax();
    }
  } while (now_ns() < until);
  return 0;
}

static void sleep_until_wanted(void) {
  pthread_mutex_lock(&pool.lock);
  atomic_fetch_add(&pool.sleepers, 1);
  while (!wanted()) pthread_cond_wait(&pool.wake, &pool.lock);
  atomic_fetch_sub(&pool.sleepers, 1);
  pthread_mutex_unlock(&pool.lock);
}

static void wake_sleepers(void) {
  if (!atomic_load(&pool.sleepers)) return;
  pthread_mutex_lock(&pool.lock);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
}

static _Thread_local void *scratch;
static _Thread_local unsigned long scratch_bytes;

static void *worker_main(void *unused) {
  (void)unused;
  while (!atomic_load(&pool.stop)) {
    if (!spin()) sleep_until_wanted();
    work();
  }
  free(scratch);
  return NULL;
}

static int all_done(int num_chunks) {
  return atomic_load_explicit(&pool.done, memory_order_acquire) == num_chunks;
}

/* All chunks are claimed; those of others may still run. Give the core away if that takes long. */
static void wait_done(int num_chunks) {
  for (int spins = 0; spins < 500; spins++) {
    if (all_done(num_chunks)) return;
    relax();
  }
  int64_t start = now_ns(), end = start;
  while (!all_done(num_chunks)) {
    relax();
    end = now_ns();
    if (end - start > LATE_NS / 4) sched_yield();
  }
  if (end - start > LATE_NS) pool.alone_until = end + ALONE_FACTOR * (end - start);
}

static int alone(void) {
  if (pool.num_threads > 1 && (!pool.alone_until || now_ns() > pool.alone_until)) {
    pool.alone_until = 0;
    return 0;
  }
  return 1;
}

static void publish(chunk_fn fn, void *job, int num_chunks) {
  uint64_t generation = (atomic_load(&pool.ticket) >> (2 * INDEX_BITS)) + 1;
  pool.fn = fn;
  pool.job = job;
  atomic_store(&pool.done, 0);
  atomic_store(&pool.ticket, generation << (2 * INDEX_BITS) | (uint64_t)num_chunks << INDEX_BITS);
  wake_sleepers();
}

void pool_run(chunk_fn fn, void *job, int num_chunks) {
  assert(num_chunks >= 0 && num_chunks < (int)INDEX_MASK - MAX_THREADS);
  if (num_chunks <= 1 || alone()) {
    for (int i = 0; i < num_chunks; i++) fn(job, i);
    return;
  }
  int entered = atomic_exchange(&pool.busy, 1);
  assert(!entered && "two threads call the kernels at once");
  (void)entered;
  publish(fn, job, num_chunks);
  work();
  wait_done(num_chunks);
  atomic_store(&pool.busy, 0);
}

int pool_threads(void) { return pool.num_threads; }

void *pool_scratch(unsigned long bytes) {
  if (bytes > scratch_bytes) {
    free(scratch);
    scratch_bytes = (bytes + 4095) & ~4095ul;
    if (posix_memalign(&scratch, 64, scratch_bytes)) abort();
  }
  return scratch;
}

static void stop_workers(void) {
  atomic_store(&pool.stop, 1);
  pthread_mutex_lock(&pool.lock);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
  for (int i = 1; i < pool.num_threads; i++) pthread_join(pool.workers[i], NULL);
  pool.num_threads = 1;
  atomic_store(&pool.stop, 0);
}

static void after_fork(void) {
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.wake, NULL);
  atomic_store(&pool.sleepers, 0);
  atomic_store(&pool.busy, 0);
  pool.num_threads = 1;
}

/* Returns how many threads run now, the caller among them: fewer than asked for if the system refuses. */
int ss_set_threads(int num_threads) {
  if (num_threads < 1) num_threads = 1;
  if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
  stop_workers();
  static int watched;
  if (!watched++) pthread_atfork(NULL, NULL, after_fork);
  while (pool.num_threads < num_threads) {
    if (pthread_create(&pool.workers[pool.num_threads], NULL, worker_main, NULL)) break;
    pool.num_threads++;
  }
  return pool.num_threads;
}

static void spin_chunk(void *job, int chunk) {
  volatile float *out = job;
  float a = (float)chunk;
  for (int i = 0; i < 100; i++) a = a * 0.5f + 1.0f;
  out[chunk] += a;
}

/* For tests and timing: a job of trivial chunks, each adding to its own element of out. */
void ss_pool_probe(float *out, int num_chunks, int repeats) {
  for (int i = 0; i < repeats; i++) pool_run(spin_chunk, out, num_chunks);
}
