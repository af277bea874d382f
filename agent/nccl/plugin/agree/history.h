/* A communicator's own history of calls, which is equal on all of its ranks: NCCL requires the same calls on each.
 *
 * The thread that calls the communicator writes it; any other thread may read it. `step` and the fields derived from it
 * are this rank's own: they only help to begin changes where steps begin. */
#ifndef ZEROTUNE_HISTORY_H
#define ZEROTUNE_HISTORY_H

#include <stdatomic.h>
#include <stdint.h>

#include "../zerotune_plugin.h"

#define ZT_LOGGED_CALLS 8192u /* power of two; a cycle is known only if two steps fit */

typedef struct {
  _Atomic uint64_t message_bytes;
  _Atomic uint32_t collective;
  _Atomic uint32_t phase_or_region; /* Python's at the call */
} zt_logged_call;

typedef struct {
  _Atomic uint64_t n_calls;
  _Atomic uint64_t hash;
  _Atomic uint64_t checkpoint_calls[ZT_N_CHECKPOINTS], checkpoint_hash[ZT_N_CHECKPOINTS];
  uint32_t n_checkpoints;
  _Atomic uint32_t step;
  _Atomic uint64_t step_began;     /* number of the first call in the step */
  _Atomic uint64_t calls_per_step; /* in the last whole step; 0 = there was none */
  _Atomic uint32_t n_steady;       /* whole steps in a row with calls_per_step calls */
  _Atomic uint32_t n_steps;
  zt_logged_call log[ZT_LOGGED_CALLS];
} zt_history;

/* Counts the call and returns its number, from 1. */
uint64_t zt_history_add(zt_history *history, uint32_t collective, uint64_t message_bytes);
void zt_history_describe(zt_history *history, zt_communicator_state *out);
/* The calls of the last whole step, if the step before it had the same calls; returns their number, else 0. */
uint32_t zt_history_cycle(zt_history *history, uint32_t gathers_after_step, zt_cycle_call *out, uint32_t max_calls);
void zt_history_forget(zt_history *history);

#endif
