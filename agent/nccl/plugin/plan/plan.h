/* The plan: two tables, one read by getCollInfo, the other free to be rebuilt.
 *
 * Lookup is three dependent loads whatever the number of rows: (class, collective, phase) gives a
 * group of rows, (group, octave of the message) a short run of rows, a branchless binary search the
 * row. It depends on nothing but its arguments and the active table.
 *
 * Readers never write, so any number of them scale. Each table has a version that is odd while it is
 * rebuilt; a reader that was held up long enough for the table it reads to become inactive and be
 * rebuilt sees the version changed and starts over on the active one. All cells are atomics, and
 * loads acquire (free on x86), so that no torn row is ever used.
 */
#ifndef ZEROTUNE_PLAN_H
#define ZEROTUNE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "../zerotune_plugin.h"

typedef struct {
  uint32_t epoch;
  uint8_t phase;
  bool found; /* the rest is of the row that was found */
  uint8_t algorithm;
  uint8_t protocol;
  uint8_t n_channels;
  uint16_t chunk_kib;
} zt_choice;

typedef struct zt_plan_table zt_plan_table;

/* By the plan of the whole process, which sweeps and tests load and flip to: its phase is what Python said last. */
zt_choice zt_plan_lookup(uint32_t class_index, uint32_t collective, uint64_t message_bytes, uint32_t phase_or_region);
void zt_plan_reset(void);

/* By a table of its own, which never changes: how a communicator's agreed schedule reads it. `phase` follows from the
 * communicator's history; above the phases there are = not known, and only rows of any phase apply. */
void zt_plan_look_up(const zt_plan_table *table, uint32_t class_index, uint32_t collective, uint64_t message_bytes,
                     uint32_t phase, zt_choice *choice);
/* The epoch, and the phase that records carry: what Python said last. */
zt_choice zt_plan_words(const zt_plan_table *table, uint32_t collective, uint32_t phase_or_region);
/* NULL and one of zerotune_plan_load's codes, or -6: out of memory. Its owner releases it, under the registry's lock. */
zt_plan_table *zt_plan_table_new(const zt_plan_row *rows, uint32_t n_rows, uint32_t epoch, uint32_t gathers_after_step,
                                 int *fault);
zt_plan_table *zt_plan_table_hold(zt_plan_table *table);
void zt_plan_table_release(zt_plan_table *table);

#endif
