/* The tuner plugin: six ABI versions over one body.
 *
 * getCollInfo takes no lock, allocates nothing and makes no system call, unless the call must wait (agree/schedule.h).
 * It never returns an error, which would fail the collective. If no row of the plan applies, it changes nothing, not
 * even the channel count.
 */
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "../nccl_abi.h"
#include "../next/tuner.h"
#include "../plan/plan.h"
#include "../plan/shared_state.h"
#include "../profiler/shifts.h"
#include "../records/records.h"
#include "communicator.h"
#include "costs.h"
#include "size_class.h"

#define EXPORT __attribute__((visibility("default")))
#define ZT_INLINE __attribute__((always_inline)) static inline /* so that only calls with a next tuner pay for it */

typedef struct {
  uint32_t collective;
  uint64_t message_bytes;
  int n_pipe_ops;
  bool registered;
  bool has_costs;  /* false: v2, where this plugin makes a table */
  bool in_network; /* v2 only: NCCL could choose CollNet or NVLS by itself */
  const float *offered; /* NCCL's costs, if the next tuner has edited the table since; else NULL */
  int offered_channels;
} call;

/* ---- channels ---- */

/* NCCL caps a tuner's channel count to the communicator's, except for these algorithms (multi-node NVLS runs as
 * CollNet). */
static bool takes_channels_raw(uint32_t algorithm, uint32_t n_nodes) {
  switch (algorithm) {
  case NCCL_COLLNET_DIRECT:
  case NCCL_COLLNET_CHAIN:
  case NCCL_NVLS_TREE:
    return true;
  case NCCL_NVLS:
    return n_nodes > 1;
  default:
    return false;
  }
}

/* Whether NCCL's own choice could be such an algorithm. */
static bool may_take_channels_raw(const zt_cost_table *table, uint32_t n_nodes) {
  for (uint32_t algorithm = 0; algorithm < NCCL_MAX_ALGORITHMS; algorithm++)
    if (takes_channels_raw(algorithm, n_nodes) && zt_is_legal(zt_cell_of(table, algorithm, NCCL_SIMPLE))) return true;
  return false;
}

/* The channel count of a row for NCCL; 0 = keep NCCL's own, if NCCL would not cap the row's. */
static int capped_channels(zt_communicator *communicator, uint32_t n_nodes, const zt_choice *choice,
                           const zt_cost_table *table, bool in_network) {
  const bool raw = choice->algorithm == ZT_NO_OPINION ? in_network || may_take_channels_raw(table, n_nodes)
                                                      : takes_channels_raw(choice->algorithm, n_nodes);
  if (raw) ZT_BUMP(communicator->n_clamped_channels);
  return raw ? 0 : choice->n_channels;
}

/* ---- records ---- */

static void report_costs(zt_communicator *communicator, const zt_class *its_class, const call *asked,
                         const zt_cost_table *table) {
  zt_cost_record record = {
      .comm_id = atomic_load_explicit(&communicator->comm_id, memory_order_relaxed),
      .message_bytes = asked->message_bytes,
      .n_ranks = zt_class_n_ranks(its_class),
      .n_nodes = zt_class_n_nodes(its_class),
      .collective = (uint8_t)asked->collective,
      .n_algorithms = (uint8_t)table->n_algorithms,
      .n_protocols = (uint8_t)table->n_protocols,
      .n_pipe_ops = (uint32_t)asked->n_pipe_ops,
  };
  for (uint32_t algorithm = 0; algorithm < NCCL_MAX_ALGORITHMS; algorithm++)
    for (uint32_t protocol = 0; protocol < NCCL_N_PROTOCOLS; protocol++) {
      const float *cell = zt_cell_of(table, algorithm, protocol);
      record.cost_us[algorithm][protocol] = zt_is_legal(cell) ? *cell : -1.0f;
    }
  if (!zt_cost_push(&record)) return; /* the ring is full: the next such call tries again */
  const uint32_t index = zt_size_class(asked->message_bytes);
  atomic_fetch_or_explicit(&communicator->costs_reported[asked->collective][index / 64], UINT64_C(1) << index % 64,
                           memory_order_relaxed);
}

static bool costs_are_new(const zt_communicator *communicator, const call *asked) {
  const uint32_t index = zt_size_class(asked->message_bytes);
  return !(atomic_load_explicit(&communicator->costs_reported[asked->collective][index / 64],
                                memory_order_relaxed) >>
               index % 64 &
           1u);
}

/* The cell that NCCL will take: the smallest cost that is not IGNORE, the first on ties. */
static void cheapest(const zt_cost_table *table, uint8_t *algorithm, uint8_t *protocol) {
  float lowest = 3.4e38f;
  for (int a = 0; a < table->n_algorithms; a++)
    for (int p = 0; p < table->n_protocols; p++) {
      const float cost = table->cost_us[a * table->n_protocols + p];
      if (!(cost >= 0.0f && cost < lowest)) continue;
      lowest = cost;
      *algorithm = (uint8_t)a;
      *protocol = (uint8_t)p;
    }
}

ZT_INLINE void record_decision(zt_communicator *communicator, const zt_class *its_class, const call *asked,
                            const zt_choice *choice, const zt_cost_table *table, uint8_t flags, uint32_t sequence,
                            int n_channels, uint16_t chunk_kib) {
  zt_record record = {
      .comm_id = atomic_load_explicit(&communicator->comm_id, memory_order_relaxed),
      .message_bytes = asked->message_bytes,
      .duration_us = -1.0f,
      .sequence = sequence,
      .epoch = choice->epoch,
      .n_ranks = zt_class_n_ranks(its_class),
      .n_nodes = zt_class_n_nodes(its_class),
      .rank = atomic_load_explicit(&communicator->rank, memory_order_relaxed),
      .collective = (uint8_t)asked->collective,
      .algorithm = ZT_NO_OPINION,
      .protocol = ZT_NO_OPINION,
      .n_channels = (uint8_t)n_channels,
      .phase = choice->phase,
      .datatype = 255,
      .flags = flags,
      .memory_pressure = zt_memory_pressure(),
      .step = zt_read(&zt_shared.step),
      .chunk_bytes = (uint32_t)chunk_kib << 10,
  };
  if (asked->has_costs) cheapest(table, &record.algorithm, &record.protocol);
  if (!asked->has_costs && flags & ZT_FLAG_MATCHED) {
    record.algorithm = choice->algorithm;
    record.protocol = choice->protocol;
  }
  zt_record_push(&record);
}

/* ---- the body ---- */

/* Just below all other cells, and not 0: NCCL 2.31 and newer compare it with the cost of kernels outside the table. */
static void make_cheapest(const zt_cost_table *table, float *chosen) {
  const float least_us = 1e-3f, below = 0.999f;
  float lowest = FLT_MAX;
  for (int i = 0; i < table->n_algorithms * table->n_protocols; i++) {
    float *cell = &table->cost_us[i];
    if (cell == chosen || !zt_is_legal(cell)) continue;
    if (*cell < least_us) *cell = least_us;
    if (*cell < lowest) lowest = *cell;
  }
  if (*chosen > lowest * below) *chosen = lowest * below;
}

/* NCCL's estimates after the next tuner's edits: its choice is just below the other cells, and cells that it has
 * disabled are left out. Its own numbers are not used, since they are seldom times. */
static void effective_costs(const zt_cost_table *table, const float *offered, float *costs) {
  uint8_t algorithm = ZT_NO_OPINION, protocol = ZT_NO_OPINION;
  cheapest(table, &algorithm, &protocol);
  const zt_cost_table made = {costs, table->n_algorithms, table->n_protocols};
  for (int i = 0; i < table->n_algorithms * table->n_protocols; i++) {
    const bool is_enabled = zt_is_legal(&table->cost_us[i]) && zt_is_legal(&offered[i]);
    costs[i] = is_enabled ? offered[i] : -1.0f;
  }
  float *chosen = zt_cell_of(&made, algorithm, protocol);
  if (chosen == NULL) return;
  if (!zt_is_legal(chosen)) *chosen = FLT_MAX; /* the next tuner has enabled it */
  make_cheapest(&made, chosen);
}

__attribute__((noinline)) static void report_new_costs(zt_communicator *communicator, const zt_class *its_class,
                                                  const call *asked, const zt_cost_table *table) {
  float costs[ZT_MAX_CELLS];
  const zt_cost_table effective = {costs, table->n_algorithms, table->n_protocols};
  if (asked->offered != NULL) effective_costs(table, asked->offered, costs);
  report_costs(communicator, its_class, asked, asked->offered != NULL ? &effective : table);
}

/* Cells that the next tuner has disabled or enabled do not count as offered. */
static bool is_offered(const zt_cost_table *table, const float *cell, const call *asked) {
  return zt_is_legal(cell) && (asked->offered == NULL || zt_is_legal(&asked->offered[cell - table->cost_us]));
}

/* Apply the row, if NCCL offers its cell. Returns whether it asks NCCL for anything; *asked_channels: for channels. */
ZT_INLINE bool apply(zt_communicator *communicator, const zt_class *its_class, const zt_choice *choice,
                  const call *asked, const zt_cost_table *table, int *asked_channels) {
  const bool names_cell = choice->algorithm != ZT_NO_OPINION;
  float *cell = names_cell ? zt_cell_of(table, choice->algorithm, choice->protocol) : NULL;
  if (names_cell && !is_offered(table, cell, asked)) {
    ZT_BUMP(communicator->n_ignored_cells);
    return false;
  }
  if (choice->n_channels > 0)
    *asked_channels = capped_channels(communicator, zt_class_n_nodes(its_class), choice, table, asked->in_network);
  if (names_cell) {
    const size_t n_cells = (size_t)(table->n_algorithms * table->n_protocols);
    if (asked->offered != NULL) memcpy(table->cost_us, asked->offered, n_cells * sizeof(float));
    make_cheapest(table, cell);
  }
  return names_cell || *asked_channels > 0 || (choice->chunk_kib > 0 && communicator->chunks.is_enabled);
}

/* Keep the chunk size for the cell that NCCL will take. */
__attribute__((noinline)) static void note_chunk(zt_communicator *communicator, const call *asked,
                                                 const zt_cost_table *table, uint16_t kib) {
  uint8_t algorithm = ZT_NO_OPINION, protocol = ZT_NO_OPINION;
  cheapest(table, &algorithm, &protocol);
  zt_chunk_note(&communicator->chunks, asked->collective, algorithm, protocol, kib);
}

ZT_INLINE bool decide_now(zt_communicator *communicator, const zt_call_plan *call_plan, const call *asked,
                       const zt_cost_table *table, int *n_channels, zt_choice *choice) {
  const zt_class *its_class = atomic_load_explicit(&communicator->its_class, memory_order_relaxed);
  /* Higher collective numbers differ between NCCL and RCCL, and neither lets them be tuned. */
  if (its_class == NULL || asked->collective >= NCCL_N_COLLECTIVES || asked->message_bytes == 0) return false;
  if (!zt_has_table_size(table)) return false;
  if (asked->has_costs && costs_are_new(communicator, asked)) report_new_costs(communicator, its_class, asked, table);

  const uint32_t class_index = zt_class_index(its_class), phase_or_region = zt_read(&zt_shared.phase_or_region);
  if (call_plan->table == NULL) {
    *choice = zt_plan_lookup(class_index, asked->collective, asked->message_bytes, phase_or_region);
  } else {
    *choice = zt_plan_epoch_and_phase(call_plan->table, asked->collective, phase_or_region);
    zt_plan_look_up(call_plan->table, class_index, asked->collective, asked->message_bytes, call_plan->phase, choice);
    if (call_plan->phase != ZT_NO_PHASE) choice->phase = (uint8_t)call_plan->phase;
  }
  atomic_store_explicit(&communicator->agreed.epoch, choice->epoch, memory_order_relaxed);
  zt_step_ran_under(choice->epoch);
  int asked_channels = 0;
  bool matched = choice->found && !communicator->leave_alone &&
                 apply(communicator, its_class, choice, asked, table, &asked_channels);
  if (asked_channels > 0)
    *n_channels = asked_channels;
  else if (matched) /* the next tuner's channels were for another cell */
    *n_channels = asked->offered_channels;
  if (matched) ZT_BUMP(communicator->n_matched);
  const bool has_chunks = __builtin_expect(communicator->chunks.is_enabled, 0);
  const uint16_t chunk_kib = has_chunks && matched ? choice->chunk_kib : 0;
  if (has_chunks) note_chunk(communicator, asked, table, chunk_kib);

  const uint32_t sequence = atomic_load_explicit(&communicator->sequence[asked->collective], memory_order_relaxed);
  atomic_store_explicit(&communicator->sequence[asked->collective], sequence + 1, memory_order_relaxed);
  const uint8_t flags = (uint8_t)((matched ? ZT_FLAG_MATCHED : 0) | (asked->registered ? ZT_FLAG_REGISTERED : 0) |
                                  (call_plan->is_off_cycle && !choice->found ? ZT_FLAG_OFF_CYCLE : 0));
  if (zt_read(&zt_shared.capturing)) {
    if (zerotune_profiler_abi() >= NCCL_COUNTS_REQUESTED_ONLY)
      atomic_store_explicit(&communicator->is_uncounted, true, memory_order_relaxed);
  } else if (zt_read(&zt_shared.observing) && !atomic_load_explicit(&communicator->is_uncounted, memory_order_relaxed)) {
    zt_decision_note(communicator, asked->collective, asked->message_bytes, choice->epoch, choice->phase, flags);
  }
  if (zt_read(&zt_shared.recording))
    record_decision(communicator, its_class, asked, choice, table, flags, sequence, asked_channels, chunk_kib);
  return matched;
}

/* Every call is counted, also one that cannot be tuned: ranks agree on call numbers. */
ZT_INLINE bool decide(zt_communicator *communicator, const call *asked, const zt_cost_table *table, int *n_channels,
                   zt_choice *choice) {
  const zt_call_plan call_plan = zt_call_begin(&communicator->agreed, asked->collective, asked->message_bytes);
  const bool matched = decide_now(communicator, &call_plan, asked, table, n_channels, choice);
  zt_call_end(&communicator->agreed);
  return matched;
}

/* ---- v3 to v7: NCCL passes its cost table ---- */

/* The next tuner is asked first: if no row applies, its answer stands. */
__attribute__((noinline)) static void decide_after_next(zt_communicator *communicator, call asked,
                                                        const zt_cost_table *table, int *n_channels) {
  float offered[ZT_MAX_CELLS];
  const zt_question question = {(int)asked.collective, asked.message_bytes, asked.n_pipe_ops, asked.registered};
  if (zt_next_tuner_ask(communicator, &question, table, offered, n_channels)) asked.offered = offered;
  zt_choice choice;
  if (asked.n_pipe_ops > 0) (void)decide(communicator, &asked, table, n_channels, &choice);
}

static nccl_result coll_info_v4(void *context, int collective, size_t n_bytes, int n_pipe_ops, float **costs,
                                int n_algorithms, int n_protocols, int registered_buffers, int *n_channels) {
  if (context == NULL || costs == NULL || n_channels == NULL) return NCCL_SUCCESS;
  zt_communicator *communicator = context;
  const zt_cost_table table = {(float *)(void *)costs, n_algorithms, n_protocols};
  const call asked = {.collective = (uint32_t)collective,
                      .message_bytes = n_bytes,
                      .n_pipe_ops = n_pipe_ops,
                      .registered = registered_buffers != 0,
                      .has_costs = true,
                      .offered_channels = *n_channels};
  /* 2.31 and newer first estimate costs for a comparison with other kernels: this does not settle what runs */
  if (n_pipe_ops <= 0) ZT_BUMP(communicator->n_estimates);
  if (__builtin_expect(communicator->next_tuner != NULL, 0)) {
    decide_after_next(communicator, asked, &table, n_channels);
  } else if (n_pipe_ops > 0) {
    zt_choice choice;
    (void)decide(communicator, &asked, &table, n_channels, &choice);
  }
  return NCCL_SUCCESS;
}

static nccl_result coll_info_v3(void *context, int collective, size_t n_bytes, int n_pipe_ops, float **costs,
                                int n_algorithms, int n_protocols, int *n_channels) {
  return coll_info_v4(context, collective, n_bytes, n_pipe_ops, costs, n_algorithms, n_protocols, 0, n_channels);
}

/* ---- v2: NCCL 2.21 does not check answers ---- */

/* It asks once for a fused run, with the sum of its bytes, for the cell. Then it asks for each call of the run, for
 * channels only. */
static bool is_member_of_fused_run(zt_communicator *communicator, const call *asked, int *n_channels) {
  if (asked->collective >= NCCL_N_COLLECTIVES || asked->message_bytes == 0) return false;
  zt_fused_run *run = &communicator->runs[asked->collective];
  if (asked->message_bytes > run->bytes_left) return false;
  run->bytes_left -= asked->message_bytes;
  if (run->n_channels > 0)
    *n_channels = run->n_channels;
  else if (run->is_row_cell)
    *n_channels = asked->offered_channels;
  return true;
}

/* Only cells of every fabric count as legal: ring and (all_reduce) tree with LL and Simple. LL128 corrupts data if
 * links split 128-byte stores, and v2 does not report whether they do. */
static nccl_result coll_info_v2(void *context, int collective, size_t n_bytes, int collnet_support,
                                int nvls_support, int n_pipe_ops, int *algorithm, int *protocol, int *n_channels) {
  if (context == NULL || algorithm == NULL || protocol == NULL || n_channels == NULL) return NCCL_SUCCESS;
  zt_communicator *communicator = context;
  const call asked = {.collective = (uint32_t)collective,
                      .message_bytes = n_bytes,
                      .n_pipe_ops = n_pipe_ops,
                      .in_network = collnet_support != 0 || nvls_support != 0,
                      .offered_channels = *n_channels};
  if (communicator->next_tuner != NULL) {
    const zt_question question = {collective, n_bytes, n_pipe_ops, 0};
    zt_next_tuner_ask_v2(communicator, &question, collnet_support, nvls_support, algorithm, protocol, n_channels);
  }
  if (is_member_of_fused_run(communicator, &asked, n_channels)) return NCCL_SUCCESS;
  const float tree = collective == NCCL_ALL_REDUCE ? 1.0f : -1.0f;
  float cells[2 * NCCL_N_PROTOCOLS] = {tree, -1.0f, tree, 1.0f, -1.0f, 1.0f};
  const zt_cost_table table = {cells, 2, NCCL_N_PROTOCOLS};
  zt_choice choice;
  const bool matched = decide(communicator, &asked, &table, n_channels, &choice);
  const bool is_row_cell = matched && choice.algorithm != ZT_NO_OPINION;
  if (is_row_cell) {
    *algorithm = choice.algorithm;
    *protocol = choice.protocol;
  }
  if (collective >= 0 && collective < NCCL_N_COLLECTIVES)
    communicator->runs[collective] = (zt_fused_run){n_bytes, matched ? *n_channels : 0, is_row_cell};
  return NCCL_SUCCESS;
}

/* ---- v6 and v7 ---- */

static nccl_result chunk_size(void *context, int collective, size_t n_bytes, int algorithm, int protocol,
                              int n_channels, size_t *chunk_bytes) {
  zt_communicator *communicator = context;
  if (communicator == NULL || chunk_bytes == NULL) return NCCL_SUCCESS;
  if (communicator->next_tuner != NULL && communicator->next_tuner->get_chunk_size != NULL) {
    const zt_question question = {.collective = collective, .n_bytes = n_bytes};
    zt_next_tuner_chunk(communicator, &question, algorithm, protocol, n_channels, chunk_bytes);
  }
  const size_t plan_bytes =
      communicator->chunks.is_enabled
          ? zt_chunk_bytes(&communicator->chunks, (uint32_t)collective, (uint32_t)algorithm, (uint32_t)protocol)
          : 0;
  if (plan_bytes > 0) *chunk_bytes = plan_bytes;
  return NCCL_SUCCESS;
}

/* ---- init and finalize ---- */

static _Atomic uint32_t abi_in_use;

uint32_t zerotune_tuner_abi(void) { return atomic_load_explicit(&abi_in_use, memory_order_relaxed); }

/* Not constant: if get_chunk_size is NULL, NCCL does not call it. NCCL may read it after each init or at each call, so
 * it is set before the first communicator and never changed. */
EXPORT nccl_tuner_v6 ncclTunerPlugin_v6, ncclTunerPlugin_v7;

static _Atomic uint32_t is_wanted;
static _Atomic bool asks_for_chunks;

void zerotune_ask_chunk_sizes(uint32_t on) { atomic_store(&is_wanted, on); }

uint32_t zerotune_asks_chunk_sizes(void) { return atomic_load(&asks_for_chunks); }

static void offer_chunk_size(const zt_next_tuner *next) {
  const bool plan_sets_chunks = atomic_load(&is_wanted) != 0;
  atomic_store(&asks_for_chunks, plan_sets_chunks);
  const bool is_offered = plan_sets_chunks || (next != NULL && next->get_chunk_size != NULL);
  ncclTunerPlugin_v6.get_chunk_size = ncclTunerPlugin_v7.get_chunk_size = is_offered ? chunk_size : NULL;
}

static nccl_result attach(const zt_tuner_start *start, void **context) {
  zt_records_prepare();
  zt_communicator *communicator =
      zt_attach(ZT_TUNER, start->comm_id, start->n_ranks, start->n_nodes, ZT_RANK_UNKNOWN);
  *context = communicator;
  const zt_next_tuner *next = communicator != NULL ? zt_next_tuner_find(start->abi, offer_chunk_size) : NULL;
  if (next != NULL) zt_next_tuner_init(next, communicator, start);
  if (communicator != NULL) communicator->chunks.is_enabled = start->abi >= 6 && zerotune_asks_chunk_sizes();
  atomic_store(&abi_in_use, (uint32_t)start->abi); /* last: its readers can read the next tuner's name, too */
  return NCCL_SUCCESS;
}

#define INIT_NAMELESS(version)                                                                                     \
  static nccl_result init_v##version(size_t n_ranks, size_t n_nodes, nccl_logger log, void **context) {            \
    return attach(&(zt_tuner_start){.abi = version, .n_ranks = n_ranks, .n_nodes = n_nodes, .log = log}, context); \
  }

INIT_NAMELESS(3)
INIT_NAMELESS(4)

static nccl_result init_v2(size_t n_ranks, size_t n_nodes, nccl_logger log, void **context) {
  const nccl_result result =
      attach(&(zt_tuner_start){.abi = 2, .n_ranks = n_ranks, .n_nodes = n_nodes, .log = log}, context);
  zt_communicator *communicator = *context;
  if (communicator != NULL) communicator->leave_alone = getenv("NCCL_ALGO") != NULL || getenv("NCCL_PROTO") != NULL;
  return result;
}

#define INIT_WITH_CONSTANTS(version)                                                                             \
  static nccl_result init_v##version(void **context, uint64_t comm_id, size_t n_ranks, size_t n_nodes,           \
                                     nccl_logger log, nccl_nvl_domain_info *domain,                              \
                                     nccl_tuner_constants *constants) {                                          \
    return attach(&(zt_tuner_start){version, comm_id, n_ranks, n_nodes, log, domain, constants}, context);       \
  }

INIT_WITH_CONSTANTS(5)
INIT_WITH_CONSTANTS(6)
INIT_WITH_CONSTANTS(7)

static nccl_result finalize(void *context) {
  if (context == NULL) return NCCL_SUCCESS;
  zt_agreed_end(&((zt_communicator *)context)->agreed);
  zt_shifts_wait(context); /* here, since NCCL finalizes the tuner before the profiler */
  zt_next_tuner_end(context);
  zt_detach(context, ZT_TUNER);
  return NCCL_SUCCESS;
}

EXPORT const nccl_tuner_v2 ncclTunerPlugin_v2 = {"zerotune", init_v2, coll_info_v2, finalize};
EXPORT const nccl_tuner_v3 ncclTunerPlugin_v3 = {"zerotune", init_v3, coll_info_v3, finalize};
EXPORT const nccl_tuner_v4 ncclTunerPlugin_v4 = {"zerotune", init_v4, coll_info_v4, finalize};
EXPORT const nccl_tuner_v5 ncclTunerPlugin_v5 = {"zerotune", init_v5, coll_info_v4, finalize};
EXPORT nccl_tuner_v6 ncclTunerPlugin_v6 = {"zerotune", init_v6, coll_info_v4, finalize, NULL};
EXPORT nccl_tuner_v6 ncclTunerPlugin_v7 = {"zerotune", init_v7, coll_info_v4, finalize, NULL};

uint32_t zerotune_size_class(uint64_t message_bytes) { return message_bytes == 0 ? 0 : zt_size_class(message_bytes); }
