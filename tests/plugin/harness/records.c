/* The live cost table once per size class; decision records; rings that overflow. */
#include "harness.h"

static void costs_come_once(int version) {
  zt_cost_record costs[8];
  tuned tuner = tuner_init(version, 0xABC, 16, 2), second = tuner_init(version, 0xABD, 16, 2);
  for (int repeat = 0; repeat < 3; repeat++) {
    question asked = ordinary_question(NCCL_ALL_GATHER, 4096);
    asked.n_algorithms = version == 3 ? 6 : 7;
    tuner_ask(tuner, &asked);
  }
  CHECK_EQUAL(the.drain_costs(costs, 8), 1);
  CHECK_EQUAL(costs[0].comm_id, version >= 5 ? 0xABC : 0);
  CHECK_EQUAL(costs[0].message_bytes, 4096);
  CHECK_EQUAL(costs[0].n_algorithms, version == 3 ? 6 : 7);
  CHECK_EQUAL(costs[0].n_pipe_ops, 1);
  CHECK(costs[0].cost_us[NCCL_RING][NCCL_LL128] == 99.0f);
  CHECK(costs[0].cost_us[NCCL_TREE][NCCL_SIMPLE] == -1.0f);
  CHECK(costs[0].cost_us[NCCL_PAT][NCCL_SIMPLE] == (version == 3 ? -1.0f : 120.0f));
  static const struct {
    int collective;
    size_t n_bytes;
    size_t n_new;
  } next[] = {{2, 4870, 0}, {2, 4871, 1}, {2, 4872, 0}, {2, 8192, 1}, {3, 4096, 1}, {2, 4095, 1}};
  for (size_t i = 0; i < sizeof next / sizeof next[0]; i++) {
    question asked = ordinary_question(next[i].collective, next[i].n_bytes);
    tuner_ask(tuner, &asked);
    CHECK_EQUAL(the.drain_costs(costs, 8), next[i].n_new);
  }
  question asked = ordinary_question(NCCL_ALL_GATHER, 4096); /* another communicator tells its own */
  tuner_ask(second, &asked);
  CHECK_EQUAL(the.drain_costs(costs, 8), 1);
  tuner_finalize(tuner);
  tuner_finalize(second);
}

/* What NCCL handed in is reported, not what the plan made of it. */
static void costs_are_as_nccl_gave_them(void) {
  const zt_plan_row row = {.min_bytes = 1, .max_bytes = 1 << 20, .n_ranks = 16, .n_nodes = 2, .collective = 2,
                           .algorithm = NCCL_RING, .protocol = NCCL_LL};
  adopt(&row, 1, 1, 0);
  tuned tuner = tuner_init(4, 0, 16, 2);
  question asked = ordinary_question(NCCL_ALL_GATHER, 4096);
  tuner_ask(tuner, &asked);
  CHECK(asked.cost[NCCL_RING][NCCL_LL] < 98.0f && asked.cost[NCCL_RING][NCCL_LL] > 97.0f); /* just below the others */
  zt_cost_record cost;
  CHECK_EQUAL(the.drain_costs(&cost, 1), 1);
  CHECK(cost.cost_us[NCCL_RING][NCCL_LL] == 100.0f);
  tuner_finalize(tuner);
}

static void decisions_are_recorded(int version) {
  const zt_plan_row row = {.min_bytes = 1024, .max_bytes = 2047, .n_ranks = 16, .n_nodes = 2, .collective = 3,
                           .phase = 3, .algorithm = NCCL_RING, .protocol = NCCL_LL, .n_channels = 2};
  adopt(&row, 1, 42, 0);
  tuned tuner = tuner_init(version, 0xABC, 16, 2);
  zt_record record;
  question asked = ordinary_question(NCCL_REDUCE_SCATTER, 1500);
  tuner_ask(tuner, &asked);
  CHECK_EQUAL(drained(&record, 1), 0); /* recording is off */
  the.set_recording(1);
  the.set_phase(17);
  the.set_step(7);
  the.set_memory_pressure(0.5f);
  asked = ordinary_question(NCCL_REDUCE_SCATTER, 1500);
  asked.registered = 1;
  tuner_ask(tuner, &asked);
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.comm_id, version >= 5 ? 0xABC : 0);
  CHECK_EQUAL(record.message_bytes, 1500);
  CHECK_EQUAL(record.sequence, 1); /* the call before counts too */
  CHECK_EQUAL(record.epoch, 42);
  CHECK_EQUAL(record.n_ranks, 16);
  CHECK_EQUAL(record.n_nodes, 2);
  CHECK_EQUAL(record.rank, UINT32_MAX);
  CHECK_EQUAL(record.collective, 3);
  CHECK_EQUAL(record.algorithm, NCCL_RING);
  CHECK_EQUAL(record.protocol, NCCL_LL);
  CHECK_EQUAL(record.n_channels, 2);
  CHECK_EQUAL(record.phase, 3);
  CHECK_EQUAL(record.timing_source, 0);
  CHECK_EQUAL(record.flags, ZT_FLAG_MATCHED | (version >= 4 ? ZT_FLAG_REGISTERED : 0));
  CHECK_EQUAL(record.step, 7);
  CHECK(record.memory_pressure == 0.5f && record.duration_us < 0);
  asked = ordinary_question(NCCL_REDUCE_SCATTER, 5000); /* NCCL's own choice is told as well */
  tuner_ask(tuner, &asked);
  asked = ordinary_question(NCCL_ALL_GATHER, 5000);
  tuner_ask(tuner, &asked);
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.flags, 0);
  CHECK_EQUAL(record.sequence, 2);
  CHECK_EQUAL(record.algorithm, version == 2 ? ZT_NO_OPINION : NCCL_RING);
  CHECK_EQUAL(record.protocol, version == 2 ? ZT_NO_OPINION : NCCL_SIMPLE);
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.sequence, 0); /* sequences are per collective */
  tuner_finalize(tuner);
}

static void rings_drop_and_count(void) {
  static zt_record records[ZT_RING_RECORDS + 1];
  tuned tuner = tuner_init(5, 1, 16, 2);
  the.set_recording(1);
  const uint32_t n_calls = ZT_RING_RECORDS + 100;
  for (int lap = 0; lap < 2; lap++) {
    for (uint32_t i = 0; i < n_calls; i++) {
      question asked = ordinary_question(NCCL_ALL_GATHER, 4096);
      tuner_ask(tuner, &asked);
    }
    CHECK_EQUAL(counted().n_dropped_records, 100 * (lap + 1));
    CHECK_EQUAL(drained(records, 10), 10);
    CHECK_EQUAL(drained(records + 10, ZT_RING_RECORDS), ZT_RING_RECORDS - 10);
    CHECK_EQUAL(drained(records, 1), 0);
    for (uint32_t i = 0; i < ZT_RING_RECORDS; i++) CHECK_EQUAL(records[i].sequence, (uint32_t)lap * n_calls + i);
  }
  CHECK_EQUAL(counted().n_calls, 2 * n_calls);
  tuner_finalize(tuner);
  CHECK_EQUAL(counted().n_calls, 2 * n_calls); /* the dead count on */
}

/* A cost table that found its ring full comes when there is room. */
static void costs_come_late_rather_than_never(void) {
  static zt_cost_record costs[ZT_COST_RING_RECORDS + 10];
  static const size_t hundredths[] = {100, 120, 145, 170}; /* one in each quarter of an octave */
  tuned tuners[5];
  for (int i = 0; i < 5; i++) {
    tuners[i] = tuner_init(5, (uint64_t)i + 1, 16, 2);
    for (int octave = 8; octave < 40; octave++)
      for (int quarter = 0; quarter < 4; quarter++) {
        question asked = ordinary_question(NCCL_ALL_GATHER, (1ull << octave) / 100 * hundredths[quarter] + 99);
        tuner_ask(tuners[i], &asked);
      }
  }
  CHECK_EQUAL(the.drain_costs(costs, ZT_COST_RING_RECORDS + 10), ZT_COST_RING_RECORDS);
  CHECK(counted().n_dropped_costs > 0);
  question asked = ordinary_question(NCCL_ALL_GATHER, 1ull << 39);
  tuner_ask(tuners[4], &asked);
  CHECK_EQUAL(the.drain_costs(costs, 1), 1);
  for (int i = 0; i < 5; i++) tuner_finalize(tuners[i]);
}

void test_costs_and_records(void) {
  for (int version = 2; version <= 7; version++) {
    the.reset();
    decisions_are_recorded(version);
    the.reset();
    if (version > 2) costs_come_once(version);
  }
  the.reset();
  costs_are_as_nccl_gave_them();
  the.reset();
  rings_drop_and_count();
  the.reset();
  costs_come_late_rather_than_never();
}
