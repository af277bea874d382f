/* NCCL's cost table: contiguous despite its type, float**; negative = IGNORE. Read only if zt_has_table_size(). */
#ifndef ZEROTUNE_COSTS_H
#define ZEROTUNE_COSTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../nccl_abi.h"

#define ZT_MAX_CELLS (NCCL_TABLE_ALGORITHMS * NCCL_TABLE_PROTOCOLS)

typedef struct {
  float *cost_us;
  int n_algorithms;
  int n_protocols;
} zt_cost_table;

static inline bool zt_has_table_size(const zt_cost_table *table) {
  return table->n_algorithms > 0 && table->n_algorithms <= NCCL_TABLE_ALGORITHMS && table->n_protocols > 0 &&
         table->n_protocols <= NCCL_TABLE_PROTOCOLS;
}

static inline float *zt_cell_of(const zt_cost_table *table, uint32_t algorithm, uint32_t protocol) {
  if (algorithm >= (uint32_t)table->n_algorithms || protocol >= (uint32_t)table->n_protocols) return NULL;
  return &table->cost_us[algorithm * (uint32_t)table->n_protocols + protocol];
}

/* false for NaN, too */
static inline bool zt_is_legal(const float *cell) { return cell != NULL && *cell >= 0.0f; }

#endif
