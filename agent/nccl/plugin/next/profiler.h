/* The next profiler: another one in the same process, which gets the events that it asks for.
 *
 * NCCL loads only one profiler. zerotune's keeps both contexts, joins the event masks, and passes events on as NCCL
 * would. Errors of the next profiler are counted and not returned to NCCL.
 */
#ifndef ZEROTUNE_NEXT_PROFILER_H
#define ZEROTUNE_NEXT_PROFILER_H

#include <stdbool.h>

#include "../nccl_abi.h"
#include "../tuner/communicator.h"

bool zt_has_next_profiler(void);

/* NCCL's arguments for a new communicator; 0 = not in this version. */
typedef struct {
  int abi;
  int *mask; /* NCCL's */
  uint64_t comm_id;
  const char *comm_name;
  int n_nodes, n_ranks, rank;
  nccl_logger log;
} zt_profiler_start;

/* NCCL's context of a communicator if there is a next profiler. Atomic: events may come after its end. */
typedef struct {
  _Atomic(zt_communicator *) communicator; /* NULL = free */
  _Atomic(void *) context;                 /* the next profiler's */
  _Atomic(const int *) mask;               /* the events that it asks for; NULL = its init failed */
} zt_both_contexts;

/* Open the next profiler, unless this was done already, and initialise it for a communicator. Returns NCCL's context:
 * `communicator` itself if there is no next profiler, NULL if there is no room. */
void *zt_next_profiler_init(zt_communicator *communicator, const zt_profiler_start *start);
/* Finalize the next profiler's part of NCCL's context. */
zt_communicator *zt_next_profiler_end(void *nccl_context);

/* NULL = not of this process: NCCL passes contexts of other processes, whose proxies run here. */
zt_both_contexts *zt_both_contexts_of(void *nccl_context);

/* The next profiler's handle, NULL if it returns none or is not asked. `event` has version `abi`. */
void *zt_next_profiler_begin(int abi, const zt_both_contexts *both, void *nccl_context, void *event, uint64_t type);
void zt_next_profiler_stop(void *next_handle);
void zt_next_profiler_record(void *next_handle, int state, nccl_event_state_args *args);

uint64_t zt_next_profiler_faults(void);
void zt_next_profiler_forget(void); /* for tests, when there is no communicator */

#endif
