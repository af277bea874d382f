/* Times of other works than the collective's, as NCCL 2.31 and newer may tell them. */
#include "nccl_profiling.h"

enum { GPU_KERNEL = 1, HOST_ONLY = 3 };
#define MS UINT64_C(1000000)

static const launched gather = {.collective = NCCL_ALL_GATHER, .sequence = 1, .count = 1000, .n_channels = 2,
                                .algorithm = NCCL_RING, .protocol = NCCL_LL};

/* What times a call is said to have, whose two channels started so long before now; each ran for a microsecond. */
static int source_of(profiled profiler, const launched *coll, uint64_t ago_ns, uint64_t other_ago_ns) {
  void *group = start_group(profiler), *handle = start_coll(profiler, group, coll), *channels[2];
  stop_event(profiler, handle);
  stop_event(profiler, group);
  const uint64_t now_ns = gpu_now(), starts_ns[] = {now_ns - ago_ns, now_ns - other_ago_ns};
  for (int i = 0; i < 2; i++) channels[i] = start_kernel_channel(profiler, handle, i, starts_ns[i]);
  for (int i = 0; i < 2; i++) stop_kernel_channel(profiler, channels[i], starts_ns[i] + 1000);
  zt_record record;
  CHECK_EQUAL(drained(&record, 1), 1);
  return record.timing_source;
}

static void channels_that_never_ran_together(profiled profiler) {
  CHECK_EQUAL(source_of(profiler, &gather, 0, 0), GPU_KERNEL);
  CHECK_EQUAL(source_of(profiler, &gather, 0, 1001), HOST_ONLY);
  CHECK_EQUAL(source_of(profiler, &gather, 0, 1000), GPU_KERNEL);
  CHECK_EQUAL(counted().n_impossible_times, 1);
  CHECK_EQUAL(the.channels_seen(8, 1), 2);
}

static void a_start_before_the_call_is_never_forgotten(profiled profiler) {
  profiled other = profiler_init(7, 2, 8, 1, 0);
  CHECK_EQUAL(source_of(profiler, &gather, 0, 0), GPU_KERNEL);
  CHECK_EQUAL(source_of(other, &gather, 0, 0), GPU_KERNEL);
  CHECK_EQUAL(source_of(profiler, &gather, 10 * MS, 10 * MS), HOST_ONLY);
  CHECK_EQUAL(source_of(profiler, &gather, 0, 0), HOST_ONLY);
  CHECK_EQUAL(counted().n_impossible_times, 2);
  CHECK_EQUAL(source_of(other, &gather, 0, 0), GPU_KERNEL);
  profiler_finalize(other);
}

static void a_replay_was_called_long_ago(profiled profiler) {
  launched replay = gather;
  replay.graph_captured = 1;
  CHECK_EQUAL(source_of(profiler, &replay, 0, 0), GPU_KERNEL);
  CHECK_EQUAL(source_of(profiler, &replay, 10 * MS, 10 * MS), GPU_KERNEL);
}

static void the_clock_is_known_from_what_nobody_observes(profiled profiler) {
  the.set_observing(0);
  stop_kernel_channel(profiler, start_kernel_channel(profiler, NULL, 0, gpu_now()), gpu_now());
  the.set_observing(1);
  CHECK_EQUAL(source_of(profiler, &gather, 10 * MS, 10 * MS), HOST_ONLY);
}

static void clocks_may_drift(profiled profiler) {
  CHECK_EQUAL(source_of(profiler, &gather, 0, 0), GPU_KERNEL);
  pass(100 * MS);
  const uint64_t ago_ns = MS * 3 / 20; /* as much as is always granted, and half as much */
  CHECK_EQUAL(source_of(profiler, &gather, ago_ns, ago_ns), GPU_KERNEL);
}

void test_shifts(void) {
  static void (*const each[])(profiled) = {channels_that_never_ran_together, a_start_before_the_call_is_never_forgotten,
                                           a_replay_was_called_long_ago, the_clock_is_known_from_what_nobody_observes,
                                           clocks_may_drift};
  for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) {
    the.reset();
    profiled profiler = profiler_init(7, 1, 8, 1, 0);
    the.set_observing(1);
    stop_clocks();
    each[i](profiler);
    let_clocks_go();
    profiler_finalize(profiler);
  }
  for (int version = 4; version < 7; version++) { /* their host counts right */
    the.reset();
    profiled profiler = profiler_init(version, 1, 8, 1, 0);
    tuned tuner = tuner_init(version, 1, 8, 1);
    the.set_observing(1);
    CHECK_EQUAL(source_of(profiler, &gather, 0, 0), GPU_KERNEL);
    CHECK_EQUAL(source_of(profiler, &gather, 10 * MS, 10 * MS), GPU_KERNEL);
    CHECK_EQUAL(counted().n_impossible_times, 0);
    tuner_finalize(tuner);
    profiler_finalize(profiler);
  }
}
