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

typedef struct {
  uint32_t epoch;
  uint8_t phase;
  bool found; /* the rest is of the row that was found */
  uint8_t algorithm;
  uint8_t protocol;
  uint8_t n_channels;
} zt_choice;

zt_choice zt_plan_lookup(uint32_t class_index, uint32_t collective, uint64_t message_bytes, uint32_t phase_or_region);
void zt_plan_reset(void);

#endif
