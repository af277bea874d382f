/* Another profiler in the same process: it is told what it asked for, and so is ours.
 *
 * NCCL has one place for a profiler, too. Contexts are kept apart, event masks are joined, events are handed to the
 * other as NCCL would. Its errors are counted and NCCL never sees them.
 */
#ifndef ZEROTUNE_NEXT_PROFILER_H
#define ZEROTUNE_NEXT_PROFILER_H

#include <stdbool.h>

#include "../nccl_abi.h"
#include "../tuner/communicator.h"

/* Whether there is one. */
bool zt_has_next_profiler(void);

/* What NCCL says when it makes a communicator; what its version does not say is 0. */
typedef struct {
  int abi;
  int *mask; /* NCCL's */
  uint64_t comm_id;
  const char *comm_name;
  int n_nodes, n_ranks, rank;
  nccl_logger log;
} zt_profiler_start;

/* Beside another profiler this is what NCCL gets for a communicator. Atomic: events may come when it is gone. */
typedef struct {
  _Atomic(zt_communicator *) communicator; /* ours; NULL = free */
  _Atomic(void *) context;                 /* theirs */
  _Atomic(const int *) mask;               /* what they ask for; NULL = their init failed */
} zt_both;

/* Open the other library if this was not done yet, and tell it of a communicator. Returns what to hand NCCL:
 * `communicator` itself where there is no other, NULL where there is no room. */
void *zt_next_profiler_init(zt_communicator *communicator, const zt_profiler_start *start);
/* Ours of what was handed to NCCL, whose end the other is told. */
zt_communicator *zt_next_profiler_end(void *handed);

/* NULL: not of this process. NCCL names the contexts of other processes, whose proxies run here. */
zt_both *zt_both_of(void *handed);

/* The other's handle, NULL where it has none or is not asked. `event` is of version `abi`. */
void *zt_next_profiler_begin(int abi, const zt_both *both, void *handed, void *event, uint64_t type);
void zt_next_profiler_stop(void *theirs);
void zt_next_profiler_record(void *theirs, int state, nccl_event_state_args *args);

uint64_t zt_next_profiler_faults(void);
void zt_next_profiler_forget(void); /* for tests, where no communicator is left */

#endif
