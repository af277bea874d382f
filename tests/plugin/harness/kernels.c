/* What the times of a kernel are times of: several collectives, channels that NCCL does not count, works of another. */
#include "nccl_profiling.h"

enum { GPU_KERNEL = 1, CPU_KERNEL = 2, HOST_ONLY = 3 };
#define MOST_MEMBERS 4

static const launched gather = {.collective = NCCL_ALL_GATHER, .sequence = 5, .count = 1000, .n_channels = 2,
                                .algorithm = NCCL_RING, .protocol = NCCL_LL};

static void decide(tuned tuner, size_t n_bytes) {
  question asked = ordinary_question(NCCL_ALL_GATHER, n_bytes);
  tuner_ask(tuner, &asked);
}

/* One kernel of `n` collectives, the i-th on channels i and i + 1; returns when it began, by the GPU's clock. */
static uint64_t run_kernel(profiled profiler, const launched *colls, int n) {
  void *group = start_group(profiler), *handles[MOST_MEMBERS], *channels[2];
  for (int i = 0; i < n; i++) handles[i] = start_coll(profiler, group, &colls[i]);
  for (int i = 0; i < n; i++) stop_event(profiler, handles[i]);
  stop_event(profiler, group);
  static const uint64_t starts_ns[MOST_MEMBERS] = {0, 0, 500, 500}, stops_ns[MOST_MEMBERS] = {1000, 1500, 2000, 2000};
  const uint64_t now_ns = gpu_now();
  for (int i = 0; i < n; i++) {
    for (int c = 0; c < 2; c++) channels[c] = start_kernel_channel(profiler, handles[i], i + c, now_ns + starts_ns[i]);
    for (int c = 0; c < 2; c++) stop_kernel_channel(profiler, channels[c], now_ns + stops_ns[i]);
  }
  return now_ns;
}

static void of_run(launched colls[MOST_MEMBERS]) {
  for (int i = 0; i < MOST_MEMBERS; i++) {
    colls[i] = gather;
    colls[i].sequence += (uint64_t)i;
  }
}

/* Collectives within four times of each other are decided on for their sum, and are one measurement of it. */
static void a_fused_run_is_one_collective_of_its_sum(profiled profiler, tuned tuner) {
  const zt_plan_row rows[] = {{.min_bytes = 16001, .max_bytes = 1 << 20, .n_ranks = 8, .n_nodes = 1, .collective = 2,
                               .algorithm = NCCL_RING, .protocol = NCCL_LL}};
  adopt(rows, 1, 3, 0);
  launched colls[MOST_MEMBERS];
  of_run(colls);
  zt_record records[3];
  for (int repeat = 0; repeat < 400; repeat++) { /* more than the pool has events */
    decide(tuner, 24000);
    const uint64_t began_ns = run_kernel(profiler, colls, 3);
    CHECK_EQUAL(drained(records, 3), 1);
    CHECK_EQUAL(records[0].message_bytes, 24000);
    CHECK_EQUAL(records[0].flags, ZT_FLAG_TIMED | ZT_FLAG_MATCHED | ZT_FLAG_FUSED);
    CHECK_EQUAL(records[0].sequence, 5);
    CHECK_EQUAL(records[0].timing_source, GPU_KERNEL);
    CHECK_EQUAL(records[0].start_ns, began_ns);
    CHECK(records[0].duration_us == 2.0f);
    CHECK_EQUAL(records[0].n_channels, 4);
    decide(tuner, 8000);
    run_kernel(profiler, colls, 1);
    CHECK_EQUAL(drained(records, 3), 1);
    CHECK_EQUAL(records[0].message_bytes, 8000);
    CHECK_EQUAL(records[0].flags, ZT_FLAG_TIMED);
  }
  CHECK_EQUAL(counted().n_lost_events, 0);
  CHECK_EQUAL(counted().n_inseparable, 0);
}

/* What else the kernel carries has its share in the time of each. */
static void decisions_that_share_a_kernel_are_not_timed(profiled profiler, tuned tuner) {
  launched colls[MOST_MEMBERS];
  of_run(colls);
  colls[2].count = 8000;
  zt_record records[MOST_MEMBERS];
  decide(tuner, 16000);
  decide(tuner, 64000);
  run_kernel(profiler, colls, 3);
  CHECK_EQUAL(drained(records, 3), 2);
  for (int i = 0; i < 2; i++) CHECK_EQUAL(records[i].timing_source, HOST_ONLY);
  CHECK_EQUAL(counted().n_inseparable, 2);
  for (int i = 0; i < 2; i++) colls[i].graph_captured = 1;
  run_kernel(profiler, colls, 2);
  if (profiler.version < 5) return; /* tells of no capture */
  CHECK_EQUAL(drained(records, 3), 2);
  for (int i = 0; i < 2; i++) CHECK_EQUAL(records[i].timing_source, HOST_ONLY);
  CHECK_EQUAL(counted().n_inseparable, 4);
}

/* A plan of NCCL's that is full leaves the rest to the next kernel. */
static void half_a_run_is_not_timed(profiled profiler, tuned tuner) {
  launched colls[MOST_MEMBERS];
  of_run(colls);
  zt_record records[MOST_MEMBERS];
  decide(tuner, 32000);
  for (int half = 0; half < 2; half++) {
    run_kernel(profiler, colls, 2);
    CHECK_EQUAL(drained(records, MOST_MEMBERS), 1);
    CHECK_EQUAL(records[0].timing_source, HOST_ONLY);
  }
  CHECK_EQUAL(counted().n_inseparable, 2);
}

/* A communicator that ends leaves nothing of a run behind but its host's time. */
static void a_run_may_be_cut_short(profiled profiler, tuned tuner) {
  profiled ending = profiler_init(profiler.version, 2, 8, 1, 0);
  (void)tuner;
  void *group = start_group(ending), *handles[2];
  for (int i = 0; i < 2; i++) handles[i] = start_coll(ending, group, &gather);
  for (int i = 0; i < 2; i++) stop_event(ending, handles[i]);
  profiler_finalize(ending);
  zt_record records[MOST_MEMBERS];
  for (size_t n = drained(records, MOST_MEMBERS), i = 0; i < n; i++) CHECK_EQUAL(records[i].timing_source, HOST_ONLY);
}

/* CollNet, and NVLS over several nodes: NCCL leaves the count at 0, and its channels start all the same. */
static void channels_that_nccl_does_not_count(profiled profiler, tuned tuner) {
  (void)tuner;
  launched coll = gather;
  coll.n_channels = 0;
  coll.algorithm = NCCL_COLLNET_DIRECT;
  coll.protocol = NCCL_SIMPLE;
  zt_record record;
  for (int repeat = 0; repeat < 1500; repeat++) {
    coll.sequence = (uint64_t)repeat;
    run_kernel(profiler, &coll, 1);
    CHECK_EQUAL(drained(&record, 1), repeat > 0); /* it is over when the next one runs */
    if (repeat == 0) continue;
    CHECK_EQUAL(record.sequence, repeat - 1);
    CHECK_EQUAL(record.n_channels, 2);
    CHECK_EQUAL(record.timing_source, GPU_KERNEL);
    CHECK(record.duration_us == 1.0f);
  }
  CHECK_EQUAL(counted().n_lost_events, 0);
}

/* NCCL's thread may be away between its looks at a channel's start and at its end, and then tells of neither. */
static void channels_that_nccl_forgets_to_tell(profiled profiler, tuned tuner) {
  (void)tuner;
  enum { N_CALLS = 3000 }; /* more than the pool has events */
  zt_record records[2];
  for (int i = 0; i < N_CALLS; i++) {
    const bool is_forgotten = i % 2 == 0;
    void *group = start_group(profiler), *handle = start_coll(profiler, group, &gather);
    stop_event(profiler, handle);
    stop_event(profiler, group);
    const uint64_t now_ns = gpu_now();
    for (int c = 0; c < (is_forgotten ? 1 : 2); c++)
      stop_kernel_channel(profiler, start_kernel_channel(profiler, handle, c, now_ns), now_ns + 1000);
    CHECK_EQUAL(drained(records, 2), is_forgotten ? 0 : 2); /* it is known once the next one is over */
    if (is_forgotten) continue;
    CHECK_EQUAL(records[0].timing_source, HOST_ONLY);
    CHECK_EQUAL(records[1].timing_source, GPU_KERNEL);
  }
  CHECK_EQUAL(counted().n_lost_events, 0);
}

/* Hosts run ahead: hundreds of calls are enqueued before the first one runs. */
static void far_ahead_of_the_gpu(profiled profiler, tuned tuner) {
  (void)tuner;
  enum { N_CALLS = 600, KERNEL_NS = 20000000 };
  static void *handles[N_CALLS];
  launched coll = gather;
  zt_record record;
  (void)run_kernel(profiler, &coll, 1); /* fewer are in flight: NCCL's thread is not late */
  CHECK_EQUAL(drained(&record, 1), 1);
  coll.n_channels = 0;
  coll.algorithm = NCCL_NVLS;
  for (int i = 0; i < N_CALLS; i++) {
    void *group = start_group(profiler);
    coll.sequence = (uint64_t)i;
    handles[i] = start_coll(profiler, group, &coll);
    stop_event(profiler, handles[i]);
    stop_event(profiler, group);
  }
  for (int i = 0; i < N_CALLS; i++) {
    stop_kernel_channel(profiler, start_kernel_channel(profiler, handles[i], 0, gpu_now()), gpu_now() + KERNEL_NS);
    CHECK_EQUAL(drained(&record, 1), i > 0);
    if (i > 0) CHECK_EQUAL(record.sequence, i - 1);
  }
}

/* NCCL's ring of times has 64 entries, and a thread that was away while more works ran takes later ones' times for what it
 * looks for. */
static void a_thread_that_was_away_is_not_believed(profiled profiler, tuned tuner) {
  (void)tuner;
  enum { N_CALLS = 100, N_BEFORE = 10, KERNEL_NS = 100000 }; /* believed unless away for 1.6 ms */
  static void *handles[N_CALLS];
  launched coll = gather;
  coll.n_channels = 1;
  zt_record record;
  void *group = start_group(profiler), *first = start_coll(profiler, group, &coll);
  stop_event(profiler, first);
  stop_event(profiler, group);
  stop_kernel_channel(profiler, start_kernel_channel(profiler, first, 0, gpu_now()), gpu_now() + KERNEL_NS);
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.timing_source, GPU_KERNEL);
  for (int i = 0; i < N_CALLS; i++) {
    group = start_group(profiler);
    handles[i] = start_coll(profiler, group, &coll);
    stop_event(profiler, handles[i]);
    stop_event(profiler, group);
  }
  for (int i = 0; i < N_CALLS; i++) {
    if (i == N_BEFORE) pass(2000000);
    const uint64_t start_ns = gpu_now();
    stop_kernel_channel(profiler, start_kernel_channel(profiler, handles[i], 0, start_ns), start_ns + KERNEL_NS);
    CHECK_EQUAL(drained(&record, 1), 1);
    CHECK_EQUAL(record.timing_source, i >= N_BEFORE && i <= N_CALLS - 1 - 64 ? HOST_ONLY : GPU_KERNEL);
  }
  CHECK_EQUAL(counted().n_impossible_times, N_CALLS - 64 - N_BEFORE);
}

/* One whose start was read late on some of its channels only. */
static void channels_that_never_ran_together(profiled profiler, tuned tuner) {
  (void)tuner;
  zt_record record;
  void *group = start_group(profiler), *handle = start_coll(profiler, group, &gather), *channels[2];
  stop_event(profiler, handle);
  stop_event(profiler, group);
  const uint64_t starts_ns[] = {gpu_now(), gpu_now() + 64000};
  for (int i = 0; i < 2; i++) channels[i] = start_kernel_channel(profiler, handle, i, starts_ns[i]);
  for (int i = 0; i < 2; i++) stop_kernel_channel(profiler, channels[i], starts_ns[i] + 1000);
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.timing_source, HOST_ONLY);
  CHECK_EQUAL(counted().n_impossible_times, 1);
}

void test_kernels(void) {
  static void (*const each[])(profiled, tuned) = {
      a_fused_run_is_one_collective_of_its_sum, decisions_that_share_a_kernel_are_not_timed, half_a_run_is_not_timed,
      a_run_may_be_cut_short, channels_that_nccl_does_not_count,
      channels_that_nccl_forgets_to_tell, far_ahead_of_the_gpu, a_thread_that_was_away_is_not_believed,
      channels_that_never_ran_together};
  for (int version = 4; version <= 7; version++)
    for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) {
      the.reset();
      profiled profiler = profiler_init(version, 1, 8, 1, 0);
      tuned tuner = tuner_init(version, 1, 8, 1);
      the.set_observing(1);
      stop_clocks();
      each[i](profiler, tuner);
      let_clocks_go();
      tuner_finalize(tuner);
      profiler_finalize(profiler);
      zt_record record;
      while (drained(&record, 1) > 0) continue;
    }
}
