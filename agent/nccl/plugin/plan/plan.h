/* The plan: two tables, one read by getCollInfo, the other free to be rebuilt.
 *
 * A lookup is three dependent loads for any number of rows: (class, collective, phase) gives a group of rows, (group,
 * octave of the message) a short slice of rows, and a branchless binary search the row. It depends on its arguments and
 * the active table only.
 *
 * Readers never write, so they scale. Each table has a version that is odd while it is rebuilt. If a slow reader's
 * table becomes inactive and is rebuilt, the reader sees another version and starts over with the active table. All
 * members are atomics, and loads acquire (free on x86), so that no torn row is ever used.
 */
#ifndef ZEROTUNE_PLAN_H
#define ZEROTUNE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "../zerotune_plugin.h"

typedef struct {
  uint32_t epoch;
  uint8_t phase;
  bool found; /* the members below are valid */
  uint8_t algorithm;
  uint8_t protocol;
  uint8_t n_channels;
  uint16_t chunk_kib;
} zt_choice;

typedef struct zt_plan_table zt_plan_table;

/* Looks up the plan of the whole process, which sweeps and tests load; the phase is Python's latest. */
zt_choice zt_plan_lookup(uint32_t class_index, uint32_t collective, uint64_t message_bytes, uint32_t phase_or_region);
void zt_plan_reset(void);

/* Looks up a table of a communicator's schedule, which never changes. `phase` follows from the communicator's history;
 * ZT_NO_PHASE = unknown: only rows of any phase apply. */
void zt_plan_look_up(const zt_plan_table *table, uint32_t class_index, uint32_t collective, uint64_t message_bytes,
                     uint32_t phase, zt_choice *choice);
/* A choice with the epoch and the phase for records, Python's latest. */
zt_choice zt_plan_epoch_and_phase(const zt_plan_table *table, uint32_t collective, uint32_t phase_or_region);
/* On failure NULL, and one of zerotune_plan_load's codes, or -6: out of memory. Holding and releasing need the
 * registry's lock. */
zt_plan_table *zt_plan_table_new(const zt_plan_row *rows, uint32_t n_rows, uint32_t epoch, uint32_t gathers_after_step,
                                 int *fault);
zt_plan_table *zt_plan_table_retain(zt_plan_table *table);
void zt_plan_table_release(zt_plan_table *table);

#endif
