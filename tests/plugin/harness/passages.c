/* What passes the tuner by, and how much. */
#include "nccl_profiling.h"

static const launched gather = {.collective = NCCL_ALL_GATHER, .sequence = 1, .count = 1000, .n_channels = 2,
                                .algorithm = NCCL_RING, .protocol = NCCL_LL};

static zt_passage_sum seen(enum zt_passage passage) {
  zt_passage_sum sums[ZT_N_PASSAGES];
  the.passages(sums);
  return sums[passage];
}

static void check_only(enum zt_passage passage, uint64_t n_calls, uint64_t message_bytes) {
  for (int other = 0; other < ZT_N_PASSAGES; other++)
    CHECK_EQUAL(seen(other).n_calls, other == (int)passage ? n_calls : 0);
  CHECK_EQUAL(seen(passage).message_bytes, message_bytes);
}

static uint8_t flags_of(profiled profiler, const launched *coll) {
  zt_record record;
  run_collective(profiler, coll, coll->n_channels, 1000, 3000);
  CHECK_EQUAL(drained(&record, 1), 1);
  return record.flags;
}

static void decided_calls_pass_nothing_by(profiled profiler, tuned tuner) {
  question asked = ordinary_question(NCCL_ALL_GATHER, 8000);
  tuner_ask(tuner, &asked);
  CHECK_EQUAL(flags_of(profiler, &gather) & ZT_FLAG_PASSED_BY, 0);
  check_only(ZT_DECIDED, 1, 8000);
  CHECK_EQUAL(seen(ZT_DECIDED).n_timed, 1);
  CHECK_EQUAL(seen(ZT_DECIDED).kernel_ns, 2000);
}

static void calls_without_a_decision_are_named(profiled profiler, tuned tuner) {
  (void)tuner;
  CHECK_EQUAL(flags_of(profiler, &gather), ZT_FLAG_TIMED | ZT_FLAG_PASSED_BY);
  check_only(ZT_UNKNOWN_PASSAGE, 1, 8000);
  CHECK_EQUAL(seen(ZT_UNKNOWN_PASSAGE).kernel_ns, 2000);
}

static void a_replay_was_decided_at_its_capture(profiled profiler, tuned tuner) {
  (void)tuner;
  launched replay = gather;
  replay.graph_captured = 1;
  CHECK_EQUAL(flags_of(profiler, &replay), ZT_FLAG_TIMED | ZT_FLAG_CAPTURED);
  check_only(ZT_DECIDED, 1, 8000);
}

static void a_closed_window_accuses_nobody(profiled profiler, tuned tuner) {
  (void)tuner;
  /* ours cannot tell late events from those that the other, or NCCL's counting, asked for */
  if (beside.newest != 0 || profiler.version >= 7) return;
  the.set_observing(0); /* after NCCL read its mask, and before it asked the tuner */
  CHECK_EQUAL(flags_of(profiler, &gather), ZT_FLAG_TIMED);
  check_only(ZT_DECIDED, 1, 8000);
}

/* A symmetric kernel is timed, but uses up no decision, even one of its size. */
static void symmetric_kernels_are_named(profiled profiler, tuned tuner) {
  if (profiler.version < 7) return;
  launched symmetric = gather;
  symmetric.is_symmetric = 1;
  question asked = ordinary_question(NCCL_ALL_GATHER, 8000);
  tuner_ask(tuner, &asked);
  CHECK_EQUAL(flags_of(profiler, &symmetric), ZT_FLAG_TIMED | ZT_FLAG_PASSED_BY);
  check_only(ZT_SYMMETRIC, 1, 8000);
  CHECK_EQUAL(seen(ZT_SYMMETRIC).n_timed, 1);
  CHECK_EQUAL(the.channels_seen(8, 1), 0);
  CHECK_EQUAL(flags_of(profiler, &gather), ZT_FLAG_TIMED);
  CHECK_EQUAL(seen(ZT_DECIDED).n_calls, 1);
}

static void copies_are_counted(profiled profiler, tuned tuner) {
  (void)tuner;
  if (profiler.version < 6) return;
  nccl_event_v5 event = {.type = NCCL_PROFILE_CE_COLL};
  event.ce_coll.collective = "AlltoAll";
  event.ce_coll.datatype = "ncclBfloat16";
  event.ce_coll.count = 500;
  stop_event(profiler, start_event(profiler, &event));
  check_only(ZT_COPY_ENGINE, 1, 8000);
  CHECK_EQUAL(seen(ZT_COPY_ENGINE).n_timed, 0);
  zt_record record;
  CHECK_EQUAL(drained(&record, 1), 0);
}

static void sends_are_counted_once(profiled profiler, tuned tuner) {
  (void)tuner;
  static const char *const functions[] = {"Send", "Recv"};
  for (int i = 0; i < 2; i++) {
    nccl_event_v5 event = {.type = NCCL_PROFILE_P2P};
    event.p2p.function = functions[i];
    event.p2p.datatype = "ncclFloat32";
    event.p2p.count = 100;
    stop_event(profiler, start_event(profiler, &event));
  }
  check_only(ZT_POINT_TO_POINT, 1, 400);
}

static void communicators_of_one_rank_are_counted(void) {
  profiled profiler = profiler_init(7, 5, 1, 1, 0);
  tuned tuner = tuner_init(7, 5, 1, 1);
  CHECK_EQUAL(the.one_rank_communicators(), 1);
  tuner_finalize(tuner);
  profiler_finalize(profiler);
  CHECK_EQUAL(the.one_rank_communicators(), 1);
}

void test_passages(void) {
  static void (*const each[])(profiled, tuned) = {
      decided_calls_pass_nothing_by,  calls_without_a_decision_are_named, a_replay_was_decided_at_its_capture,
      a_closed_window_accuses_nobody, symmetric_kernels_are_named,        copies_are_counted,
      sends_are_counted_once};
  for (int version = 5; version <= 7; version++)
    for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) {
      the.reset();
      profiled profiler = profiler_init(version, 1, 8, 1, 0);
      tuned tuner = tuner_init(version, 1, 8, 1);
      the.set_observing(1);
      each[i](profiler, tuner);
      tuner_finalize(tuner);
      profiler_finalize(profiler);
    }
  the.reset();
  communicators_of_one_rank_are_counted();
}
