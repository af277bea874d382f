/* The cycle: the calls of one step with their phases, as the ranks agreed on them. It gives the phase of a call.
 *
 * A communicator's position in the cycle follows from its own history of calls alone, so that it is equal on all ranks.
 * Usually this takes one comparison per call. After a call that does not fit, phases are unknown until the whole cycle
 * has been seen once (Knuth, Morris and Pratt's automaton). */
#ifndef ZEROTUNE_CYCLE_H
#define ZEROTUNE_CYCLE_H

#include <stdbool.h>
#include <stdint.h>

#include "../zerotune_plugin.h"

#define ZT_NO_PHASE 255u

typedef struct {
  uint32_t n_references; /* under the registry's lock */
  uint32_t n_calls;
  zt_cycle_call *calls;
  uint32_t *borders; /* [i]: length of the longest proper prefix that ends calls[0..i] */
} zt_cycle;

typedef struct {
  const zt_cycle *cycle; /* NULL = none: no call has a phase */
  uint32_t at;
  bool is_on;
} zt_cycle_position;

zt_cycle *zt_cycle_new(const zt_cycle_call *calls, uint32_t n_calls); /* NULL when out of memory */
bool zt_cycle_equals(const zt_cycle *cycle, const zt_cycle_call *calls, uint32_t n_calls);
void zt_cycle_release(zt_cycle *cycle);

/* Phase of the next call; ZT_NO_PHASE = unknown. */
uint32_t zt_cycle_follow(zt_cycle_position *place, const zt_cycle *cycle, uint32_t collective, uint64_t message_bytes);

#endif
