/* Timed records by every profiler version. */
#include "nccl_profiling.h"

/* the tuner that came with each profiler version's NCCL */
static int tuner_of(int profiler_version) {
  static const int versions[] = {0, 3, 4, 4, 4, 5, 6, 7};
  return versions[profiler_version];
}

static const launched gather = {.collective = NCCL_ALL_GATHER, .sequence = 5, .count = 1000, .n_channels = 4,
                                .algorithm = NCCL_RING, .protocol = NCCL_LL};

static void one_record(zt_record *record) {
  CHECK_EQUAL(drained(record, 1), 1);
  zt_record more;
  CHECK_EQUAL(drained(&more, 1), 0);
}

static void times_what_ran(int version) {
  /* NCCL initialises the profiler first up to 2.27; from 2.28 on either order must do. */
  tuned tuner;
  if (version >= 5) tuner = tuner_init(tuner_of(version), 0xC0FFEE, 16, 2);
  profiled profiler = profiler_init(version, 0xC0FFEE, 16, 2, 3);
  if (version < 5) tuner = tuner_init(tuner_of(version), 0xC0FFEE, 16, 2);
  const zt_plan_row row = {.min_bytes = 1, .max_bytes = 1 << 20, .n_ranks = 16, .n_nodes = 2, .collective = 2,
                           .phase = 2, .algorithm = NCCL_RING, .protocol = NCCL_LL, .n_channels = 4};
  adopt(&row, 1, 11, 0);
  CHECK_EQUAL(event_mask, (version < 7 ? 0 : 64) | beside.mask); /* NCCL counts wrongly what is not asked for */
  the.set_observing(1);
  CHECK_EQUAL(event_mask, (version < 6 ? 66 : 66 + 4096) | beside.mask);
  the.set_phase(17);
  the.set_step(3);
  the.set_memory_pressure(0.25f);
  question asked = ordinary_question(NCCL_ALL_GATHER, 16000);
  tuner_ask(tuner, &asked);
  void *group = start_group(profiler);
  CHECK(group != NULL); /* 2.27 and older follow no collective otherwise */
  void *coll = start_coll(profiler, group, &gather);
  the.set_phase(16); /* what comes later does not matter */
  the.set_step(4);
  stop_event(profiler, coll);
  stop_event(profiler, group);
  zt_record record;
  CHECK_EQUAL(drained(&record, 1), 0);
  void *channels[4];
  static const uint64_t starts[] = {5000, 4000, 6000, 4500}, stops[] = {9000, 9500, 9750, 9100};
  for (int i = 0; i < 4; i++) channels[i] = start_kernel_channel(profiler, coll, i, starts[i]);
  for (int i = 3; i >= 0; i--) stop_kernel_channel(profiler, channels[i], stops[i]);
  stop_event(profiler, channels[0]); /* once more: nothing happens */
  one_record(&record);
  CHECK_EQUAL(record.comm_id, 0xC0FFEE);
  CHECK_EQUAL(record.message_bytes, 16000);
  CHECK_EQUAL(record.sequence, 5);
  CHECK_EQUAL(record.epoch, 11);
  CHECK_EQUAL(record.n_ranks, 16);
  CHECK_EQUAL(record.n_nodes, 2);
  CHECK_EQUAL(record.rank, 3);
  CHECK_EQUAL(record.collective, NCCL_ALL_GATHER);
  CHECK_EQUAL(record.algorithm, NCCL_RING);
  CHECK_EQUAL(record.protocol, NCCL_LL);
  CHECK_EQUAL(record.n_channels, 4);
  CHECK_EQUAL(record.phase, 2);
  CHECK_EQUAL(record.datatype, 0);
  CHECK_EQUAL(record.flags, ZT_FLAG_MATCHED | ZT_FLAG_TIMED);
  CHECK_EQUAL(record.step, 3);
  CHECK(record.memory_pressure == 0.25f);
  CHECK_EQUAL(record.timing_source, version >= 4 ? 1 : 2);
  CHECK(record.duration_us >= 0 && record.start_ns > 0);
  if (version >= 4) {
    CHECK_EQUAL(record.start_ns, 4000);
    CHECK(record.duration_us == 5.75f);
  }
  CHECK_EQUAL(counted().n_timed, 1);
  CHECK_EQUAL(the.channels_seen(16, 2), 4);
  question later = ordinary_question(NCCL_ALL_GATHER, 16000); /* by now the tuner knows who it is, too */
  the.set_recording(1);
  tuner_ask(tuner, &later);
  one_record(&record);
  CHECK_EQUAL(record.comm_id, 0xC0FFEE);
  tuner_finalize(tuner);
  profiler_finalize(profiler);
}

static void counts_total_bytes(int version) {
  profiled profiler = profiler_init(version, 1, 8, 1, 0);
  tuned tuner = tuner_init(tuner_of(version), 1, 8, 1);
  the.set_observing(1);
  static const struct {
    int collective;
    uint64_t bytes;
  } cases[] = {{NCCL_ALL_GATHER, 8000}, {NCCL_REDUCE_SCATTER, 16000}, {NCCL_ALL_REDUCE, 2000}, {NCCL_BROADCAST, 1000}};
  for (size_t i = 0; i < 4; i++) {
    launched coll = gather;
    coll.collective = cases[i].collective;
    coll.sequence = i;
    run_collective(profiler, &coll, 4, 1000, 2000);
    zt_record record;
    one_record(&record);
    CHECK_EQUAL(record.message_bytes, cases[i].bytes);
    CHECK_EQUAL(record.flags, ZT_FLAG_TIMED | (version < 5 ? 0 : ZT_FLAG_PASSED_BY)); /* no tuner was asked */
  }
  tuner_finalize(tuner);
  profiler_finalize(profiler);
}

/* v3 says how many channels there may be; how many there were shows when the next group starts. */
static void v3_settles_with_the_next_group(void) {
  profiled profiler = profiler_init(3, 1, 8, 1, 0);
  tuned tuner = tuner_init(4, 1, 8, 1);
  the.set_observing(1);
  launched coll = gather;
  coll.n_channels = 16;
  zt_record record;
  run_collective(profiler, &coll, 3, 0, 0);
  CHECK_EQUAL(drained(&record, 1), 0);
  coll.sequence = 6;
  run_collective(profiler, &coll, 2, 0, 0);
  one_record(&record);
  CHECK_EQUAL(record.sequence, 5);
  CHECK_EQUAL(record.n_channels, 3);
  CHECK_EQUAL(record.timing_source, 2);
  void *group = start_group(profiler), *pair[2]; /* a kernel of two: the second's start ends nothing, nor is it timed */
  for (int i = 0; i < 2; i++) {
    coll.sequence = 7 + (uint64_t)i;
    pair[i] = start_coll(profiler, group, &coll);
    stop_event(profiler, pair[i]);
  }
  stop_kernel_channel(profiler, start_kernel_channel(profiler, pair[0], 0, 0), 0);
  one_record(&record);
  CHECK_EQUAL(record.sequence, 6);
  CHECK_EQUAL(record.n_channels, 2);
  stop_kernel_channel(profiler, start_kernel_channel(profiler, pair[1], 1, 0), 0);
  CHECK_EQUAL(drained(&record, 1), 0);
  stop_kernel_channel(profiler, start_kernel_channel(profiler, pair[0], 2, 0), 0);
  coll.sequence = 9;
  run_collective(profiler, &coll, 1, 0, 0);
  for (uint64_t i = 0; i < 2; i++) {
    CHECK_EQUAL(drained(&record, 1), 1);
    CHECK_EQUAL(record.timing_source, 3);
  }
  profiler_finalize(profiler); /* the last one is over when the communicator is */
  one_record(&record);
  CHECK_EQUAL(record.sequence, 9);
  CHECK_EQUAL(record.n_channels, 1);
  CHECK_EQUAL(the.channels_seen(8, 1), 3);
  tuner_finalize(tuner);
}

static void falls_back_and_says_so(int version) {
  profiled profiler = profiler_init(version, 1, 8, 1, 0);
  tuned tuner = tuner_init(tuner_of(version), 1, 8, 1);
  the.set_observing(1);
  zt_record record;
  run_collective(profiler, &gather, 4, 0, 0); /* no globaltimer... */
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.timing_source, 3); /* ...with a start at 10 ns on channel 1: two clocks */
  void *group = start_group(profiler), *coll = start_coll(profiler, group, &gather), *channels[4];
  stop_event(profiler, coll);
  for (int i = 0; i < 4; i++) channels[i] = start_kernel_channel(profiler, coll, i, 0);
  for (int i = 0; i < 4; i++) stop_kernel_channel(profiler, channels[i], 0);
  one_record(&record);
  CHECK_EQUAL(record.timing_source, 2);
  the.set_timing_source_override(4); /* an emulated clock may stand at 0 */
  run_collective(profiler, &gather, 1, 0, 2000);
  launched narrow = gather;
  narrow.n_channels = 1;
  run_collective(profiler, &narrow, 1, 0, 2000);
  CHECK_EQUAL(drained(&record, 1), 1); /* the one that lacks three channels: enqueue time only */
  CHECK_EQUAL(record.timing_source, 3);
  one_record(&record);
  CHECK_EQUAL(record.timing_source, 4);
  CHECK_EQUAL(record.start_ns, 0);
  CHECK(record.duration_us == 2.0f);
  the.set_timing_source_override(0);
  launched symmetric = gather; /* a kernel that bypasses the tuner: no channels, no known algorithm */
  symmetric.n_channels = 0;
  symmetric.is_symmetric = 1;
  run_collective(profiler, &symmetric, 0, 0, 0);
  one_record(&record);
  CHECK_EQUAL(record.timing_source, 3);
  CHECK_EQUAL(record.n_channels, 0);
  tuner_finalize(tuner);
  profiler_finalize(profiler);
}

static void captured_graphs_are_marked(int version) {
  profiled profiler = profiler_init(version, 1, 8, 1, 0);
  tuned tuner = tuner_init(tuner_of(version), 1, 8, 1);
  the.set_observing(1);
  launched coll = gather;
  coll.graph_captured = 1;
  run_collective(profiler, &coll, 4, 1000, 2000);
  zt_record record;
  one_record(&record);
  CHECK_EQUAL(record.flags, ZT_FLAG_TIMED | ZT_FLAG_CAPTURED);
  tuner_finalize(tuner);
  profiler_finalize(profiler);
}

static void ignores_what_it_does_not_follow(int version) {
  profiled profiler = profiler_init(version, 1, 8, 1, 0);
  the.set_observing(1);
  static const int kinds[] = {NCCL_PROFILE_P2P, 8, 16, 32, 128, NCCL_PROFILE_GROUP_API, 1024, 2048};
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    nccl_event_v5 event = {.type = (uint64_t)kinds[i]};
    nccl_event_v4 narrow = {.type = (uint8_t)kinds[i]};
    if (version == 4 && kinds[i] > 255) continue;
    void *handle = NULL;
    if (version == 4) CHECK_EQUAL(the.profiler_v4->start_event(profiler.context, &handle, &narrow), 0);
    if (version >= 5) handle = start_event(profiler, &event);
    void *channel = start_kernel_channel(profiler, handle, 0, 1); /* point-to-point kernels have channels too */
    stop_kernel_channel(profiler, channel, 2);
    stop_event(profiler, handle);
  }
  void *wild[] = {NULL, (void *)1, (void *)(uintptr_t)-1, &profiler, (void *)0xFFFF0400};
  for (size_t i = 0; i < sizeof wild / sizeof wild[0] && beside.newest == 0; i++) { /* else they are the other's */
    stop_kernel_channel(profiler, start_kernel_channel(profiler, wild[i], 200, 1), 2);
    stop_kernel_channel(profiler, wild[i], 2);
  }
  zt_record record;
  CHECK_EQUAL(drained(&record, 1), 0);
  profiler_finalize(profiler);
}

void test_profiler(void) {
  for (int version = 3; version <= 7; version++) {
    the.reset();
    times_what_ran(version);
    the.reset();
    counts_total_bytes(version);
    if (version < 4) continue;
    the.reset();
    falls_back_and_says_so(version);
    the.reset();
    ignores_what_it_does_not_follow(version);
    the.reset();
    if (version >= 5) captured_graphs_are_marked(version);
  }
  the.reset();
  v3_settles_with_the_next_group();
}
