/* Handles of events that two profilers follow.
 *
 * NCCL keeps one handle per event and names it as the parent of others. Of an event that only the other follows it
 * gets the other's, unchanged. Where ours follows it, too, it gets the number of a pair, marked as no address ever is;
 * the pairs are a ring, so that a number is forgotten when N_PAIRS newer ones were given out. What the other gives as
 * handles is its own affair: they need not differ.
 */
#ifndef ZEROTUNE_NEXT_HANDLES_H
#define ZEROTUNE_NEXT_HANDLES_H

#include "../profiler/events.h"

typedef struct {
  void *theirs;   /* NULL = they do not follow it */
  zt_handle ours; /* 0 = we do not, or no longer know */
} zt_pair;

void *zt_handle_of_pair(zt_pair pair); /* for NCCL */
zt_pair zt_pair_of_handle(const void *handle);

#endif
