/* Handles of events that two profilers follow.
 *
 * NCCL keeps one handle per event and passes it as the parent of other events. For an event that only the next profiler
 * follows, NCCL gets that profiler's handle. If zerotune's profiler follows it, too, NCCL gets the number of a pair of
 * handles, with a mark that no address has. The pairs are a ring: a number is invalid after N_PAIRS newer ones. Handles
 * of the next profiler need not be unique.
 */
#ifndef ZEROTUNE_NEXT_HANDLES_H
#define ZEROTUNE_NEXT_HANDLES_H

#include "../profiler/events.h"

typedef struct {
  void *next_handle;    /* the next profiler's; NULL = it does not follow the event */
  zt_handle own_handle; /* zerotune's; 0 = it does not follow the event, or the number is invalid */
} zt_pair;

void *zt_handle_of_pair(zt_pair pair); /* for NCCL */
zt_pair zt_pair_of_handle(const void *handle);

#endif
