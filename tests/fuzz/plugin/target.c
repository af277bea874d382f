/* The plugin's doors as a program of bytes: what NCCL calls and what Python calls, in any order and with any numbers.
 *
 * Pointers are always good, as NCCL's are; counts, names, handles and plans are whatever the bytes say. A cost table has
 * as many cells as it says it has where the plugin may read it, else NCCL's 7 x 3: a sanitizer guards its ends. */
#include "target.h"

#include <stdlib.h>
#include <string.h>

#include "nccl_abi.h"
#include "zerotune_plugin.h"

extern const nccl_tuner_v2 ncclTunerPlugin_v2;
extern const nccl_tuner_v3 ncclTunerPlugin_v3;
extern const nccl_tuner_v4 ncclTunerPlugin_v4;
extern const nccl_tuner_v5 ncclTunerPlugin_v5;
extern const nccl_tuner_v6 ncclTunerPlugin_v6, ncclTunerPlugin_v7;
extern const nccl_profiler_v3 ncclProfiler_v3;
extern const nccl_profiler_v4 ncclProfiler_v4;
extern const nccl_profiler_v5 ncclProfiler_v5;
extern const nccl_profiler_v6 ncclProfiler_v6;
extern const nccl_profiler_v7 ncclProfiler_v7;

#define CHECK(condition) ((condition) ? (void)0 : abort())

enum { N_COMMUNICATORS = 6, N_HANDLES = 32, MOST_ROWS = 8 };

static const uint8_t *at, *end;

static uint8_t byte(void) { return at < end ? *at++ : 0; }

static void fill(void *out, size_t n_bytes) {
  const size_t n_left = (size_t)(end - at), n_taken = n_bytes < n_left ? n_bytes : n_left;
  memset(out, 0, n_bytes);
  memcpy(out, at, n_taken);
  at += n_taken;
}

/* Mostly small, sometimes any. */
static uint64_t number(void) {
  const uint8_t first = byte();
  if (first < 224) return first;
  if (first < 240) return UINT64_C(1) << byte() % 64;
  uint64_t any;
  fill(&any, sizeof any);
  return any;
}

static int whole(void) { return (int)(uint32_t)number(); }

static struct {
  int version;
  void *context;
} tuners[N_COMMUNICATORS], profilers[N_COMMUNICATORS];
static int masks[N_COMMUNICATORS];
static void *handles[N_HANDLES];
static uint32_t n_handles;

static void *handle(void) {
  const uint8_t which = byte();
  return which < 250 ? handles[which % N_HANDLES] : (void *)(uintptr_t)number();
}

static void keep(void *made) { handles[n_handles++ % N_HANDLES] = made; }

/* ---- the tuner ---- */

static void end_tuner(int place) {
  void *context = tuners[place].context;
  switch (tuners[place].version) {
  case 2: CHECK(ncclTunerPlugin_v2.destroy(context) == 0); break;
  case 3: CHECK(ncclTunerPlugin_v3.destroy(context) == 0); break;
  case 4: CHECK(ncclTunerPlugin_v4.destroy(context) == 0); break;
  case 5: CHECK(ncclTunerPlugin_v5.finalize(context) == 0); break;
  case 6: CHECK(ncclTunerPlugin_v6.finalize(context) == 0); break;
  case 7: CHECK(ncclTunerPlugin_v7.finalize(context) == 0); break;
  }
  tuners[place].version = 0;
}

static void begin_tuner(void) {
  const int place = byte() % N_COMMUNICATORS, version = 2 + byte() % 6;
  const uint64_t comm_id = byte();
  const size_t n_ranks = number(), n_nodes = number();
  nccl_nvl_domain_info domain = {(int)n_nodes, 1, 8};
  static nccl_tuner_constants constants;
  void **context = &tuners[place].context;
  end_tuner(place);
  switch (version) {
  case 2: CHECK(ncclTunerPlugin_v2.init(n_ranks, n_nodes, NULL, context) == 0); break;
  case 3: CHECK(ncclTunerPlugin_v3.init(n_ranks, n_nodes, NULL, context) == 0); break;
  case 4: CHECK(ncclTunerPlugin_v4.init(n_ranks, n_nodes, NULL, context) == 0); break;
  case 5: CHECK(ncclTunerPlugin_v5.init(context, comm_id, n_ranks, n_nodes, NULL, &domain, &constants) == 0); break;
  case 6: CHECK(ncclTunerPlugin_v6.init(context, comm_id, n_ranks, n_nodes, NULL, &domain, &constants) == 0); break;
  case 7: CHECK(ncclTunerPlugin_v7.init(context, comm_id, n_ranks, n_nodes, NULL, &domain, &constants) == 0); break;
  }
  tuners[place].version = version;
}

static void ask(void) {
  const int place = byte() % N_COMMUNICATORS, collective = whole(), n_pipe_ops = whole();
  const size_t n_bytes = number();
  int n_algorithms = 7, n_protocols = 3, n_channels = 5, result = 0;
  if (byte() % 4 == 0) n_algorithms = whole(), n_protocols = whole();
  const int is_read = n_algorithms > 0 && n_algorithms <= NCCL_TABLE_ALGORITHMS && n_protocols > 0 &&
                      n_protocols <= NCCL_TABLE_PROTOCOLS;
  const size_t n_cells = is_read ? (size_t)(n_algorithms * n_protocols) : 21;
  float *table = malloc(n_cells * sizeof *table);
  CHECK(table != NULL);
  const uint8_t kind = byte();
  if (kind % 4 == 0)
    fill(table, n_cells * sizeof *table);
  else
    for (size_t i = 0; i < n_cells; i++) table[i] = (kind >> i % 8 & 1) ? 10.0f + (float)i : -1.0f;
  float **costs = (float **)(void *)table;
  void *context = tuners[place].context;
  switch (tuners[place].version) {
  case 2: {
    int algorithm = -1, protocol = -1;
    result = ncclTunerPlugin_v2.get_coll_info(context, collective, n_bytes, n_algorithms, n_protocols, n_pipe_ops,
                                              &algorithm, &protocol, &n_channels);
    CHECK(algorithm >= -1 && algorithm < NCCL_MAX_ALGORITHMS && protocol >= -1 && protocol < NCCL_N_PROTOCOLS);
    break;
  }
  case 3:
    result = ncclTunerPlugin_v3.get_coll_info(context, collective, n_bytes, n_pipe_ops, costs, n_algorithms, n_protocols,
                                              &n_channels);
    break;
#define REGISTERED(v)                                                                                          \
  case v:                                                                                                      \
    result = ncclTunerPlugin_v##v.get_coll_info(context, collective, n_bytes, n_pipe_ops, costs, n_algorithms, \
                                                n_protocols, kind & 1, &n_channels);                           \
    break
    REGISTERED(4);
    REGISTERED(5);
    REGISTERED(6);
    REGISTERED(7);
  }
  CHECK(result == 0);
  CHECK(n_channels >= 1 && n_channels <= NCCL_MAX_CHANNELS);
  free(table);
}

/* ---- the plan ---- */

static void load_plan(void) {
  static zt_plan_row rows[MOST_ROWS];
  const uint32_t n_rows = byte() % (MOST_ROWS + 1), epoch = byte();
  const uint8_t is_likely = byte();
  fill(rows, n_rows * sizeof *rows);
  for (uint32_t i = 0; is_likely % 4 != 0 && i < n_rows; i++) { /* most random rows are refused at once */
    zt_plan_row *row = &rows[i];
    row->n_ranks = 1 + row->n_ranks % 16;
    row->n_nodes = 1 + row->n_nodes % row->n_ranks;
    row->collective %= NCCL_N_COLLECTIVES;
    row->phase %= 5;
    row->algorithm = row->algorithm & 1 ? NCCL_RING : ZT_NO_OPINION;
    row->protocol = row->algorithm == NCCL_RING ? row->protocol % NCCL_N_PROTOCOLS : ZT_NO_OPINION;
    row->n_channels %= NCCL_MAX_CHANNELS + 1;
    row->min_bytes >>= is_likely % 64;
    if (row->max_bytes < row->min_bytes) row->max_bytes = row->min_bytes + 1;
  }
  const int loaded = zerotune_plan_load(rows, n_rows, epoch, is_likely & 4);
  CHECK(loaded <= 0 && loaded >= -4);
  for (uint32_t i = 0; i < n_rows; i++) CHECK(loaded != 0 || zerotune_plan_row_is_legal(&rows[i]));
  if (byte() % 4 != 0) {
    CHECK(zerotune_plan_flip(epoch) == (loaded == 0 ? 0 : -1) || loaded != 0);
    CHECK(loaded != 0 || zerotune_active_epoch() == epoch);
  }
}

/* A change on one communicator. No promise stays: this thread would wait for itself. */
static void agree(void) {
  zt_communicator_state states[N_COMMUNICATORS];
  const size_t n_states = zerotune_communicators(states, N_COMMUNICATORS);
  CHECK(n_states <= N_COMMUNICATORS);
  if (n_states == 0) return;
  const zt_communicator_state *state = &states[byte() % n_states];
  const uint32_t n_stages = byte() % (ZT_MAX_STAGES + 2), n_prepared = byte() & 1 ? n_stages : byte() % 3;
  for (uint32_t i = 0; i < n_prepared; i++) {
    const zt_plan_row row = {number(), number(), state->n_ranks, state->n_nodes, byte() % 6, byte() % 6, NCCL_RING,
                             byte() % 3, byte() % 70, {0}};
    CHECK(zerotune_prepare(&row, 1, byte(), byte() & 1) <= 0);
  }
  zt_cycle_call cycle[8];
  uint32_t n_cycle = byte() % 9;
  fill(cycle, n_cycle * sizeof *cycle);
  if (byte() & 1) n_cycle = zerotune_cycle(state->owner, byte() & 1, cycle, 8);
  const uint64_t promise = zerotune_promise(state->owner, byte() % 4);
  CHECK(promise == 0 || promise > state->n_calls);
  uint64_t from_calls[ZT_MAX_STAGES + 1] = {promise + byte() % 8 - (byte() % 8 == 0)};
  for (uint32_t i = 1; i <= ZT_MAX_STAGES; i++) from_calls[i] = from_calls[i - 1] + byte() % 4;
  const int fault = zerotune_commit(state->owner, from_calls, n_stages, cycle, n_cycle);
  CHECK(fault <= 0 && fault >= -3);
  zerotune_release(state->owner);
  zerotune_prepare_end();
}

static void set_state(void) {
  switch (byte() % 7) {
  case 0: zerotune_set_phase((uint32_t)number()); break;
  case 1: (void)zerotune_set_step((uint32_t)number()); break;
  case 2: zerotune_set_memory_pressure((float)byte() / 200.0f - 0.1f); break;
  case 3: zerotune_set_recording(byte() & 1); break;
  case 4: zerotune_set_observing(byte() & 1); break;
  case 5: zerotune_set_timing_source_override((uint32_t)number()); break;
  case 6: (void)zerotune_plan_flip((uint32_t)number()); break;
  }
}

/* ---- the profiler ---- */

static void end_profiler(int place) {
  void *context = profilers[place].context;
  switch (profilers[place].version) {
#define END(v) \
  case v: CHECK(ncclProfiler_v##v.finalize(context) == 0); break
    END(3);
    END(4);
    END(5);
    END(6);
    END(7);
  }
  profilers[place].version = 0;
}

static void begin_profiler(void) {
  const int place = byte() % N_COMMUNICATORS, version = 3 + byte() % 5;
  const uint64_t comm_id = byte();
  const int n_ranks = whole(), n_nodes = whole(), rank = whole();
  void **context = &profilers[place].context;
  end_profiler(place);
  switch (version) {
#define NAMELESS(v) \
  case v: CHECK(ncclProfiler_v##v.init(context, &masks[place]) == 0); break
    NAMELESS(3);
  case 4: CHECK(ncclProfiler_v4.init(context, &masks[place], "", comm_id, n_nodes, n_ranks, rank, NULL) == 0); break;
#define NAMED(v) \
  case v: CHECK(ncclProfiler_v##v.init(context, comm_id, &masks[place], "", n_nodes, n_ranks, rank, NULL) == 0); break
    NAMED(5);
    NAMED(6);
    NAMED(7);
  }
  profilers[place].version = version;
}

static const char *name(void) {
  static const char *const names[] = {"AllGather", "ReduceScatter", "AllReduce", "Broadcast", "Reduce", "Send", "Recv",
                                      "RING", "TREE", "NVLS", "PAT", "LL", "LL128", "SIMPLE", "ncclFloat32",
                                      "ncclBfloat16", "ncclInt8", "", "x", NULL};
  return names[byte() % (sizeof names / sizeof names[0])];
}

static nccl_coll_v4 coll_v4(void) {
  return (nccl_coll_v4){.sequence = number(),
                        .collective = name(),
                        .count = number(),
                        .datatype = name(),
                        .n_channels = byte(),
                        .algorithm = name(),
                        .protocol = name()};
}

static void start_event(void) {
  static const uint64_t kinds[] = {NCCL_PROFILE_COLL, NCCL_PROFILE_COLL, NCCL_PROFILE_KERNEL_CHANNEL, NCCL_PROFILE_P2P,
                                   NCCL_PROFILE_GROUP, NCCL_PROFILE_COLL_API, NCCL_PROFILE_CE_COLL, 0};
  const int place = byte() % N_COMMUNICATORS;
  const uint64_t type = kinds[byte() % 8];
  const int rank = whole();
  void *context = profilers[place].context, *parent = handle(), *made = NULL;
  int result = 0;
  switch (profilers[place].version) {
  case 3: {
    nccl_event_v3 event = {.type = (uint8_t)type, .parent = parent, .rank = rank};
    if (type == NCCL_PROFILE_KERNEL_CHANNEL)
      event.kernel_channel = byte();
    else
      event.coll = (nccl_coll_v3){.comm_hash = byte(), .sequence = number(), .count = number(), .collective = name(),
                                  .datatype = name(), .algorithm = name(), .protocol = name(),
                                  .n_max_channels = byte()};
    result = ncclProfiler_v3.start_event(context, &made, &event);
    break;
  }
  case 4: {
    nccl_event_v4 event = {.type = (uint8_t)type, .parent = parent, .rank = rank};
    if (type == NCCL_PROFILE_KERNEL_CHANNEL)
      event.kernel_channel = (nccl_kernel_channel_v4){.channel = byte(), .start_ns = number()};
    else if (type == NCCL_PROFILE_P2P)
      event.p2p = (nccl_p2p_v4){.function = name(), .datatype = name(), .count = number()};
    else
      event.coll = coll_v4();
    result = ncclProfiler_v4.start_event(context, &made, &event);
    break;
  }
  case 5:
  case 6:
  case 7: {
    nccl_event_v5 event = {.type = type, .parent = parent, .rank = rank};
    if (type == NCCL_PROFILE_KERNEL_CHANNEL)
      event.kernel_channel = (nccl_kernel_channel_v4){.channel = byte(), .start_ns = number()};
    else if (type == NCCL_PROFILE_P2P)
      event.p2p = (nccl_p2p_v4){.function = name(), .datatype = name(), .count = number()};
    else if (type == NCCL_PROFILE_CE_COLL)
      event.ce_coll = (nccl_ce_coll_v6){.collective = name(), .count = number(), .datatype = name()};
    else if (type == NCCL_PROFILE_COLL_API)
      event.coll_api = (nccl_coll_api_v5){.collective = name(), .graph_captured = byte() & 1};
    else {
      event.coll.coll = coll_v4();
      if (profilers[place].version == 7) event.coll_v7.is_symmetric = byte() & 1;
    }
    result = profilers[place].version == 5   ? ncclProfiler_v5.start_event(context, &made, &event)
             : profilers[place].version == 6 ? ncclProfiler_v6.start_event(context, &made, &event)
                                             : ncclProfiler_v7.start_event(context, &made, &event);
    break;
  }
  default: return;
  }
  CHECK(result == 0 && (made != NULL || profilers[place].version >= 7)); /* ours declines what v7 always asks for */
  if (made != NULL) keep(made);
}

static void stop_event(void) { CHECK(ncclProfiler_v5.stop_event(handle()) == 0); }

static void record_state(void) {
  void *of = handle();
  nccl_event_state_args args = {.kernel_channel_stop_ns = number()};
  CHECK(ncclProfiler_v5.record_event_state(of, byte() & 1 ? NCCL_STATE_KERNEL_CHANNEL_STOP : whole(), &args) == 0);
}

/* ---- what Python takes out ---- */

static void drain(void) {
  static zt_record records[64];
  static zt_cost_record costs[64];
  const size_t n_records = zerotune_drain(records, 64), n_costs = zerotune_drain_costs(costs, 64);
  CHECK(n_records <= 64 && n_costs <= 64);
  for (size_t i = 0; i < n_records; i++) {
    CHECK(records[i].collective < NCCL_N_COLLECTIVES && records[i].phase < 5 && records[i].message_bytes > 0);
    CHECK(records[i].n_ranks > 0 && records[i].n_ranks <= NCCL_MAX_RANKS && records[i].n_nodes <= records[i].n_ranks);
  }
  for (size_t i = 0; i < n_costs; i++) {
    CHECK(costs[i].collective < NCCL_N_COLLECTIVES && costs[i].n_algorithms <= NCCL_TABLE_ALGORITHMS);
    for (int cell = 0; cell < 21; cell++) CHECK(costs[i].cost_us[cell / 3][cell % 3] >= -1.0f);
  }
}

static void look(void) {
  zt_counters counters;
  zt_passage_sum sums[ZT_N_PASSAGES];
  zerotune_counters(&counters);
  zerotune_passages(sums);
  CHECK(counters.n_matched <= counters.n_calls);
  (void)zerotune_channels_seen((uint32_t)number(), (uint32_t)number());
  zt_communicator_state states[4];
  CHECK(zerotune_communicators(states, 4) < 1000);
  CHECK(zerotune_size_class(number()) < 256);
}

void fuzz_one(const uint8_t *data, size_t n_bytes) {
  at = data;
  end = data + n_bytes;
  while (at < end) {
    switch (byte() % 17) {
    case 16: agree(); break;
    case 0: begin_tuner(); break;
    case 1: begin_profiler(); break;
    case 2: case 3: case 4: ask(); break;
    case 5: load_plan(); break;
    case 6: set_state(); break;
    case 7: case 8: case 9: start_event(); break;
    case 10: case 11: stop_event(); break;
    case 12: record_state(); break;
    case 13: drain(); break;
    case 14: look(); break;
    case 15: byte() & 1 ? end_tuner(byte() % N_COMMUNICATORS) : end_profiler(byte() % N_COMMUNICATORS); break;
    }
  }
  for (int place = 0; place < N_COMMUNICATORS; place++) end_tuner(place), end_profiler(place);
  drain();
  memset(handles, 0, sizeof handles);
  memset(masks, 0, sizeof masks);
  n_handles = 0;
  zerotune_reset();
}
