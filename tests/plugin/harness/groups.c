/* Groups as NCCL carries them out: first every decision, then one kernel's events; graphs that are replayed by
 * a callback thread meanwhile; what RCCL does otherwise. */
#include <pthread.h>

#include "nccl_profiling.h"

static const launched gather = {.collective = NCCL_ALL_GATHER, .sequence = 1, .count = 1000, .n_channels = 2,
                                .algorithm = NCCL_RING, .protocol = NCCL_LL};

static const zt_plan_row rows[] = {
    {.min_bytes = 1, .max_bytes = 1 << 20, .n_ranks = 8, .n_nodes = 1, .collective = 2, .algorithm = NCCL_RING,
     .protocol = NCCL_LL, .n_channels = 2}};

static void decide(tuned tuner, size_t n_bytes) {
  question asked = ordinary_question(NCCL_ALL_GATHER, n_bytes);
  tuner_ask(tuner, &asked);
}

static zt_record check_one(uint64_t comm_id, uint64_t bytes, int flags, uint32_t epoch) {
  zt_record record;
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.comm_id, comm_id);
  CHECK_EQUAL(record.message_bytes, bytes);
  CHECK_EQUAL(record.flags, flags);
  CHECK_EQUAL(record.epoch, epoch);
  return record;
}

/* One group over two communicators: ncclGroupEnd prepares all of them before it launches any. */
static void a_group_spans_communicators(int version) {
  profiled profilers[2];
  tuned tuners[2];
  for (int c = 0; c < 2; c++) {
    profilers[c] = profiler_init(version, 50 + (uint64_t)c, 8, 1, 0);
    tuners[c] = tuner_init(version < 5 ? 4 : version, 50 + (uint64_t)c, 8, 1);
  }
  the.set_observing(1);
  for (uint32_t epoch = 1; epoch < 4; epoch++) {
    adopt(rows, 1, epoch, 0);
    for (int c = 0; c < 2; c++) {
      decide(tuners[c], 8000);
      decide(tuners[c], 64000); /* too much larger to be fused */
    }
    adopt(NULL, 0, 100 + epoch, 0); /* a flip before the launch changes nothing */
    for (int c = 0; c < 2; c++) {
      launched small = gather, large = gather;
      large.count = 8000;
      void *group = start_group(profilers[c]);
      void *events[2] = {start_coll(profilers[c], group, &small), start_coll(profilers[c], group, &large)};
      for (int i = 0; i < 2; i++) stop_event(profilers[c], events[i]);
      stop_event(profilers[c], group);
      for (int i = 0; i < 2; i++)
        for (int channel = 0; channel < 2; channel++)
          stop_kernel_channel(profilers[c], start_kernel_channel(profilers[c], events[i], channel, 1000), 2000);
      check_one(50 + (uint64_t)c, 8000, ZT_FLAG_TIMED | ZT_FLAG_MATCHED, epoch);
      check_one(50 + (uint64_t)c, 64000, ZT_FLAG_TIMED | ZT_FLAG_MATCHED, epoch);
    }
  }
  for (int c = 0; c < 2; c++) {
    tuner_finalize(tuners[c]);
    profiler_finalize(profilers[c]);
  }
}

static void *replay(void *argument) {
  launched coll = gather;
  coll.graph_captured = 1;
  run_collective(*(profiled *)argument, &coll, 2, 1000, 1500);
  return NULL;
}

static void replay_elsewhere(profiled *profiler) {
  pthread_t callback;
  pthread_create(&callback, NULL, replay, profiler);
  pthread_join(callback, NULL);
}

/* A callback thread tells of a replay between the decisions of a group: they stay the group's. */
static void a_replay_uses_up_no_decision(int version) {
  profiled profiler = profiler_init(version, 60, 8, 1, 0);
  tuned tuner = tuner_init(version, 60, 8, 1);
  adopt(rows, 1, 7, 0);
  the.set_observing(1);
  decide(tuner, 8000);
  replay_elsewhere(&profiler);
  decide(tuner, 64000);
  replay_elsewhere(&profiler);
  for (int i = 0; i < 2; i++) check_one(60, 8000, ZT_FLAG_TIMED | ZT_FLAG_CAPTURED, 7);
  launched small = gather, large = gather;
  large.count = 8000;
  run_collective(profiler, &small, 2, 1000, 2000);
  check_one(60, 8000, ZT_FLAG_TIMED | ZT_FLAG_MATCHED, 7);
  run_collective(profiler, &large, 2, 1000, 2000);
  check_one(60, 64000, ZT_FLAG_TIMED | ZT_FLAG_MATCHED, 7);
  tuner_finalize(tuner);
  profiler_finalize(profiler);
}

/* A record has the chunk size that NCCL was told, not the row's: two rows of one cell leave NCCL its own. */
static void records_have_the_chunk_size_that_was_told(int version) {
  chunks_are_asked = true;
  the.ask_chunk_sizes(1);
  profiled profiler = profiler_init(version, 80, 8, 1, 0);
  tuned tuner = tuner_init(version, 80, 8, 1);
  zt_plan_row chunked[] = {rows[0], rows[0]};
  chunked[0].max_bytes = 8000;
  chunked[0].chunk_kib = 64;
  chunked[1].min_bytes = 8001;
  adopt(chunked, 2, 1, 0);
  the.set_observing(1);
  const nccl_tuner_v6 *ours = version == 6 ? the.tuner_v6 : the.tuner_v7;
  static const size_t sizes[] = {8000, 64000};
  for (int n_in_group = 1; n_in_group <= 2; n_in_group++) {
    for (int i = 0; i < n_in_group; i++) decide(tuner, sizes[i]);
    size_t chunk_bytes = 1;
    for (int i = 0; i < n_in_group; i++)
      CHECK_EQUAL(ours->get_chunk_size(tuner.context, NCCL_ALL_GATHER, 100, NCCL_RING, NCCL_LL, 1, &chunk_bytes), 0);
    CHECK_EQUAL(chunk_bytes, n_in_group == 1 ? 65536 : 1);
    for (int i = 0; i < n_in_group; i++) {
      launched coll = gather;
      coll.count = sizes[i] / 8;
      run_collective(profiler, &coll, 2, 1000, 2000);
      const zt_record record = check_one(80, sizes[i], ZT_FLAG_TIMED | ZT_FLAG_MATCHED, 1);
      CHECK_EQUAL(record.chunk_bytes, n_in_group == 1 ? 65536 : 0);
    }
  }
  replay_elsewhere(&profiler);
  CHECK_EQUAL(check_one(80, 8000, ZT_FLAG_TIMED | ZT_FLAG_CAPTURED, 1).chunk_bytes, ZT_UNKNOWN_CHUNK);
  tuner_finalize(tuner);
  profiler_finalize(profiler);
  chunks_are_asked = false;
}

/* RCCL: up to 112 channels on one device, and functions of its own behind the common five. */
static void rccl_has_more_channels_and_other_functions(void) {
  profiled profiler = profiler_init(5, 70, 8, 1, 0);
  tuned tuner = tuner_init(5, 70, 8, 1);
  the.set_observing(1);
  the.set_recording(1);
  launched wide = gather;
  wide.n_channels = 112;
  run_collective(profiler, &wide, 112, 2000, 9000);
  zt_record record;
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.n_channels, 112);
  CHECK_EQUAL(record.timing_source, 1);
  CHECK_EQUAL(the.channels_seen(8, 1), 112);
  zt_cost_record cost;
  for (int function = 5; function < 16; function++) {
    question asked = ordinary_question(function, 4096);
    tuner_ask(tuner, &asked);
  }
  CHECK_EQUAL(drained(&record, 1), 0);
  CHECK_EQUAL(the.drain_costs(&cost, 1), 0);
  CHECK_EQUAL(counted().n_calls, 11);
  tuner_finalize(tuner);
  profiler_finalize(profiler);
}

/* 2.22 to 2.30 close the library with their only communicator, and open it again for the next. */
static void plans_survive_nccls_unloading(void) {
  adopt(rows, 1, 9, 0);
  tuned first = tuner_init(4, 0, 8, 1);
  tuner_finalize(first);
  reopen_plugin();
  CHECK_EQUAL(the.active_epoch(), 9);
  tuned second = tuner_init(4, 0, 8, 1);
  question asked = ordinary_question(NCCL_ALL_GATHER, 8000);
  tuner_ask(second, &asked);
  CHECK_EQUAL(asked.n_channels, 2);
  CHECK_EQUAL(counted().n_communicators, 2);
  tuner_finalize(second);
}

void test_groups(void) {
  for (int version = 4; version <= 7; version++) {
    the.reset();
    a_group_spans_communicators(version);
    the.reset();
    if (version >= 5) a_replay_uses_up_no_decision(version);
    the.reset();
    if (version >= 6) records_have_the_chunk_size_that_was_told(version);
  }
  the.reset();
  rccl_has_more_channels_and_other_functions();
  the.reset();
  plans_survive_nccls_unloading();
}
