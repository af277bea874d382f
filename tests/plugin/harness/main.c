#include <dlfcn.h>

#include "harness.h"

plugin the;
_Thread_local double last_constant;
bool chunks_are_asked;
const char *others;
static void *library;

static void *symbol(const char *name) {
  void *found = dlsym(library, name);
  if (found == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return found;
}

const char *opened;

static void open_plugin(const char *path) {
  opened = path;
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  CHECK(dlopen(path, RTLD_NOW | RTLD_LOCAL) == library); /* NCCL's profiler side opens it again */
  the.tuner_v2 = symbol("ncclTunerPlugin_v2");
  the.tuner_v3 = symbol("ncclTunerPlugin_v3");
  the.tuner_v4 = symbol("ncclTunerPlugin_v4");
  the.tuner_v5 = symbol("ncclTunerPlugin_v5");
  the.tuner_v6 = symbol("ncclTunerPlugin_v6");
  the.tuner_v7 = symbol("ncclTunerPlugin_v7");
  the.profiler_v3 = symbol("ncclProfiler_v3");
  the.profiler_v4 = symbol("ncclProfiler_v4");
  the.profiler_v5 = symbol("ncclProfiler_v5");
  the.profiler_v6 = symbol("ncclProfiler_v6");
  the.profiler_v7 = symbol("ncclProfiler_v7");
#define BIND(field, name) *(void **)&the.field = symbol("zerotune_" #name)
  BIND(set_phase, set_phase);
  BIND(set_step, set_step);
  BIND(set_memory_pressure, set_memory_pressure);
  BIND(set_recording, set_recording);
  BIND(set_observing, set_observing);
  BIND(set_timing_source_override, set_timing_source_override);
  BIND(channels_seen, channels_seen);
  BIND(communicators, communicators);
  BIND(cycle, cycle);
  BIND(prepare, prepare);
  BIND(prepare_end, prepare_end);
  BIND(promise, promise);
  BIND(commit, commit);
  BIND(release, release);
  BIND(set_patience, set_patience);
  BIND(waits, waits);
  BIND(tuner_abi, tuner_abi);
  BIND(load, plan_load);
  BIND(row_is_legal, plan_row_is_legal);
  BIND(ask_chunk_sizes, ask_chunk_sizes);
  BIND(flip, plan_flip);
  BIND(active_epoch, active_epoch);
  BIND(drain, drain);
  BIND(drain_costs, drain_costs);
  BIND(counters, counters);
  BIND(passages, passages);
  BIND(one_rank_communicators, one_rank_communicators);
  BIND(next_profiler, next_profiler);
  BIND(next_tuner, next_tuner);
  BIND(reset, reset);
}

void reopen_plugin(void) {
  for (int reference = 0; reference < 2; reference++) CHECK_EQUAL(dlclose(library), 0);
  open_plugin(opened);
}

tuned tuner_init(int version, uint64_t comm_id, size_t n_ranks, size_t n_nodes) {
  tuned tuner = {.version = version};
  nccl_nvl_domain_info domain = {(int)n_nodes, 1, 8};
  nccl_tuner_constants_v7 constants_v7 = {.base_latencies[1][0] = 6.6}, before = constants_v7;
  nccl_tuner_constants constants;
  memset(&constants, 0, sizeof constants);
  memcpy(&constants, &constants_v7, sizeof constants_v7.base_latencies);
  const char *name = NULL;
  int result = -1;
  switch (version) {
#define NAMELESS(v)                                                                          \
  case v:                                                                                    \
    name = the.tuner_v##v->name;                                                             \
    result = the.tuner_v##v->init(n_ranks, n_nodes, NULL, &tuner.context);                   \
    break
    NAMELESS(2);
    NAMELESS(3);
    NAMELESS(4);
  case 5:
    name = the.tuner_v5->name;
    result = the.tuner_v5->init(&tuner.context, comm_id, n_ranks, n_nodes, NULL, &domain, &constants);
    break;
  case 6:
    name = the.tuner_v6->name;
    result = the.tuner_v6->init(&tuner.context, comm_id, n_ranks, n_nodes, NULL, &domain, &constants);
    break;
  case 7:
    name = the.tuner_v7->name;
    result = the.tuner_v7->init(&tuner.context, comm_id, n_ranks, n_nodes, NULL, &domain,
                                (nccl_tuner_constants *)(void *)&constants_v7);
  }
  const bool is_alone = the.next_tuner()[0] == '\0';
  CHECK(!is_alone || (the.tuner_v6->get_chunk_size != NULL) == chunks_are_asked);
  CHECK(the.tuner_v6->get_chunk_size == the.tuner_v7->get_chunk_size);
  CHECK(!is_alone || memcmp(&constants_v7, &before, sizeof before) == 0);
  CHECK(!is_alone || memcmp(&constants, &before, offsetof(nccl_tuner_constants, per_channel_nvls_tree_gbs)) == 0);
  last_constant = version == 7 ? constants_v7.per_channel_nvls_tree_gbs[3][2] : constants.per_channel_nvls_tree_gbs[3][2];
  CHECK_EQUAL(result, NCCL_SUCCESS);
  CHECK(strcmp(name, "zerotune") == 0);
  CHECK_EQUAL(the.tuner_abi(), version);
  return tuner;
}

/* 2.21 asks again for each member of a run, here of one: the cell is settled by then. */
static void check_member(tuned tuner, const question *asked) {
  int algorithm = -1, protocol = -1, n_channels = asked->n_channels;
  CHECK_EQUAL(the.tuner_v2->get_coll_info(tuner.context, asked->collective, asked->n_bytes, 0, 0, 1, &algorithm,
                                          &protocol, &n_channels),
              NCCL_SUCCESS);
  CHECK_EQUAL(n_channels, asked->n_channels);
  CHECK(the.next_tuner()[0] != '\0' || (algorithm == -1 && protocol == -1));
}

void tuner_ask(tuned tuner, question *asked) {
  /* the table as NCCL lays it out, rows beyond n_algorithms not there: the canary stands behind them */
  float table[7 * 3 + 1];
  const size_t n_cells = (size_t)asked->n_algorithms * 3;
  memcpy(table, asked->cost, n_cells * sizeof(float));
  for (size_t i = n_cells; i < 22; i++) table[i] = 12345.0f;
  float **costs = (float **)(void *)table;
  const int f = asked->collective, n = asked->n_algorithms;
  int result = -1;
  asked->algorithm = asked->protocol = -1;
  switch (tuner.version) {
  case 2:
    result = the.tuner_v2->get_coll_info(tuner.context, f, asked->n_bytes, 0, 0, 1, &asked->algorithm,
                                         &asked->protocol, &asked->n_channels);
    check_member(tuner, asked);
    break;
  case 3:
    result = the.tuner_v3->get_coll_info(tuner.context, f, asked->n_bytes, asked->is_estimate ? 0 : 1, costs, n, 3, &asked->n_channels);
    break;
#define REGISTERED(v)                                                                                        \
  case v:                                                                                                    \
    result = the.tuner_v##v->get_coll_info(tuner.context, f, asked->n_bytes, asked->is_estimate ? 0 : 1, costs,      \
                                           n, 3, asked->registered, &asked->n_channels);                     \
    break
    REGISTERED(4);
    REGISTERED(5);
    REGISTERED(6);
    REGISTERED(7);
  }
  CHECK_EQUAL(result, NCCL_SUCCESS);
  for (size_t i = n_cells; i < 22; i++) CHECK(table[i] == 12345.0f);
  memcpy(asked->cost, table, n_cells * sizeof(float));
}

void tuner_finalize(tuned tuner) {
  int result = -1;
  switch (tuner.version) {
  case 2: result = the.tuner_v2->destroy(tuner.context); break;
  case 3: result = the.tuner_v3->destroy(tuner.context); break;
  case 4: result = the.tuner_v4->destroy(tuner.context); break;
  case 5: result = the.tuner_v5->finalize(tuner.context); break;
  case 6: result = the.tuner_v6->finalize(tuner.context); break;
  case 7: result = the.tuner_v7->finalize(tuner.context); break;
  }
  CHECK_EQUAL(result, NCCL_SUCCESS);
}

question ordinary_question(int collective, size_t n_bytes) {
  question asked = {.collective = collective, .n_bytes = n_bytes, .n_algorithms = 7};
  for (int algorithm = 0; algorithm < 7; algorithm++)
    for (int protocol = 0; protocol < 3; protocol++) asked.cost[algorithm][protocol] = -1.0f;
  for (int protocol = 0; protocol < 3; protocol++) asked.cost[NCCL_RING][protocol] = 100.0f - (float)protocol;
  if (collective == NCCL_ALL_REDUCE) asked.cost[NCCL_TREE][NCCL_SIMPLE] = 99.5f;
  if (collective == NCCL_ALL_GATHER || collective == NCCL_REDUCE_SCATTER) asked.cost[NCCL_PAT][NCCL_SIMPLE] = 120.0f;
  return asked;
}

void chosen(const question *answered, int *algorithm, int *protocol) {
  if (answered->algorithm >= 0) {
    *algorithm = answered->algorithm;
    *protocol = answered->protocol;
    return;
  }
  float lowest = 3.6e9f;
  *algorithm = *protocol = -1;
  for (int a = 0; a < answered->n_algorithms; a++)
    for (int p = 0; p < 3; p++)
      if (answered->cost[a][p] >= 0 && answered->cost[a][p] < lowest) {
        lowest = answered->cost[a][p];
        *algorithm = a;
        *protocol = p;
      }
}

void adopt(const zt_plan_row *rows, uint32_t n_rows, uint32_t epoch, uint32_t gathers_after_step) {
  CHECK_EQUAL(the.load(rows, n_rows, epoch, gathers_after_step), 0);
  CHECK_EQUAL(the.flip(epoch), 0);
  CHECK_EQUAL(the.active_epoch(), epoch);
}

zt_counters counted(void) {
  zt_counters counters;
  the.counters(&counters);
  return counters;
}

size_t drained(zt_record *out, size_t max_records) { return the.drain(out, max_records); }

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*run)(void);
  } tests[] = {{"tuner", test_tuner},
               {"costs_and_records", test_costs_and_records},
               {"profiler", test_profiler},
               {"lifetimes", test_lifetimes},
               {"groups", test_groups},
               {"kernels", test_kernels},
               {"passages", test_passages},
               {"shifts", test_shifts},
               {"impossible_numbers", test_impossible_numbers},
               {"next_tuner", test_next_tuner},
               {"next_profiler", test_next_profiler},
               {"threads", test_threads},
               {"agreed", test_agreed}};
  if (argc != 4) return 2;
  others = argv[3];
  open_plugin(argv[1]);
  for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++)
    if (strcmp(tests[i].name, argv[2]) == 0) {
      the.reset();
      tests[i].run();
      return 0;
    }
  return 2;
}
