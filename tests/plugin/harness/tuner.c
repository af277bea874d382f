/* getCollInfo of every tuner version: what is touched, and above all what is not. */
#include "harness.h"

static const zt_plan_row any_gather = {.min_bytes = 1024,
                                       .max_bytes = 4095,
                                       .n_ranks = 16,
                                       .n_nodes = 2,
                                       .collective = NCCL_ALL_GATHER,
                                       .phase = 0,
                                       .algorithm = NCCL_RING,
                                       .protocol = NCCL_LL,
                                       .n_channels = 4};

static void check_untouched(tuned tuner, question asked) {
  asked.n_channels = 77;
  const question before = asked;
  tuner_ask(tuner, &asked);
  CHECK(memcmp(asked.cost, before.cost, sizeof asked.cost) == 0);
  CHECK_EQUAL(asked.n_channels, 77);
  CHECK_EQUAL(asked.algorithm, -1);
  CHECK_EQUAL(asked.protocol, -1);
}

static void check_setting(tuned tuner, question asked, int algorithm, int protocol, int n_channels) {
  tuner_ask(tuner, &asked);
  int found_algorithm, found_protocol;
  chosen(&asked, &found_algorithm, &found_protocol);
  CHECK_EQUAL(found_algorithm, algorithm);
  CHECK_EQUAL(found_protocol, protocol);
  CHECK_EQUAL(asked.n_channels, n_channels);
}

static void matches_by_key_only(int version) {
  tuned tuner = tuner_init(version, 0xABC, 16, 2), other_shape = tuner_init(version, 0xABD, 16, 4);
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 2048)); /* the empty plan */
  adopt(&any_gather, 1, 1, 0);
  check_setting(tuner, ordinary_question(NCCL_ALL_GATHER, 1024), NCCL_RING, NCCL_LL, 4);
  check_setting(tuner, ordinary_question(NCCL_ALL_GATHER, 4095), NCCL_RING, NCCL_LL, 4);
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 1023));
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 4096));
  check_untouched(tuner, ordinary_question(NCCL_REDUCE_SCATTER, 2048));
  check_untouched(other_shape, ordinary_question(NCCL_ALL_GATHER, 2048));
  for (int collective = 5; collective < 20; collective++) /* newer NCCL's enum goes on to 14 */
    check_untouched(tuner, ordinary_question(collective, 2048));
  check_untouched(tuner, ordinary_question(-1, 2048));
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 0));
  the.set_phase(1);
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 2048));
  the.set_phase(0);
  tuner_finalize(other_shape);
  tuner_finalize(tuner);
}

static void never_revives_ignored_cells(int version) {
  tuned tuner = tuner_init(version, 1, 16, 2);
  zt_plan_row row = any_gather;
  row.algorithm = NCCL_NVLS;
  row.protocol = NCCL_SIMPLE;
  adopt(&row, 1, 1, 0);
  const zt_counters before = counted();
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 2048));
  CHECK_EQUAL(counted().n_ignored_cells, before.n_ignored_cells + 1);
  CHECK_EQUAL(counted().n_matched, before.n_matched);
  if (version > 2) {
    row.algorithm = NCCL_RING;
    row.protocol = NCCL_LL;
    adopt(&row, 1, 2, 0);
    question asked = ordinary_question(NCCL_ALL_GATHER, 2048); /* NCCL_PROTO=Simple set by the user */
    asked.cost[NCCL_RING][NCCL_LL] = asked.cost[NCCL_RING][NCCL_LL128] = -1.0f;
    check_untouched(tuner, asked);
    memset(asked.cost[NCCL_RING], 0xFF, sizeof asked.cost[NCCL_RING]); /* NaN is no cost either */
    check_untouched(tuner, asked);
  }
  tuner_finalize(tuner);
}

/* NCCL up to 2.22 has no PAT row (6), the first had no NVLS tree either (5). */
static void stays_inside_small_tables(int version) {
  tuned tuner = tuner_init(version, 1, 16, 2);
  zt_plan_row row = any_gather;
  row.algorithm = NCCL_PAT;
  row.protocol = NCCL_SIMPLE;
  adopt(&row, 1, 1, 0);
  for (int n_algorithms = 5; n_algorithms <= 7; n_algorithms++) {
    question asked = ordinary_question(NCCL_ALL_GATHER, 2048);
    asked.n_algorithms = n_algorithms;
    if (n_algorithms == 7)
      check_setting(tuner, asked, NCCL_PAT, NCCL_SIMPLE, 4);
    else
      check_untouched(tuner, asked);
  }
  tuner_finalize(tuner);
}

static void leaves_out_channels_that_nccl_would_not_cap(int version) {
  tuned tuner = tuner_init(version, 1, 16, 2);
  zt_plan_row row = any_gather;
  row.n_channels = 32;
  adopt(&row, 1, 1, 0);
  check_setting(tuner, ordinary_question(NCCL_ALL_GATHER, 2048), NCCL_RING, NCCL_LL, 32); /* NCCL caps a ring's */

  row.n_channels = 0; /* no opinion: NCCL's stays */
  adopt(&row, 1, 2, 0);
  question asked = ordinary_question(NCCL_ALL_GATHER, 2048);
  asked.n_channels = 5;
  check_setting(tuner, asked, NCCL_RING, NCCL_LL, 5);

  row.n_channels = 8; /* channels alone */
  row.algorithm = row.protocol = ZT_NO_OPINION;
  adopt(&row, 1, 3, 0);
  asked = ordinary_question(NCCL_ALL_GATHER, 2048);
  tuner_ask(tuner, &asked);
  CHECK_EQUAL(asked.n_channels, 8);
  CHECK_EQUAL(asked.algorithm, -1);
  CHECK(asked.cost[NCCL_RING][NCCL_SIMPLE] == 98.0f);
  if (version > 2) { /* CollNet would take the count as it comes, more than there are, too */
    row.algorithm = NCCL_COLLNET_DIRECT;
    row.protocol = NCCL_SIMPLE;
    asked = ordinary_question(NCCL_ALL_GATHER, 2048);
    asked.cost[NCCL_COLLNET_DIRECT][NCCL_SIMPLE] = 200.0f;
    check_untouched(tuner, asked);
    adopt(&row, 1, 4, 0);
    const uint64_t n_clamped = counted().n_clamped_channels;
    check_setting(tuner, asked, NCCL_COLLNET_DIRECT, NCCL_SIMPLE, 0);
    CHECK_EQUAL(counted().n_clamped_channels, n_clamped + 1);
  }
  tuner_finalize(tuner);
}

/* Several rows in one octave: each ends where the next begins. */
static void finds_rows_at_their_edges(int version) {
  zt_plan_row rows[9];
  for (uint32_t i = 0; i < 9; i++) {
    rows[i] = any_gather;
    rows[i].min_bytes = 1024 + 100 * i;
    rows[i].max_bytes = rows[i].min_bytes + 99;
    rows[i].n_channels = (uint8_t)(i + 1);
  }
  tuned tuner = tuner_init(version, 1, 16, 2);
  adopt(rows, 9, 1, 0);
  for (uint32_t i = 0; i < 9; i++) {
    check_setting(tuner, ordinary_question(NCCL_ALL_GATHER, 1024 + 100 * i), NCCL_RING, NCCL_LL, (int)i + 1);
    check_setting(tuner, ordinary_question(NCCL_ALL_GATHER, 1123 + 100 * i), NCCL_RING, NCCL_LL, (int)i + 1);
  }
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 1924));
  tuner_finalize(tuner);
}

static void leaves_baseline_rows_alone(int version) {
  tuned tuner = tuner_init(version, 1, 16, 2);
  zt_plan_row row = any_gather;
  row.algorithm = row.protocol = ZT_NO_OPINION;
  row.n_channels = 0;
  adopt(&row, 1, 1, 0);
  const zt_counters before = counted();
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 2048));
  CHECK_EQUAL(counted().n_matched, before.n_matched);
  tuner_finalize(tuner);
}

/* NCCL 2.21 does not check what v2 answers, nor does its tuner know of NCCL_ALGO. */
static void v2_asks_only_for_what_every_fabric_has(void) {
  tuned tuner = tuner_init(2, 0, 16, 2);
  zt_plan_row rows[] = {any_gather, any_gather, any_gather};
  rows[0].protocol = NCCL_LL128;
  rows[1].collective = NCCL_ALL_REDUCE;
  rows[1].algorithm = NCCL_TREE;
  rows[1].protocol = NCCL_SIMPLE;
  rows[2].collective = NCCL_REDUCE_SCATTER;
  rows[2].algorithm = NCCL_PAT;
  rows[2].protocol = NCCL_SIMPLE;
  adopt(rows, 3, 1, 0);
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 2048));
  check_setting(tuner, ordinary_question(NCCL_ALL_REDUCE, 2048), NCCL_TREE, NCCL_SIMPLE, 4);
  check_untouched(tuner, ordinary_question(NCCL_REDUCE_SCATTER, 2048));
  setenv("NCCL_ALGO", "Ring", 1);
  tuned by_user = tuner_init(2, 0, 16, 2);
  unsetenv("NCCL_ALGO");
  check_untouched(by_user, ordinary_question(NCCL_ALL_REDUCE, 2048));
  tuner_finalize(by_user);
  tuner_finalize(tuner);
}

/* 2.31 and newer ask for other kinds of kernels, too: those are not decisions. */
static void estimates_are_untouched(int version) {
  tuned tuner = tuner_init(version, 1, 16, 2);
  adopt(&any_gather, 1, 1, 0);
  the.set_recording(1);
  const zt_counters before = counted();
  question asked = ordinary_question(NCCL_ALL_GATHER, 2048);
  asked.is_estimate = 1;
  check_untouched(tuner, asked);
  zt_record record;
  zt_cost_record cost;
  CHECK_EQUAL(drained(&record, 1), 0);
  CHECK_EQUAL(the.drain_costs(&cost, 1), 0);
  CHECK_EQUAL(counted().n_calls, before.n_calls);
  CHECK_EQUAL(counted().n_estimates, before.n_estimates + 1);
  tuner_finalize(tuner);
  CHECK_EQUAL(counted().n_estimates, before.n_estimates + 1); /* the dead count on */
}

/* A cost of 0 would beat kernels that the table does not show. */
static void asks_for_no_more_than_it_must(void) {
  tuned tuner = tuner_init(6, 1, 16, 2);
  adopt(&any_gather, 1, 1, 0);
  question asked = ordinary_question(NCCL_ALL_GATHER, 2048);
  tuner_ask(tuner, &asked);
  CHECK(asked.cost[NCCL_RING][NCCL_LL] > 0.99f * 98.0f && asked.cost[NCCL_RING][NCCL_LL] < 98.0f);
  CHECK(asked.cost[NCCL_RING][NCCL_LL128] == 99.0f && asked.cost[NCCL_TREE][NCCL_LL] == -1.0f);
  asked = ordinary_question(NCCL_ALL_GATHER, 2048);
  asked.cost[NCCL_RING][NCCL_LL] = 5.0f; /* the cheapest already */
  tuner_ask(tuner, &asked);
  CHECK(asked.cost[NCCL_RING][NCCL_LL] == 5.0f);
  asked = ordinary_question(NCCL_ALL_GATHER, 2048);
  asked.cost[NCCL_RING][NCCL_SIMPLE] = 0.0f; /* another's answer */
  check_setting(tuner, asked, NCCL_RING, NCCL_LL, 4);
  tuner_finalize(tuner);
}

/* NCCL 2.21 asks for a run of calls first, then for the channels of each. */
static void v2_decides_for_a_run(void) {
  tuned tuner = tuner_init(2, 0, 16, 2);
  adopt(&any_gather, 1, 1, 0);
  const uint64_t n_calls = counted().n_calls;
  int algorithm = -1, protocol = -1, n_channels = 0;
  const nccl_tuner_v2 *v2 = the.tuner_v2;
  CHECK_EQUAL(v2->get_coll_info(tuner.context, NCCL_ALL_GATHER, 3072, 0, 0, 1, &algorithm, &protocol, &n_channels), 0);
  CHECK(algorithm == NCCL_RING && protocol == NCCL_LL && n_channels == 4);
  for (int member = 0; member < 3; member++) { /* smaller than any row of the plan */
    algorithm = protocol = -1, n_channels = 0;
    CHECK_EQUAL(v2->get_coll_info(tuner.context, NCCL_ALL_GATHER, 1024 - 1, 0, 0, 1, &algorithm, &protocol, &n_channels), 0);
    CHECK(algorithm == -1 && protocol == -1 && n_channels == 4);
  }
  CHECK_EQUAL(counted().n_calls, n_calls + 1);
  CHECK_EQUAL(v2->get_coll_info(tuner.context, NCCL_ALL_GATHER, 2048, 0, 0, 1, &algorithm, &protocol, &n_channels), 0);
  CHECK_EQUAL(counted().n_calls, n_calls + 2); /* more than what is left: a new run */
  tuner_finalize(tuner);
}

static void phases_follow_what_was_told(void) {
  enum { OTHER, FORWARD, BACKWARD, SCATTER, POST_STEP };
  static const struct {
    uint32_t phase_or_region;
    int collective;
    uint32_t gathers_after_step;
    int phase;
  } cases[] = {
      {0, 2, 0, OTHER},   {1, 2, 0, FORWARD},    {1, 3, 0, OTHER},    {2, 2, 0, BACKWARD},  {3, 3, 0, SCATTER},
      {3, 4, 0, SCATTER}, {3, 2, 0, OTHER},      {4, 2, 0, POST_STEP}, {4, 4, 0, OTHER},    {16, 2, 0, FORWARD},
      {16, 2, 1, POST_STEP}, {16, 3, 0, OTHER},  {17, 2, 0, BACKWARD}, {17, 2, 1, BACKWARD}, {17, 3, 0, SCATTER},
      {17, 4, 1, SCATTER}, {18, 2, 0, POST_STEP}, {18, 3, 0, OTHER},   {17, 0, 0, OTHER},   {99, 2, 0, OTHER},
  };
  tuned tuner = tuner_init(5, 9, 16, 2);
  the.set_recording(1);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    adopt(NULL, 0, (uint32_t)i + 1, cases[i].gathers_after_step);
    the.set_phase(cases[i].phase_or_region);
    question asked = ordinary_question(cases[i].collective, 2048);
    tuner_ask(tuner, &asked);
    zt_record record;
    CHECK_EQUAL(drained(&record, 1), 1);
    CHECK_EQUAL(record.phase, cases[i].phase);
    CHECK_EQUAL(record.epoch, i + 1);
  }
  tuner_finalize(tuner);
}

static void flips_only_what_is_loaded(void) {
  zt_plan_row row = any_gather;
  CHECK_EQUAL(the.flip(5), -1);
  CHECK_EQUAL(the.load(&row, 1, 5, 0), 0);
  CHECK_EQUAL(the.flip(6), -1);
  CHECK_EQUAL(the.active_epoch(), 0);
  CHECK_EQUAL(the.flip(5), 0);
  CHECK_EQUAL(the.flip(5), -1);
  CHECK_EQUAL(the.active_epoch(), 5);
  row.collective = 7;
  CHECK_EQUAL(the.load(&row, 1, 6, 0), -3);
  CHECK_EQUAL(the.flip(6), -1);
  zt_plan_row rows[] = {any_gather, any_gather};
  rows[0].min_bytes = rows[0].max_bytes = 4095;
  CHECK_EQUAL(the.load(rows, 2, 6, 0), -2);
  static zt_plan_row many[ZT_MAX_PLAN_ROWS + 1];
  for (uint32_t i = 0; i <= ZT_MAX_PLAN_ROWS; i++) {
    many[i] = any_gather;
    many[i].min_bytes = many[i].max_bytes = i + 1;
  }
  CHECK_EQUAL(the.load(many, ZT_MAX_PLAN_ROWS + 1, 6, 0), -1);
  CHECK_EQUAL(the.load(many, ZT_MAX_PLAN_ROWS, 6, 0), 0);
  for (uint32_t i = 0; i < 300; i++) many[i].n_ranks = 100 + i;
  CHECK_EQUAL(the.load(many, 300, 7, 0), -4);
  CHECK_EQUAL(the.active_epoch(), 5);
}

/* ---- chunk sizes ---- */

#define OWN_CHUNK 131072u /* NCCL's */

/* What NCCL takes for a share of what it was just told to run. */
static size_t chunk_of(tuned tuner, int collective, int algorithm, int protocol, size_t share_bytes) {
  size_t chunk_bytes = OWN_CHUNK;
  const nccl_tuner_v6 *ours = tuner.version == 6 ? the.tuner_v6 : the.tuner_v7;
  if (tuner.version < 6 || ours->get_chunk_size == NULL) return chunk_bytes;
  CHECK_EQUAL(ours->get_chunk_size(tuner.context, collective, share_bytes, algorithm, protocol, 1, &chunk_bytes), 0);
  return chunk_bytes;
}

static void decide_on(tuned tuner, int collective, size_t n_bytes) {
  question asked = ordinary_question(collective, n_bytes);
  tuner_ask(tuner, &asked);
}

static void ask_chunk_sizes(bool on) {
  chunks_are_asked = on;
  the.ask_chunk_sizes(on);
}

static zt_plan_row chunked(uint64_t min_bytes, uint64_t max_bytes, uint16_t chunk_kib) {
  zt_plan_row row = any_gather;
  row.min_bytes = min_bytes;
  row.max_bytes = max_bytes;
  row.chunk_kib = chunk_kib;
  return row;
}

static void chunk_sizes_are_those_of_the_row(int version) {
  ask_chunk_sizes(true);
  tuned tuner = tuner_init(version, 1, 16, 2);
  const zt_plan_row rows[] = {chunked(1024, 2047, 64), chunked(2048, 4095, 32768), chunked(4096, 8191, 0)};
  decide_on(tuner, NCCL_ALL_GATHER, 1500);
  CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_RING, NCCL_SIMPLE, 700), OWN_CHUNK); /* no plan */
  adopt(rows, 3, 1, 0);
  the.set_recording(1);
  decide_on(tuner, NCCL_ALL_GATHER, 1500);
  const bool is_asked = version >= 6;
  zt_record record;
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.flags, ZT_FLAG_MATCHED);
  CHECK_EQUAL(record.chunk_bytes, is_asked ? 65536 : 0);
  for (size_t share_bytes = 100; share_bytes <= 500; share_bytes += 200)
    CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_RING, NCCL_LL, share_bytes), is_asked ? 65536 : OWN_CHUNK);
  CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_RING, NCCL_SIMPLE, 100), OWN_CHUNK); /* not what was told */
  CHECK_EQUAL(chunk_of(tuner, NCCL_REDUCE_SCATTER, NCCL_RING, NCCL_LL, 100), OWN_CHUNK);
  decide_on(tuner, NCCL_ALL_GATHER, 2048);
  CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_RING, NCCL_LL, 100), is_asked ? 32u << 20 : OWN_CHUNK);
  decide_on(tuner, NCCL_ALL_GATHER, 4096);
  CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_RING, NCCL_LL, 100), OWN_CHUNK); /* a row without opinion */
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.flags, ZT_FLAG_MATCHED);
  CHECK_EQUAL(record.chunk_bytes, 0);
  const int odd[][3] = {{-1, 1, 0}, {5, 1, 0}, {2, -1, 0}, {2, 7, 0}, {2, 1, -1}, {2, 1, 3}, {14, 99, 99}};
  for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++)
    CHECK_EQUAL(chunk_of(tuner, odd[i][0], odd[i][1], odd[i][2], 100), OWN_CHUNK);
  tuner_finalize(tuner);
}

/* NCCL decides on all of a group, then asks: two rows of one cell cannot be told apart. */
static void chunk_sizes_in_groups(int version) {
  ask_chunk_sizes(true);
  tuned tuner = tuner_init(version, 1, 16, 2), other = tuner_init(version, 2, 16, 2);
  zt_plan_row rows[] = {chunked(1024, 2047, 64), chunked(2048, 4095, 128), chunked(4096, 8191, 64), any_gather};
  rows[3].collective = NCCL_REDUCE_SCATTER;
  rows[3].chunk_kib = 16;
  adopt(rows, 4, 1, 0);
  decide_on(tuner, NCCL_ALL_GATHER, 1024);
  decide_on(tuner, NCCL_REDUCE_SCATTER, 1024);
  decide_on(tuner, NCCL_ALL_GATHER, 5000); /* of the same size */
  decide_on(other, NCCL_ALL_GATHER, 2048);
  CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_RING, NCCL_LL, 100), 65536);
  CHECK_EQUAL(chunk_of(tuner, NCCL_REDUCE_SCATTER, NCCL_RING, NCCL_LL, 100), 16384);
  CHECK_EQUAL(chunk_of(other, NCCL_ALL_GATHER, NCCL_RING, NCCL_LL, 100), 131072);
  decide_on(tuner, NCCL_ALL_GATHER, 1024);
  decide_on(tuner, NCCL_ALL_GATHER, 2048);
  decide_on(tuner, NCCL_ALL_GATHER, 1024);
  CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_RING, NCCL_LL, 100), OWN_CHUNK);
  CHECK_EQUAL(chunk_of(tuner, NCCL_REDUCE_SCATTER, NCCL_RING, NCCL_LL, 100), OWN_CHUNK); /* of the group before */
  decide_on(tuner, NCCL_ALL_GATHER, 1024);
  CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_RING, NCCL_LL, 100), 65536);
  tuner_finalize(other);
  tuner_finalize(tuner);
}

static void chunk_sizes_alone(int version) {
  ask_chunk_sizes(true);
  tuned tuner = tuner_init(version, 1, 16, 2);
  zt_plan_row row = chunked(1024, 4095, 64);
  row.algorithm = row.protocol = ZT_NO_OPINION;
  row.n_channels = 0;
  adopt(&row, 1, 1, 0);
  const uint64_t n_matched = counted().n_matched;
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 2048));
  CHECK_EQUAL(counted().n_matched, n_matched + 1);
  CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_RING, NCCL_SIMPLE, 100), 65536);
  question asked = ordinary_question(NCCL_ALL_GATHER, 2048); /* in-network algorithms keep NCCL's own */
  asked.cost[NCCL_NVLS][NCCL_SIMPLE] = 1.0f;
  check_untouched(tuner, asked);
  CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_NVLS, NCCL_SIMPLE, 100), OWN_CHUNK);
  asked = ordinary_question(NCCL_ALL_GATHER, 2048); /* an estimate decides on nothing */
  tuner_ask(tuner, &asked);
  asked.is_estimate = 1;
  asked.n_bytes = 5000;
  tuner_ask(tuner, &asked);
  CHECK_EQUAL(chunk_of(tuner, NCCL_ALL_GATHER, NCCL_RING, NCCL_SIMPLE, 100), 65536);
  tuner_finalize(tuner);
}

static void chunk_sizes_only_if_asked(int version) {
  tuned tuner = tuner_init(version, 1, 16, 2);
  the.ask_chunk_sizes(1); /* too late: other ranks' first communicator may not know of it */
  tuned later = tuner_init(version, 2, 16, 2);
  zt_plan_row row = chunked(1024, 4095, 64);
  adopt(&row, 1, 1, 0);
  the.set_recording(1);
  check_setting(later, ordinary_question(NCCL_ALL_GATHER, 2048), NCCL_RING, NCCL_LL, 4);
  zt_record record;
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.flags, ZT_FLAG_MATCHED);
  row.algorithm = row.protocol = ZT_NO_OPINION;
  row.n_channels = 0;
  adopt(&row, 1, 2, 0);
  check_untouched(tuner, ordinary_question(NCCL_ALL_GATHER, 2048));
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.flags, 0); /* NCCL's own choice */
  tuner_finalize(later);
  tuner_finalize(tuner);
}

static void chunk_sizes_that_nccl_cannot_carry_out(void) {
  const struct {
    uint8_t algorithm, protocol;
    uint16_t chunk_kib;
    int is_legal;
  } cases[] = {{NCCL_RING, NCCL_LL, 4, 1},
               {NCCL_RING, NCCL_LL128, 3, 0},
               {NCCL_RING, NCCL_SIMPLE, 32768, 1},
               {NCCL_RING, NCCL_SIMPLE, 32769, 0},
               {NCCL_PAT, NCCL_SIMPLE, 64, 1},
               {NCCL_NVLS, NCCL_SIMPLE, 64, 0},
               {NCCL_NVLS, NCCL_SIMPLE, 0, 1},
               {NCCL_COLLNET_DIRECT, NCCL_SIMPLE, 64, 0},
               {ZT_NO_OPINION, ZT_NO_OPINION, 64, 1}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    zt_plan_row row = chunked(1024, 4095, cases[i].chunk_kib);
    row.algorithm = cases[i].algorithm;
    row.protocol = cases[i].protocol;
    CHECK_EQUAL(the.row_is_legal(&row), cases[i].is_legal);
  }
}

void test_tuner(void) {
  for (int version = 2; version <= 7; version++) {
    static void (*const each[])(int) = {matches_by_key_only, never_revives_ignored_cells,
                                        leaves_out_channels_that_nccl_would_not_cap, leaves_baseline_rows_alone,
                                        finds_rows_at_their_edges};
    for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) {
      the.reset();
      each[i](version);
    }
    the.reset();
    if (version > 2) stays_inside_small_tables(version);
    the.reset();
    if (version > 2) estimates_are_untouched(version);
  }
  the.reset();
  asks_for_no_more_than_it_must();
  the.reset();
  v2_decides_for_a_run();
  the.reset();
  v2_asks_only_for_what_every_fabric_has();
  the.reset();
  phases_follow_what_was_told();
  the.reset();
  flips_only_what_is_loaded();
  for (int version = 3; version <= 7; version++) {
    the.reset();
    chunk_sizes_only_if_asked(version);
    static void (*const each[])(int) = {chunk_sizes_are_those_of_the_row, chunk_sizes_in_groups, chunk_sizes_alone};
    for (size_t i = 0; i < (version < 6 ? 1 : sizeof each / sizeof each[0]); i++) {
      the.reset();
      each[i](version);
      chunks_are_asked = false;
    }
  }
  chunk_sizes_that_nccl_cannot_carry_out();
}
