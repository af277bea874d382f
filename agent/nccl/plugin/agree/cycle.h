/* The calls of one step, as the ranks agreed on them: which phase of the step is a call of?
 *
 * Where a communicator is in the cycle follows from its own history of calls alone, so that all ranks say the same.
 * In the ordinary case that takes one comparison per call. A call that does not fit leaves the cycle; the whole cycle
 * must then be seen once (Knuth, Morris and Pratt's automaton) before phases are known again. */
#ifndef ZEROTUNE_CYCLE_H
#define ZEROTUNE_CYCLE_H

#include <stdbool.h>
#include <stdint.h>

#include "../zerotune_plugin.h"

#define ZT_NO_PHASE 255u

typedef struct {
  uint32_t n_owners; /* under the registry's lock */
  uint32_t n_calls;
  zt_cycle_call *calls;
  uint32_t *borders; /* [i]: length of the longest proper prefix that ends calls[0..i] */
} zt_cycle;

typedef struct {
  const zt_cycle *cycle; /* NULL = none; every call is of no phase */
  uint32_t at;
  bool is_on;
} zt_cycle_place;

zt_cycle *zt_cycle_new(const zt_cycle_call *calls, uint32_t n_calls); /* NULL when out of memory */
bool zt_cycle_equals(const zt_cycle *cycle, const zt_cycle_call *calls, uint32_t n_calls);
void zt_cycle_release(zt_cycle *cycle);

/* Phase of the next call, ZT_NO_PHASE where the cycle does not say it. */
uint32_t zt_cycle_follow(zt_cycle_place *place, const zt_cycle *cycle, uint32_t collective, uint64_t message_bytes);

#endif
