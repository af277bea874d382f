/* Which plan a communicator runs under: a finite schedule over its call numbers that ends in a resting plan.
 *
 * Python's agreement thread prepares a change, promises not to let a call pass before the outcome is known, and then
 * commits or releases. The thread that calls the communicator compares numbers, and switches by itself. It waits here
 * only if it reaches the promised call first, and lets go of the interpreter's lock meanwhile, since the thread that
 * brings the outcome needs it.
 *
 * Schedules are never changed, only replaced. An old one is freed once the call that may still read it has ended. */
#ifndef ZEROTUNE_SCHEDULE_H
#define ZEROTUNE_SCHEDULE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../plan/plan.h"
#include "cycle.h"
#include "history.h"

typedef struct zt_schedule zt_schedule;

typedef struct {
  zt_history history;
  _Atomic uint64_t n_left;  /* calls that have been decided */
  _Atomic uint64_t promise; /* no call from here on passes before the outcome is known */
  _Atomic(zt_schedule *) schedule; /* NULL = the plan of the whole process */
  zt_schedule *retired;            /* under the registry's lock */
  _Atomic uint32_t epoch;          /* of the latest call */
  _Atomic bool is_over;            /* the communicator goes away: it has no more calls */
  zt_cycle_place place;
  _Atomic uint32_t n_off_cycle;
} zt_agreed;

/* What the next call runs under. Waits if the call was promised not to pass. */
typedef struct {
  const zt_plan_table *table; /* NULL = the plan of the whole process */
  uint32_t phase;             /* by the communicator's history; ZT_NO_PHASE = not known */
  bool is_off_cycle;          /* the plan tells phases apart, and this call's is not known */
} zt_turn;

void zt_agreed_init(zt_agreed *agreed);
zt_turn zt_turn_begin(zt_agreed *agreed, uint32_t collective, uint64_t message_bytes);
void zt_turn_end(zt_agreed *agreed);
/* The communicator goes away, perhaps aborted by another thread: a call that waits passes, and has passed afterwards. */
void zt_agreed_end(zt_agreed *agreed);
void zt_agreed_free(zt_agreed *agreed); /* no call is under way */
void zt_prepared_forget(void);

#endif
