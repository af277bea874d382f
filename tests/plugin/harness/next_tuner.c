/* Another tuner in the same process: asked first, overridden where a row says so, its faults absorbed. */
#include <dlfcn.h>

#include "harness.h"

enum { NOTHING, CELL, CHANNELS, ERROR, STRIKES_ALL, REVIVES, STRIKES_ONE }; /* benchmarks/nccl/other_tuner.c */

static struct {
  int *answer, *algorithm, *protocol, *channels, *init_fails;
  size_t *chunk_bytes;
  int *n_inits, *n_asks, *n_ends, *n_chunks, *asked_version;
  uint64_t *comm_id;
  size_t *n_ranks, *n_nodes;
  double *constant_seen, *constant_set;
} other;

static const zt_plan_row gather_row = {.min_bytes = 1024, .max_bytes = 4095, .n_ranks = 16, .n_nodes = 2,
                                       .collective = NCCL_ALL_GATHER, .algorithm = NCCL_PAT, .protocol = NCCL_SIMPLE};

static void *of_other(void *library, const char *name) {
  void *found = dlsym(library, name);
  CHECK(found != NULL);
  return found;
}

/* Forget what was loaded before; `name` is for the next communicator, and should lead to `file`. */
static void name_other(const char *name, const char *file) {
  setenv("ZEROTUNE_NEXT_TUNER", name, 1);
  the.reset();
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", others, file);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != NULL);
#define OF_OTHER(member) *(void **)&other.member = of_other(library, "other_" #member)
  OF_OTHER(answer);
  OF_OTHER(algorithm);
  OF_OTHER(protocol);
  OF_OTHER(channels);
  OF_OTHER(init_fails);
  OF_OTHER(chunk_bytes);
  OF_OTHER(n_inits);
  OF_OTHER(n_asks);
  OF_OTHER(n_ends);
  OF_OTHER(n_chunks);
  OF_OTHER(asked_version);
  OF_OTHER(comm_id);
  OF_OTHER(n_ranks);
  OF_OTHER(n_nodes);
  OF_OTHER(constant_seen);
  OF_OTHER(constant_set);
  *other.answer = NOTHING;
  *other.init_fails = 0;
}

static void name_version(int version) {
  char name[16], file[64];
  snprintf(name, sizeof name, "other%d", version);
  snprintf(file, sizeof file, "libnccl-tuner-%s.so", name);
  name_other(name, file);
}

static void answers(int answer, int algorithm, int protocol, int n_channels) {
  *other.answer = answer;
  *other.algorithm = algorithm;
  *other.protocol = protocol;
  *other.channels = n_channels;
}

/* A question for which NCCL itself takes ring/simple. */
static question asked_of(tuned tuner, int collective, size_t n_bytes) {
  question asked = ordinary_question(collective, n_bytes);
  tuner_ask(tuner, &asked);
  return asked;
}

static void check_runs(const question *asked, int algorithm, int protocol, int n_channels) {
  int found_algorithm, found_protocol;
  chosen(asked, &found_algorithm, &found_protocol);
  CHECK_EQUAL(found_algorithm, algorithm);
  CHECK_EQUAL(found_protocol, protocol);
  CHECK_EQUAL(asked->n_channels, n_channels);
}

static void is_told_of_each_communicator(int version, int others_version) {
  name_version(others_version);
  *other.constant_set = 4.5;
  const int n_inits = *other.n_inits, n_ends = *other.n_ends;
  tuned first = tuner_init(version, 0xABC, 16, 2), second = tuner_init(version, 0xABD, 8, 1);
  CHECK_EQUAL(*other.n_inits, n_inits + 2);
  CHECK_EQUAL(*other.n_ranks, 8);
  CHECK_EQUAL(*other.n_nodes, 1);
  CHECK(strcmp(the.next_tuner(), "other") == 0);
  if (version >= 5 && others_version >= 5) {
    CHECK_EQUAL(*other.comm_id, 0xABD);
    CHECK(*other.constant_seen == 0.0 && last_constant == 4.5); /* what it sets reaches NCCL */
  }
  (void)asked_of(first, NCCL_ALL_GATHER, 2048);
  CHECK_EQUAL(*other.asked_version, others_version);
  tuner_finalize(second);
  tuner_finalize(first);
  CHECK_EQUAL(*other.n_ends, n_ends + 2);
  CHECK_EQUAL(counted().n_next_tuner_faults, 0);
}

static void its_answer_stands_unless_a_row_applies(int version, int others_version) {
  name_version(others_version);
  tuned tuner = tuner_init(version, 1, 16, 2);
  answers(CELL, NCCL_RING, NCCL_LL, 5);
  question asked = asked_of(tuner, NCCL_ALL_GATHER, 2048);
  check_runs(&asked, NCCL_RING, NCCL_LL, 5);
  CHECK(version == 2 || asked.cost[NCCL_RING][NCCL_LL] == 0.0f);
  answers(CHANNELS, 0, 0, 3);
  asked = asked_of(tuner, NCCL_ALL_GATHER, 2048);
  check_runs(&asked, NCCL_RING, NCCL_SIMPLE, 3);

  zt_plan_row row = gather_row; /* 2.21 is asked for ring and tree only */
  if (version == 2) row.algorithm = NCCL_RING;
  adopt(&row, 1, 1, 0);
  answers(CELL, NCCL_RING, NCCL_LL, 5);
  asked = asked_of(tuner, NCCL_ALL_GATHER, 2048);
  check_runs(&asked, row.algorithm, NCCL_SIMPLE, 0); /* its channels were for its own cell */
  CHECK(version == 2 || asked.cost[NCCL_RING][NCCL_LL] == 100.0f); /* NCCL's estimates are back */
  asked = asked_of(tuner, NCCL_ALL_GATHER, 8192);
  check_runs(&asked, NCCL_RING, NCCL_LL, 5);

  row.algorithm = row.protocol = ZT_NO_OPINION; /* channels alone */
  row.n_channels = 2;
  adopt(&row, 1, 2, 0);
  asked = asked_of(tuner, NCCL_ALL_GATHER, 2048);
  check_runs(&asked, NCCL_RING, NCCL_LL, 2);
  CHECK_EQUAL(counted().n_next_tuner_faults, 0);
  tuner_finalize(tuner);
}

static void check_as_without_it(tuned tuner, uint64_t *n_faults) {
  question asked = ordinary_question(NCCL_ALL_GATHER, 2048);
  asked.n_channels = 9;
  const question before = asked;
  tuner_ask(tuner, &asked);
  CHECK(memcmp(asked.cost, before.cost, sizeof asked.cost) == 0);
  CHECK_EQUAL(asked.n_channels, 9);
  CHECK_EQUAL(asked.algorithm, -1);
  /* the harness asks 2.21's version for the run and for its member */
  *n_faults += tuner.version == 2 ? 2 : 1;
  CHECK_EQUAL(counted().n_next_tuner_faults, *n_faults);
}

static void its_faults_change_nothing(int version, int others_version) {
  name_version(others_version);
  tuned tuner = tuner_init(version, 1, 16, 2);
  uint64_t n_faults = 0;
  answers(ERROR, NCCL_RING, NCCL_LL, 7);
  check_as_without_it(tuner, &n_faults);
  static const int absurd[] = {-1, 65, 1000, -2147483647};
  for (size_t i = 0; i < sizeof absurd / sizeof absurd[0]; i++) {
    answers(CELL, NCCL_RING, NCCL_LL, absurd[i]);
    check_as_without_it(tuner, &n_faults);
  }
  if (others_version > 2) {
    answers(STRIKES_ALL, 0, 0, 0);
    check_as_without_it(tuner, &n_faults);
  }
  if (version == 2) {
    answers(REVIVES, NCCL_PAT, NCCL_SIMPLE, 0); /* 2.21 has no such algorithm, and would not look */
    check_as_without_it(tuner, &n_faults);
    answers(REVIVES, -7, 0, 0);
    check_as_without_it(tuner, &n_faults);
  }
  answers(CELL, NCCL_RING, NCCL_LL, 4); /* asked again and again: what it answers next counts */
  question asked = asked_of(tuner, NCCL_ALL_GATHER, 2048);
  check_runs(&asked, NCCL_RING, NCCL_LL, 4);

  const int n_asks = *other.n_asks, n_ends = *other.n_ends;
  *other.init_fails = 1; /* where it cannot begin it is left out */
  tuned without = tuner_init(version, 2, 16, 2);
  asked = asked_of(without, NCCL_ALL_GATHER, 2048);
  check_runs(&asked, NCCL_RING, NCCL_SIMPLE, 0);
  tuner_finalize(without);
  CHECK_EQUAL(*other.n_asks, n_asks);
  CHECK_EQUAL(*other.n_ends, n_ends);
  CHECK_EQUAL(counted().n_next_tuner_faults, n_faults + 1);
  tuner_finalize(tuner);
  CHECK_EQUAL(counted().n_next_tuner_faults, n_faults + 1); /* the dead count on */
}

/* Neither is a cell of ours that it struck out, nor one that it revived against NCCL. */
static void rows_take_only_what_both_offer(int version) {
  name_version(version);
  tuned tuner = tuner_init(version, 1, 16, 2);
  adopt(&gather_row, 1, 1, 0);
  answers(STRIKES_ONE, NCCL_PAT, NCCL_SIMPLE, 0);
  question asked = asked_of(tuner, NCCL_ALL_GATHER, 2048);
  check_runs(&asked, NCCL_RING, NCCL_SIMPLE, 0);
  CHECK_EQUAL(counted().n_ignored_cells, 1);
  zt_plan_row row = gather_row;
  row.algorithm = NCCL_NVLS;
  adopt(&row, 1, 2, 0);
  answers(REVIVES, NCCL_NVLS, NCCL_SIMPLE, 0);
  asked = asked_of(tuner, NCCL_ALL_GATHER, 2048);
  CHECK_EQUAL(counted().n_ignored_cells, 2);
  check_runs(&asked, NCCL_NVLS, NCCL_SIMPLE, 0); /* as without us */
  tuner_finalize(tuner);
}

/* The daemon learns what runs without a plan, in NCCL's own times. */
static void costs_are_reported_as_they_stand(void) {
  name_version(5);
  tuned tuner = tuner_init(5, 1, 16, 2);
  zt_cost_record cost;
  answers(CELL, NCCL_RING, NCCL_LL, 0);
  (void)asked_of(tuner, NCCL_ALL_GATHER, 2048);
  CHECK_EQUAL(the.drain_costs(&cost, 1), 1);
  CHECK(cost.cost_us[NCCL_RING][NCCL_LL] > 97.0f && cost.cost_us[NCCL_RING][NCCL_LL] < 98.0f);
  CHECK(cost.cost_us[NCCL_RING][NCCL_SIMPLE] == 98.0f && cost.cost_us[NCCL_PAT][NCCL_SIMPLE] == 120.0f);
  answers(STRIKES_ONE, NCCL_RING, NCCL_SIMPLE, 0);
  (void)asked_of(tuner, NCCL_ALL_GATHER, 4096);
  CHECK_EQUAL(the.drain_costs(&cost, 1), 1);
  CHECK(cost.cost_us[NCCL_RING][NCCL_SIMPLE] == -1.0f && cost.cost_us[NCCL_RING][NCCL_LL128] == 99.0f);
  answers(REVIVES, NCCL_NVLS, NCCL_SIMPLE, 0);
  (void)asked_of(tuner, NCCL_ALL_GATHER, 8192);
  CHECK_EQUAL(the.drain_costs(&cost, 1), 1);
  CHECK(cost.cost_us[NCCL_NVLS][NCCL_SIMPLE] > 97.0f && cost.cost_us[NCCL_NVLS][NCCL_SIMPLE] < 98.0f);
  tuner_finalize(tuner);
}

static void chunks_are_its_own(int version) {
  const nccl_tuner_v6 *ours = version == 6 ? the.tuner_v6 : the.tuner_v7;
  name_version(version);
  tuned tuner = tuner_init(version, 1, 16, 2);
  CHECK(ours->get_chunk_size != NULL);
  size_t chunk_bytes = 4096;
  *other.chunk_bytes = 8192;
  CHECK_EQUAL(ours->get_chunk_size(tuner.context, 2, 1 << 20, 1, 2, 4, &chunk_bytes), 0);
  CHECK_EQUAL(chunk_bytes, 8192);
  *other.answer = ERROR;
  *other.chunk_bytes = 1;
  CHECK_EQUAL(ours->get_chunk_size(tuner.context, 2, 1 << 20, 1, 2, 4, &chunk_bytes), 0);
  CHECK_EQUAL(chunk_bytes, 8192);
  *other.answer = NOTHING;
  *other.chunk_bytes = 0;
  CHECK_EQUAL(ours->get_chunk_size(tuner.context, 2, 1 << 20, 1, 2, 4, &chunk_bytes), 0);
  CHECK_EQUAL(chunk_bytes, 8192);
  CHECK_EQUAL(counted().n_next_tuner_faults, 2);
  tuner_finalize(tuner);
  name_version(5); /* has none */
  tuner = tuner_init(version, 1, 16, 2);
  CHECK(ours->get_chunk_size == NULL);
  tuner_finalize(tuner);
}

static void chunks_of_a_plan_come_before_its_own(int version) {
  const nccl_tuner_v6 *ours = version == 6 ? the.tuner_v6 : the.tuner_v7;
  for (int has_chunks = 0; has_chunks < 2; has_chunks++) {
    name_version(has_chunks ? version : 5);
    the.ask_chunk_sizes(1);
    tuned tuner = tuner_init(version, 1, 16, 2);
    CHECK(ours->get_chunk_size != NULL);
    *other.chunk_bytes = 8192;
    zt_plan_row row = gather_row;
    row.chunk_kib = 64;
    adopt(&row, 1, 1, 0);
    const size_t theirs = has_chunks ? 8192 : 4096, sizes[][2] = {{2048, 65536}, {1 << 20, theirs}};
    for (size_t i = 0; i < 2; i++) {
      (void)asked_of(tuner, NCCL_ALL_GATHER, sizes[i][0]);
      size_t chunk_bytes = 4096;
      CHECK_EQUAL(ours->get_chunk_size(tuner.context, NCCL_ALL_GATHER, 512, NCCL_PAT, NCCL_SIMPLE, 1, &chunk_bytes), 0);
      CHECK_EQUAL(chunk_bytes, sizes[i][1]);
    }
    tuner_finalize(tuner);
  }
}

/* 2.31 and newer ask for estimates, too: the other is asked as it would be. */
static void estimates_are_its_affair(void) {
  name_version(6);
  tuned tuner = tuner_init(6, 1, 16, 2);
  adopt(&gather_row, 1, 1, 0);
  answers(CELL, NCCL_RING, NCCL_LL, 5);
  question asked = ordinary_question(NCCL_ALL_GATHER, 2048);
  asked.is_estimate = 1;
  tuner_ask(tuner, &asked);
  check_runs(&asked, NCCL_RING, NCCL_LL, 5);
  CHECK_EQUAL(counted().n_estimates, 1);
  CHECK_EQUAL(counted().n_calls, 0);
  tuner_finalize(tuner);
}

static void check_found(int version, int asked_version) {
  tuned tuner = tuner_init(version, 1, 16, 2);
  *other.asked_version = 0;
  (void)asked_of(tuner, NCCL_ALL_GATHER, 2048);
  CHECK_EQUAL(*other.asked_version, asked_version);
  CHECK(strcmp(the.next_tuner(), asked_version == 0 ? "" : "other") == 0);
  tuner_finalize(tuner);
}

/* By NCCL's rules: paths, names, short names, and its own search. */
static void is_found_as_nccl_would(const char *ours) {
  static const char everything[] = "libnccl-tuner.so", four[] = "libnccl-tuner-other4.so";
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", others, four);
  name_other(path, four);
  check_found(4, 4);
  name_other(four, four);
  check_found(6, 4); /* older than NCCL */
  name_other("other4", four);
  check_found(3, 0); /* newer than NCCL: as good as none */
  name_other("", everything);
  for (int version = 3; version <= 6; version++) {
    the.reset();
    check_found(version, version); /* the newest that both have */
  }
  static const char *const none[] = {"none",          "NONE",          "no-such", "/no/such.so",
                                     "other4,other5", "STATIC_PLUGIN", "static"};
  for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
    name_other(none[i], four);
    check_found(5, 0);
  }
  name_other(ours, four); /* ourselves */
  check_found(5, 0);

  setenv("NCCL_NET_PLUGIN", "no-such,libnccl-tuner-other4.so", 1); /* a tuner packed into a network plugin */
  name_other("no-such", four);
  check_found(5, 4);
  unsetenv("NCCL_NET_PLUGIN");
  unsetenv("ZEROTUNE_NEXT_TUNER");
  the.reset();
  check_found(5, 0);
}

void test_next_tuner(void) {
  is_found_as_nccl_would(opened);
  for (int version = 2; version <= 7; version++)
    for (int others_version = 2; others_version <= version; others_version++) {
      is_told_of_each_communicator(version, others_version);
      its_answer_stands_unless_a_row_applies(version, others_version);
      its_faults_change_nothing(version, others_version);
    }
  for (int version = 3; version <= 7; version++) rows_take_only_what_both_offer(version);
  costs_are_reported_as_they_stand();
  chunks_are_its_own(6);
  chunks_are_its_own(7);
  chunks_of_a_plan_come_before_its_own(6);
  chunks_of_a_plan_come_before_its_own(7);
  estimates_are_its_affair();
}
