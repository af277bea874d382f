/* Measures the plugin from inside the process, as NCCL calls it: through the v5 symbol of the library that the command
 * line names first. The second is a foreign tuner (other_tuner.c), which ours asks first. Prints one line "metric value"
 * per figure of one round. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nccl_abi.h"
#include "zerotune_plugin.h"

#define N_QUERIES 1024
#define N_THREADS 8
#define N_TIMED 40000 /* calls per thread in the tail measurement */

static const nccl_tuner_v5 *tuner, *other;
static __typeof__(&zerotune_plan_load) load;
static __typeof__(&zerotune_plan_flip) flip;
static __typeof__(&zerotune_set_phase) set_phase;
static __typeof__(&zerotune_set_recording) set_recording;
static __typeof__(&zerotune_drain) drain;
static __typeof__(&zerotune_counters) read_counters;
static __typeof__(&zerotune_next_tuner) next_tuner;
static __typeof__(&zerotune_reset) reset;
static __typeof__(&zerotune_communicators) communicators;
static __typeof__(&zerotune_prepare) prepare;
static __typeof__(&zerotune_prepare_end) prepare_end;
static __typeof__(&zerotune_promise) promise;
static __typeof__(&zerotune_commit) commit;
static void *library;

static void *symbol(const char *name) {
  void *found = dlsym(library, name);
  if (found == NULL) exit((fprintf(stderr, "%s\n", dlerror()), 1));
  return found;
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double quantile(double *values, size_t n, double q) {
  qsort(values, n, sizeof *values, by_value);
  return values[(size_t)((double)(n - 1) * q)];
}

static double clock_cost_ns(void) {
  static double costs[4096];
  for (size_t i = 0; i < 4096; i++) {
    const uint64_t begin = now_ns();
    costs[i] = (double)(now_ns() - begin);
  }
  return quantile(costs, 4096, 0.5);
}

/* ---- the plan: rows over the five (collective, phase) pairs that training has, one size class each ---- */

static const uint8_t pairs[5][2] = {{2, 1}, {2, 2}, {2, 4}, {3, 3}, {4, 3}};
static zt_plan_row rows[ZT_MAX_PLAN_ROWS];

typedef struct {
  uint64_t bytes;
  int collective;
} query;
static query queries[5][N_QUERIES];

static uint32_t next_random(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

static void make_plan(uint32_t n_rows, uint32_t epoch) {
  for (uint32_t i = 0; i < n_rows; i++) {
    const uint32_t index = i / 5, octave = 8 + (index / 4) % 40, quarter = index % 4, shape = index / 160;
    const uint64_t base = UINT64_C(1) << octave;
    rows[i] = (zt_plan_row){.min_bytes = base + quarter * (base / 4),
                            .max_bytes = base + (quarter + 1) * (base / 4) - 1,
                            .n_ranks = 64 + shape * 8,
                            .n_nodes = 8 + shape,
                            .collective = pairs[i % 5][0],
                            .phase = pairs[i % 5][1],
                            .algorithm = NCCL_RING,
                            .protocol = (uint8_t)(index % 3),
                            .n_channels = 8};
  }
  uint32_t state = 7;
  for (uint32_t pair = 0; pair < 5; pair++)
    for (uint32_t i = 0; i < N_QUERIES; i++) {
      uint32_t row;
      do row = (next_random(&state) >> 8) % n_rows;
      while (row % 5 != pair || rows[row].n_ranks != 64);
      queries[pair][i] = (query){rows[row].min_bytes + next_random(&state) % (rows[row].max_bytes - rows[row].min_bytes + 1),
                                 rows[row].collective};
    }
  if (load(rows, n_rows, epoch, 0) != 0 || flip(epoch) != 0) exit(2);
}

/* ---- calls ---- */

static void *new_context(uint64_t id) {
  void *context;
  tuner->init(&context, id, 64, 8, NULL, NULL, NULL);
  return context;
}

static void costs_as_nccl_fills_them(float *costs) {
  for (int i = 0; i < 21; i++) costs[i] = i >= 3 && i < 6 ? 100.0f + (float)i : -1.0f;
  costs[20] = 90.0f;
}

static int ask(void *context, const query *asked, float *costs) {
  int n_channels = 0;
  tuner->get_coll_info(context, asked->collective, asked->bytes, 1, (float **)(void *)costs, 7, 3, 0, &n_channels);
  return n_channels;
}

static int ask_other(void *context, const query *asked, float *costs) {
  int n_channels = 0;
  other->get_coll_info(context, asked->collective, asked->bytes, 1, (float **)(void *)costs, 7, 3, 0, &n_channels);
  return n_channels;
}

static bool is_agreed; /* else the plan is the whole process's */

/* The rows in force on the newest communicator, phases by the cycle of the next calls. */
static void agree(uint32_t pair, uint32_t n_rows) {
  zt_communicator_state state;
  static zt_cycle_call cycle[N_QUERIES];
  for (uint32_t i = 0; i < N_QUERIES; i++)
    cycle[i] = (zt_cycle_call){queries[pair][i].bytes, (uint32_t)queries[pair][i].collective, pairs[pair][1]};
  communicators(&state, 1);
  if (prepare(rows, n_rows, 50 + pair, 0) != 0) exit(5);
  const uint64_t from_call = promise(state.owner, 0);
  if (commit(state.owner, &from_call, 1, cycle, N_QUERIES) != 0) exit(6);
  prepare_end();
}

/* Median over batches of 32 of the time per call. */
static double per_call_ns(void *context, int (*body)(void *, const query *, float *)) {
  static double batches[5 * N_QUERIES / 32];
  float costs[21];
  costs_as_nccl_fills_them(costs);
  const double clock_ns = clock_cost_ns();
  static zt_record drained[N_QUERIES];
  size_t n = 0;
  volatile int sink = 0;
  for (uint32_t pair = 0; pair < 5; pair++) {
    set_phase(pairs[pair][1]);
    if (is_agreed) agree(pair, 1000);
    for (uint32_t i = 0; i < N_QUERIES; i++) sink += body(context, &queries[pair][i], costs); /* warm */
    for (uint32_t first = 0; first < N_QUERIES; first += 32) {
      const uint64_t begin = now_ns();
      for (uint32_t i = 0; i < 32; i++) sink += body(context, &queries[pair][first + i], costs);
      batches[n++] = ((double)(now_ns() - begin) - clock_ns) / 32;
    }
    while (drain(drained, N_QUERIES) > 0) continue;
  }
  return quantile(batches, n, 0.5);
}

/* ---- the tail at eight threads, each with a communicator of its own, one drainer ---- */

static _Atomic int n_running;
static double *latencies;

static void *call_timed(void *argument) {
  const size_t thread = (size_t)argument;
  void *context = new_context(100 + thread);
  float costs[21];
  costs_as_nccl_fills_them(costs);
  atomic_fetch_add(&n_running, 1);
  while (atomic_load(&n_running) < N_THREADS) continue;
  for (uint32_t i = 0; i < N_TIMED; i++) {
    const uint64_t begin = now_ns();
    (void)ask(context, &queries[0][i % N_QUERIES], costs);
    latencies[thread * N_TIMED + i] = (double)(now_ns() - begin);
  }
  atomic_fetch_add(&n_running, 1);
  tuner->finalize(context);
  return NULL;
}

static void tail(double *p50_ns, double *p999_ns) {
  static zt_record drained[4096];
  pthread_t threads[N_THREADS];
  const double clock_ns = clock_cost_ns();
  latencies = malloc(sizeof(double) * N_THREADS * N_TIMED);
  atomic_store(&n_running, 0);
  set_phase(pairs[0][1]);
  for (size_t i = 0; i < N_THREADS; i++) pthread_create(&threads[i], NULL, call_timed, (void *)i);
  while (atomic_load(&n_running) < 2 * N_THREADS) {
    while (drain(drained, 4096) == 4096) continue;
    nanosleep(&(struct timespec){0, 1000000}, NULL); /* as the agent's thread: it wakes now and then */
  }
  for (size_t i = 0; i < N_THREADS; i++) pthread_join(threads[i], NULL);
  *p50_ns = quantile(latencies, N_THREADS * N_TIMED, 0.5) - clock_ns;
  *p999_ns = quantile(latencies, N_THREADS * N_TIMED, 0.999) - clock_ns;
  free(latencies);
}

static double flip_ns(uint32_t epoch, int n_flips) {
  double *costs = malloc(sizeof(double) * (size_t)n_flips);
  const double clock_ns = clock_cost_ns();
  for (int i = 0; i < n_flips; i++) {
    load(rows, 100, epoch + (uint32_t)i, 0);
    const uint64_t begin = now_ns();
    flip(epoch + (uint32_t)i);
    costs[i] = (double)(now_ns() - begin) - clock_ns;
  }
  const double p50 = quantile(costs, (size_t)n_flips, 0.5);
  free(costs);
  return p50;
}

/* Another tuner alone, ours alone, and ours with the other before it: no communicator may be left from before. */
static void measure_chained(const char *path) {
  void *others_library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (others_library == NULL) exit(3);
  other = dlsym(others_library, "ncclTunerPlugin_v5");
  *(int *)dlsym(others_library, "other_answer") = 1; /* a cell: the first, tree/ll */
  *(int *)dlsym(others_library, "other_channels") = 4;
  nccl_nvl_domain_info domain = {8, 8, 8};
  nccl_tuner_constants constants;
  memset(&constants, 0, sizeof constants);
  void *context;
  other->init(&context, 1, 64, 8, NULL, &domain, &constants);
  printf("other_alone %.2f\n", per_call_ns(context, ask_other));
  context = new_context(1);
  printf("ours_alone %.2f\n", per_call_ns(context, ask));
  tuner->finalize(context);
  setenv("ZEROTUNE_NEXT_TUNER", path, 1);
  reset();
  make_plan(1000, 1);
  tuner->init(&context, 1, 64, 8, NULL, &domain, &constants);
  printf("chained %.2f\n", per_call_ns(context, ask));
  if (next_tuner()[0] == '\0') exit(4);
  tuner->finalize(context);
}

int main(int argc, char **argv) {
  if (argc != 3 || (library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL)) == NULL) return 1;
  tuner = symbol("ncclTunerPlugin_v5");
  load = (__typeof__(load))symbol("zerotune_plan_load");
  flip = (__typeof__(flip))symbol("zerotune_plan_flip");
  set_phase = (__typeof__(set_phase))symbol("zerotune_set_phase");
  set_recording = (__typeof__(set_recording))symbol("zerotune_set_recording");
  drain = (__typeof__(drain))symbol("zerotune_drain");
  read_counters = (__typeof__(read_counters))symbol("zerotune_counters");
  next_tuner = (__typeof__(next_tuner))symbol("zerotune_next_tuner");
  reset = (__typeof__(reset))symbol("zerotune_reset");
  communicators = (__typeof__(communicators))symbol("zerotune_communicators");
  prepare = (__typeof__(prepare))symbol("zerotune_prepare");
  prepare_end = (__typeof__(prepare_end))symbol("zerotune_prepare_end");
  promise = (__typeof__(promise))symbol("zerotune_promise");
  commit = (__typeof__(commit))symbol("zerotune_commit");
  void *context = new_context(1);
  static const uint32_t n_rows[] = {10, 100, 1000, 4000};
  for (uint32_t i = 0; i < 4; i++) {
    make_plan(n_rows[i], i + 1);
    printf("lookup_%u %.2f\n", n_rows[i], per_call_ns(context, ask));
  }
  make_plan(1000, 9);
  void *agreed = new_context(2);
  is_agreed = true;
  printf("agreed_1000 %.2f\n", per_call_ns(agreed, ask));
  is_agreed = false;
  tuner->finalize(agreed);
  set_recording(1);
  printf("lookup_record %.2f\n", per_call_ns(context, ask));
  double p50_ns, p999_ns;
  tail(&p50_ns, &p999_ns);
  zt_counters counters;
  read_counters(&counters);
  const double dropped = 100.0 * (double)counters.n_dropped_records / (N_THREADS * N_TIMED);
  printf("threads_p50 %.2f\nthreads_p999 %.2f\ndropped %.3f\n", p50_ns, p999_ns, dropped);
  set_recording(0);
  printf("flip %.2f\nclock %.2f\n", flip_ns(100, 500), clock_cost_ns());
  tuner->finalize(context);
  measure_chained(argv[2]);
  return 0;
}
