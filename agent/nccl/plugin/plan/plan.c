#include "plan.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../nccl_abi.h"
#include "../tuner/chunks.h"
#include "../zerotune_plugin.h"
#include "classes.h"
#include "shared_state.h"

#define N_PHASES 5u
#define ANY_PHASE 7u /* of the eight groups that a collective has */

typedef struct {
  _Atomic uint64_t min_bytes;
  _Atomic uint64_t max_bytes;
  _Atomic uint64_t candidate; /* algorithm | protocol << 8 | n_channels << 16 | chunk_kib << 32 */
} table_row;

struct zt_plan_table {
  _Alignas(64) _Atomic uint32_t version; /* odd = being rebuilt */
  uint32_t n_references;                     /* references by schedules, under the registry's lock */
  _Atomic uint32_t epoch;
  _Atomic uint32_t gathers_after_step;
  _Atomic uint16_t group[ZT_MAX_CLASSES][8][8]; /* [class][collective][phase]: 1 + group, 0 = no rows */
  _Atomic uint32_t slice[ZT_MAX_PLAN_ROWS][64];   /* [group][octave]: first row << 16 | number of rows */
  table_row rows[ZT_MAX_PLAN_ROWS];             /* by group, then by bytes */
};

static zt_plan_table tables[2];

/* bit 0: the active table; bit 1: the inactive table is loaded, with its epoch in the upper half */
static _Atomic uint64_t plan_state;
#define STAGED 2u

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER; /* between loaders only */
static zt_plan_row scratch[ZT_MAX_PLAN_ROWS];               /* the loader's */

#define GET(cell) atomic_load_explicit(&(cell), memory_order_acquire)
#define PUT(cell, value) atomic_store_explicit(&(cell), (value), memory_order_release)

static uint32_t octave_of(uint64_t bytes) { return 63u - (uint32_t)__builtin_clzll(bytes); }

/* ---- reading ---- */

/* Last row of the slice that starts at or below `bytes`. Values may be torn while the table is rebuilt:
 * masks keep indices inside the table, and the version check discards the result. */
static const table_row *row_at(const zt_plan_table *table, uint32_t slice, uint64_t bytes) {
  uint32_t first = slice >> 16, count = slice & 0xFFFFu;
  while (count > 1) {
    const uint32_t half = count / 2;
    const bool upper = GET(table->rows[(first + half) % ZT_MAX_PLAN_ROWS].min_bytes) <= bytes;
    first += upper ? half : 0;
    count -= half;
  }
  return &table->rows[first % ZT_MAX_PLAN_ROWS];
}

/* Rows of any phase are those of group ANY_PHASE. */
static const table_row *row_of(const zt_plan_table *table, uint32_t class_index, uint32_t collective, uint32_t phase,
                               uint64_t bytes) {
  const uint32_t group = GET(table->group[class_index][collective][phase]);
  if (group == 0) return NULL;
  const uint32_t slice = GET(table->slice[(group - 1) % ZT_MAX_PLAN_ROWS][octave_of(bytes)]);
  if ((slice & 0xFFFFu) == 0) return NULL;
  const table_row *row = row_at(table, slice, bytes);
  return GET(row->min_bytes) > bytes || GET(row->max_bytes) < bytes ? NULL : row;
}

void zt_plan_look_up(const zt_plan_table *table, uint32_t class_index, uint32_t collective, uint64_t bytes,
                     uint32_t phase, zt_choice *choice) {
  if (class_index >= ZT_MAX_CLASSES || collective >= NCCL_N_COLLECTIVES || bytes == 0) return;
  const table_row *row = phase < N_PHASES ? row_of(table, class_index, collective, phase, bytes) : NULL;
  if (row == NULL) row = row_of(table, class_index, collective, ANY_PHASE, bytes);
  if (row == NULL) return;
  const uint64_t candidate = GET(row->candidate);
  choice->found = true;
  choice->algorithm = (uint8_t)candidate;
  choice->protocol = (uint8_t)(candidate >> 8);
  choice->n_channels = (uint8_t)(candidate >> 16);
  choice->chunk_kib = (uint16_t)(candidate >> 32);
}

zt_choice zt_plan_epoch_and_phase(const zt_plan_table *table, uint32_t collective, uint32_t phase_or_region) {
  return (zt_choice){.epoch = GET(table->epoch),
                     .phase = zt_phase(phase_or_region, collective, GET(table->gathers_after_step) != 0)};
}

zt_choice zt_plan_lookup(uint32_t class_index, uint32_t collective, uint64_t message_bytes, uint32_t phase_or_region) {
  for (;;) {
    const zt_plan_table *table = &tables[GET(plan_state) & 1u];
    const uint32_t version = GET(table->version);
    zt_choice choice = zt_plan_epoch_and_phase(table, collective, phase_or_region);
    zt_plan_look_up(table, class_index, collective, message_bytes, choice.phase, &choice);
    if (version % 2 == 0 && GET(table->version) == version) return choice;
  }
}

/* ---- loading ---- */

/* Cells that NCCL has for a collective, by algorithm * 3 + protocol; this fabric's are in the cost table. */
static uint32_t legal_cells(uint32_t collective) {
#define CELL(algorithm, protocol) (1u << ((algorithm) * NCCL_N_PROTOCOLS + (protocol)))
#define EVERY_PROTOCOL(algorithm) (7u << ((algorithm) * NCCL_N_PROTOCOLS))
  const uint32_t ring = EVERY_PROTOCOL(NCCL_RING);
  const uint32_t in_network = CELL(NCCL_COLLNET_DIRECT, NCCL_SIMPLE) | CELL(NCCL_NVLS, NCCL_SIMPLE);
  switch (collective) {
  case NCCL_ALL_GATHER:
  case NCCL_REDUCE_SCATTER:
    return ring | in_network | CELL(NCCL_PAT, NCCL_SIMPLE);
  case NCCL_ALL_REDUCE:
    return ring | in_network | EVERY_PROTOCOL(NCCL_TREE) | CELL(NCCL_COLLNET_CHAIN, NCCL_SIMPLE) |
           CELL(NCCL_NVLS_TREE, NCCL_SIMPLE);
  default:
    return ring;
  }
#undef CELL
#undef EVERY_PROTOCOL
}

/* In-network algorithms keep NCCL's own size: NCCL caps a tuner's size to other buffers than theirs. */
static bool is_legal_chunk(const zt_plan_row *row) {
  if (row->chunk_kib == 0) return true;
  const bool takes_it = row->algorithm == ZT_NO_OPINION || zt_takes_chunk_size(row->algorithm);
  return takes_it && row->chunk_kib >= ZT_MIN_CHUNK_KIB && row->chunk_kib <= ZT_MAX_CHUNK_KIB;
}

int zerotune_plan_row_is_legal(const zt_plan_row *row) {
  if (row->n_ranks == 0 || row->n_nodes == 0 || row->n_nodes > row->n_ranks) return 0;
  if (row->collective >= NCCL_N_COLLECTIVES || (row->phase >= N_PHASES && row->phase != ZT_ANY_PHASE)) return 0;
  if (row->max_bytes == 0 || row->min_bytes > row->max_bytes || row->n_channels > NCCL_MAX_CHANNELS) return 0;
  if (!is_legal_chunk(row)) return 0;
  if (row->algorithm == ZT_NO_OPINION || row->protocol == ZT_NO_OPINION) return row->algorithm == row->protocol;
  if (row->algorithm >= NCCL_MAX_ALGORITHMS || row->protocol >= NCCL_N_PROTOCOLS) return 0;
  return (legal_cells(row->collective) >> (row->algorithm * NCCL_N_PROTOCOLS + row->protocol)) & 1u;
}

static bool same_group(const zt_plan_row *a, const zt_plan_row *b) {
  return a->n_ranks == b->n_ranks && a->n_nodes == b->n_nodes && a->collective == b->collective &&
         a->phase == b->phase;
}

static int compare(uint64_t a, uint64_t b) { return (a > b) - (a < b); }

static int by_group_then_bytes(const void *left, const void *right) {
  const zt_plan_row *a = left, *b = right;
  int order = compare((uint64_t)a->n_ranks << 32 | a->n_nodes, (uint64_t)b->n_ranks << 32 | b->n_nodes);
  if (order == 0) order = compare(a->collective, b->collective);
  if (order == 0) order = compare(a->phase, b->phase);
  return order != 0 ? order : compare(a->min_bytes, b->min_bytes);
}

/* Copy to scratch, sorted; the result codes are zerotune_plan_load's. */
static int check_and_sort(const zt_plan_row *rows, uint32_t n_rows) {
  if (n_rows > ZT_MAX_PLAN_ROWS) return -1;
  for (uint32_t i = 0; i < n_rows; i++)
    if (!zerotune_plan_row_is_legal(&rows[i])) return -3;
  if (n_rows > 0) memcpy(scratch, rows, n_rows * sizeof *rows);
  for (uint32_t i = 0; i < n_rows; i++)
    if (zt_class_of(scratch[i].n_ranks, scratch[i].n_nodes) == NULL) return -4;
  qsort(scratch, n_rows, sizeof *scratch, by_group_then_bytes);
  for (uint32_t i = 1; i < n_rows; i++)
    if (same_group(&scratch[i - 1], &scratch[i]) && scratch[i].min_bytes <= scratch[i - 1].max_bytes) return -2;
  return 0;
}

/* Rows [first, end) of scratch, all of one group, into the table as group number `group`. */
static void write_group(zt_plan_table *table, uint32_t group, uint32_t first, uint32_t end) {
  const zt_plan_row *head = &scratch[first];
  for (uint32_t octave = 0; octave < 64; octave++) {
    const uint64_t floor = UINT64_C(1) << octave, ceiling = floor + (floor - 1);
    while (first < end && scratch[first].max_bytes < floor) first++;
    uint32_t count = 0;
    while (first + count < end && scratch[first + count].min_bytes <= ceiling) count++;
    PUT(table->slice[group][octave], count == 0 ? 0 : first << 16 | count);
  }
  const uint32_t class_index = zt_class_index(zt_class_of(head->n_ranks, head->n_nodes));
  const uint32_t phase = head->phase == ZT_ANY_PHASE ? ANY_PHASE : head->phase;
  PUT(table->group[class_index][head->collective][phase], (uint16_t)(group + 1));
}

static void write_table(zt_plan_table *table, uint32_t n_rows, uint32_t epoch, uint32_t gathers_after_step) {
  const uint32_t version = atomic_load_explicit(&table->version, memory_order_relaxed);
  PUT(table->version, version + 1);
  PUT(table->epoch, epoch);
  PUT(table->gathers_after_step, gathers_after_step != 0);
  for (uint32_t i = 0; i < ZT_MAX_CLASSES * 64; i++) PUT((&table->group[0][0][0])[i], 0);
  for (uint32_t i = 0; i < n_rows; i++) {
    PUT(table->rows[i].min_bytes, scratch[i].min_bytes);
    PUT(table->rows[i].max_bytes, scratch[i].max_bytes);
    PUT(table->rows[i].candidate, (uint64_t)scratch[i].algorithm | (uint64_t)scratch[i].protocol << 8 |
                                      (uint64_t)scratch[i].n_channels << 16 | (uint64_t)scratch[i].chunk_kib << 32);
  }
  for (uint32_t first = 0, end, group = 0; first < n_rows; first = end, group++) {
    for (end = first + 1; end < n_rows && same_group(&scratch[first], &scratch[end]);) end++;
    write_group(table, group, first, end);
  }
  PUT(table->version, version + 2);
}

zt_plan_table *zt_plan_table_new(const zt_plan_row *rows, uint32_t n_rows, uint32_t epoch, uint32_t gathers_after_step,
                                 int *fault) {
  zt_plan_table *table = NULL;
  pthread_mutex_lock(&loading);
  *fault = check_and_sort(rows, n_rows);
  if (*fault == 0) {
    table = aligned_alloc(64, (sizeof *table + 63) / 64 * 64);
    *fault = table == NULL ? -6 : 0;
  }
  if (table != NULL) {
    atomic_init(&table->version, 0);
    table->n_references = 1;
    write_table(table, n_rows, epoch, gathers_after_step);
  }
  pthread_mutex_unlock(&loading);
  return table;
}

zt_plan_table *zt_plan_table_retain(zt_plan_table *table) {
  table->n_references++;
  return table;
}

void zt_plan_table_release(zt_plan_table *table) {
  if (--table->n_references == 0) free(table);
}

int zerotune_plan_load(const zt_plan_row *rows, uint32_t n_rows, uint32_t epoch, uint32_t gathers_after_step) {
  pthread_mutex_lock(&loading);
  const int fault = check_and_sort(rows, n_rows);
  if (fault == 0) {
    /* No flip can succeed until the end: the inactive table belongs to this thread. */
    const uint64_t state = atomic_fetch_and(&plan_state, 1u) & 1u;
    write_table(&tables[1u - state], n_rows, epoch, gathers_after_step);
    atomic_store(&plan_state, (uint64_t)epoch << 32 | STAGED | state);
  }
  pthread_mutex_unlock(&loading);
  return fault;
}

int zerotune_plan_flip(uint32_t epoch) {
  uint64_t state = atomic_load(&plan_state);
  if (!(state & STAGED) || state >> 32 != epoch) return -1;
  return atomic_compare_exchange_strong(&plan_state, &state, 1u - (state & 1u)) ? 0 : -1;
}

void zt_plan_reset(void) {
  (void)zerotune_plan_load(NULL, 0, 0, 0);
  (void)zerotune_plan_flip(0);
}
