/* The plan under which a communicator's calls run: a schedule of stages by call number, the last of which stays.
 *
 * Python's agreement thread prepares a change, promises a call number, and then commits or releases. Calls from that
 * number on wait until the outcome is known. The thread that calls the communicator compares numbers and switches by
 * itself. It waits only if it reaches the promised call before the outcome. It releases Python's GIL meanwhile, which
 * the agreement thread needs.
 *
 * Schedules are never changed, only replaced. An old one is freed after the last call that may read it has ended. */
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
  _Atomic uint64_t n_decided; /* calls that have been decided */
  _Atomic uint64_t promise;   /* calls from this number on wait until the outcome is known */
  _Atomic(zt_schedule *) schedule; /* NULL = the plan of the whole process */
  zt_schedule *retired;            /* under the registry's lock */
  _Atomic uint32_t epoch;          /* of the latest call */
  _Atomic bool is_over;            /* the communicator is being destroyed: it has no more calls */
  zt_cycle_position place;
  _Atomic uint32_t n_off_cycle;
} zt_agreed;

/* The plan and the phase of a call. */
typedef struct {
  const zt_plan_table *table; /* NULL = the plan of the whole process */
  uint32_t phase;             /* by the communicator's history; ZT_NO_PHASE = unknown */
  bool is_off_cycle;          /* the plan has rows by phase, and this call's phase is unknown */
} zt_call_plan;

void zt_agreed_init(zt_agreed *agreed);
/* Counts the call. Waits if the call is promised and the outcome unknown. */
zt_call_plan zt_call_begin(zt_agreed *agreed, uint32_t collective, uint64_t message_bytes);
void zt_call_end(zt_agreed *agreed);
/* Before a communicator is destroyed, perhaps aborted by another thread: ends the wait of a call, and lets it pass. */
void zt_agreed_end(zt_agreed *agreed);
void zt_agreed_free(zt_agreed *agreed); /* while no call is under way */
void zt_prepared_forget(void);

#endif
