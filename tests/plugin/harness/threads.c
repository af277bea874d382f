/* Several communicators on several threads, a proxy thread each, while plans flip, windows open and
 * close, and everything is drained: nothing lost uncounted, no row torn. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "nccl_profiling.h"

#define N_WORKERS 4
#if defined __SANITIZE_THREAD__ || defined __SANITIZE_ADDRESS__
#define N_CALLS 30000
#else
#define N_CALLS 900000 /* torn lookups are rare even where nothing guards against them */
#endif
#define N_EPOCHS 400

static _Atomic int n_working;
static _Atomic uint64_t n_seen_records;

/* In the plan of epoch e every row has n_channels 1 + e % 60 and protocol e % 3: a mixture would show. */
static void load_epoch(uint32_t epoch) {
  zt_plan_row rows[64];
  const uint32_t n_rows = 1 + epoch % 64;
  for (uint32_t i = 0; i < n_rows; i++)
    rows[i] = (zt_plan_row){.min_bytes = 1000 + i * 10, .max_bytes = 1009 + i * 10, .n_ranks = 8, .n_nodes = 1,
                            .collective = 2, .algorithm = NCCL_RING, .protocol = epoch % 3,
                            .n_channels = (uint8_t)(1 + epoch % 60)};
  CHECK_EQUAL(the.load(rows, n_rows, epoch, 0), 0);
}

typedef struct {
  profiled profiler;
  void *coll;
} kernel;

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t ready;
  kernel queue[64];
  unsigned n_in, n_out;
  int closed;
} proxy;

static void *run_proxy(void *argument) {
  proxy *its = argument;
  for (;;) {
    pthread_mutex_lock(&its->lock);
    while (its->n_in == its->n_out && !its->closed) pthread_cond_wait(&its->ready, &its->lock);
    if (its->n_in == its->n_out) break;
    const kernel next = its->queue[its->n_out % 64];
    its->n_out++;
    pthread_mutex_unlock(&its->lock);
    void *channels[4];
    for (int i = 0; i < 4; i++) channels[i] = start_kernel_channel(next.profiler, next.coll, i, 1000);
    for (int i = 0; i < 4; i++) stop_kernel_channel(next.profiler, channels[i], 2000);
  }
  pthread_mutex_unlock(&its->lock);
  return NULL;
}

static void give_to_proxy(proxy *its, kernel next) {
  pthread_mutex_lock(&its->lock);
  if (its->n_in - its->n_out < 64) its->queue[its->n_in++ % 64] = next;
  pthread_cond_signal(&its->ready);
  pthread_mutex_unlock(&its->lock);
}

static void check_answer(const question *answered) {
  if (answered->n_channels == 0) return;
  int algorithm, protocol;
  chosen(answered, &algorithm, &protocol);
  CHECK_EQUAL(algorithm, NCCL_RING);
  const uint32_t epoch_modulo_60 = (uint32_t)answered->n_channels - 1; /* and 60 is a multiple of 3 */
  CHECK_EQUAL(protocol, epoch_modulo_60 % 3);
}

static void *run_worker(void *argument) {
  const uint64_t number = (uint64_t)(uintptr_t)argument;
  proxy its = {.lock = PTHREAD_MUTEX_INITIALIZER, .ready = PTHREAD_COND_INITIALIZER};
  pthread_t proxy_thread;
  pthread_create(&proxy_thread, NULL, run_proxy, &its);
  for (int life = 0; life < 3; life++) {
    profiled profiler = profiler_init(5, number, 8, 1, (int)number);
    tuned tuner = tuner_init(5, number, 8, 1);
    CHECK(profiler.context == tuner.context || the.next_profiler()[0] != '\0');
    for (int i = 0; i < N_CALLS / 3; i++) {
      question asked = ordinary_question(NCCL_ALL_GATHER, 1000 + (size_t)(i * 7 % 700));
      tuner_ask(tuner, &asked);
      check_answer(&asked);
      if (__atomic_load_n(&event_mask, __ATOMIC_RELAXED) == 0) continue;
      const launched coll = {.collective = NCCL_ALL_GATHER, .sequence = (uint64_t)i, .count = 125, .n_channels = 4,
                             .algorithm = NCCL_RING, .protocol = NCCL_LL};
      void *handle = start_coll(profiler, NULL, &coll);
      give_to_proxy(&its, (kernel){profiler, handle});
      stop_event(profiler, handle);
    }
    if (number % 2) tuner_finalize(tuner); /* kernels may still be in flight */
    profiler_finalize(profiler);
    if (!(number % 2)) tuner_finalize(tuner);
  }
  pthread_mutex_lock(&its.lock);
  its.closed = 1;
  pthread_cond_signal(&its.ready);
  pthread_mutex_unlock(&its.lock);
  pthread_join(proxy_thread, NULL);
  atomic_fetch_sub(&n_working, 1);
  return NULL;
}

static void *run_drainer(void *argument) {
  (void)argument;
  static zt_record records[4096];
  static zt_cost_record costs[16];
  for (;;) {
    const int last = atomic_load(&n_working) == 0;
    const size_t n = drained(records, 4096);
    for (size_t i = 0; i < n; i++) {
      CHECK_EQUAL(records[i].n_ranks, 8);
      CHECK(records[i].comm_id >= 1 && records[i].comm_id <= N_WORKERS);
      if (records[i].flags & ZT_FLAG_TIMED)
        CHECK(records[i].duration_us >= 0);
      else if (records[i].flags & ZT_FLAG_MATCHED) { /* all of one epoch: no lookup saw two plans */
        CHECK_EQUAL(records[i].n_channels, 1 + records[i].epoch % 60);
        CHECK_EQUAL(records[i].protocol, records[i].epoch % 3);
      }
    }
    atomic_fetch_add(&n_seen_records, n);
    the.drain_costs(costs, 16);
    (void)counted();
    if (last && n == 0) return NULL;
  }
}

void test_threads(void) {
  pthread_t workers[N_WORKERS], drainer;
  the.set_recording(1);
  atomic_store(&n_working, N_WORKERS);
  for (uintptr_t i = 0; i < N_WORKERS; i++) pthread_create(&workers[i], NULL, run_worker, (void *)(i + 1));
  pthread_create(&drainer, NULL, run_drainer, NULL);
  uint32_t epoch = 0;
  while (atomic_load(&n_working) > 0 || epoch < N_EPOCHS) {
    load_epoch(++epoch);
    the.set_observing(epoch % 2);
    the.set_step(epoch);
    CHECK_EQUAL(the.flip(epoch), 0);
    CHECK_EQUAL(the.active_epoch(), epoch);
  }
  for (int i = 0; i < N_WORKERS; i++) pthread_join(workers[i], NULL);
  pthread_join(drainer, NULL);
  const zt_counters counters = counted();
  CHECK_EQUAL(counters.n_calls, N_WORKERS * (N_CALLS / 3) * 3);
  CHECK_EQUAL(counters.n_communicators, N_WORKERS * 3);
  CHECK_EQUAL(atomic_load(&n_seen_records) + counters.n_dropped_records, counters.n_calls + counters.n_timed);
  CHECK(counters.n_matched > 0);
}
