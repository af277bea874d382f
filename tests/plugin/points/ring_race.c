/* The ring alone under TSan: nothing but the slots' sequence numbers orders what producers write before what the
 * consumer reads, nor its reading before the next lap's writing. Any weaker order is a data race. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "records/ring.h"

#define N_SLOTS 8u
#define N_PRODUCERS 2u
#define N_RECORDS 2000u

typedef struct {
  uint64_t number, copies[7];
} record;

static struct {
  uint64_t sequence;
  record record;
} slots[N_SLOTS];
static zt_ring ring = {.draining = ATOMIC_FLAG_INIT};

static void *produce(void *argument) {
  const uint64_t first = (uint64_t)(uintptr_t)argument;
  for (uint64_t i = 0; i < N_RECORDS; i++) {
    record made = {.number = first + i};
    for (int c = 0; c < 7; c++) made.copies[c] = made.number;
    while (!zt_ring_push(&ring, slots, N_SLOTS, &made, sizeof made)) sched_yield();
  }
  return NULL;
}

int main(void) {
  pthread_t producers[N_PRODUCERS];
  for (uintptr_t p = 0; p < N_PRODUCERS; p++) pthread_create(&producers[p], NULL, produce, (void *)(p << 32));
  uint64_t next[N_PRODUCERS] = {0};
  for (uint64_t n_seen = 0; n_seen < N_PRODUCERS * N_RECORDS;) {
    record drained[4];
    const size_t n = zt_ring_drain(&ring, slots, N_SLOTS, drained, 4, sizeof drained[0]);
    for (size_t i = 0; i < n; i++) {
      const uint64_t producer = drained[i].number >> 32;
      if ((uint32_t)drained[i].number != next[producer]++) return fprintf(stderr, "out of order\n"), 1;
      for (int c = 0; c < 7; c++)
        if (drained[i].copies[c] != drained[i].number) return fprintf(stderr, "torn\n"), 1;
    }
    n_seen += n;
    if (n == 0) sched_yield();
  }
  for (unsigned p = 0; p < N_PRODUCERS; p++) pthread_join(producers[p], NULL);
  return 0;
}
