/* The plan's tables at every point of their rebuilding: plan.c with each atomic access a point at which
 * another thread's step may come in between. All cells are atomics, so that TSan has nothing to say here.
 *
 * 1. A reader is held up at its k-th load; meanwhile the plan flips, and the table it reads is rebuilt up
 *    to the j-th store. Going on, it must answer from one plan.
 * 2. At the j-th store of a rebuilding, somebody flips to the plan that was loaded before: refused. */
#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static void at_load(void), at_store(void);
#undef atomic_load_explicit
#define atomic_load_explicit(cell, order) (at_load(), __atomic_load_n((cell), (order)))
#undef atomic_store_explicit
#define atomic_store_explicit(cell, value, order) (at_store(), __atomic_store_n((cell), (value), (order)))
#define pthread_mutex_lock(lock) ((void)(lock))
#define pthread_mutex_unlock(lock) ((void)(lock))

#include "plan/plan.c"

#define BYTES 1005u

static int loads_left = -1, stores_left = -1; /* until something comes in between; -1: nothing does */
static int n_loads, n_stores;                  /* done */
static void (*between)(void);
static jmp_buf held_up;

static void at_load(void) {
  n_loads++;
  if (loads_left >= 0 && loads_left-- == 0) between();
}

static void at_store(void) {
  n_stores++;
  if (stores_left >= 0 && stores_left-- == 0) between();
}

/* In the plan of epoch e every row is ring, protocol e % 3, e channels; each has other rows. */
static int load(uint32_t epoch) {
  zt_plan_row rows[6];
  for (uint32_t i = 0; i < 6; i++)
    rows[i] = (zt_plan_row){.min_bytes = 1000 + i * 10, .max_bytes = 1009 + i * 10, .n_ranks = 8, .n_nodes = 1,
                            .collective = 2, .algorithm = NCCL_RING, .protocol = epoch % 3,
                            .n_channels = (uint8_t)epoch};
  return zerotune_plan_load(rows, 1 + epoch % 6, epoch, 0);
}

static void demand(int condition, const char *what, int k, int j) {
  if (condition) return;
  fprintf(stderr, "%s, at load %d and store %d\n", what, k, j);
  exit(1);
}

static int rebuild_until;

static void leave(void) { longjmp(held_up, 1); }

/* Epoch 2 comes into force, and epoch 3 is being loaded where epoch 1, which the reader reads, was. */
static void overtake(void) {
  if (zerotune_plan_flip(2) != 0) exit(2);
  stores_left = rebuild_until;
  between = leave;
  if (setjmp(held_up) == 0) (void)load(3);
  stores_left = -1;
}

/* A rebuilding that was broken off for good leaves its mark; as if it had ended. */
static void mend(void) {
  for (int t = 0; t < 2; t++) tables[t].version += tables[t].version % 2;
}

/* Points in the long run of equal stores that clears a table are alike: of those, every 509th. */
static int next_store(int j, int last) { return j < 16 || j > last - 100 ? j + 1 : j + 509; }

static void check_reader(int last_load, int last_store, uint32_t class_index) {
  for (int k = 0; k < last_load; k++)
    for (int j = 0; j <= last_store; j = next_store(j, last_store)) {
      mend();
      if (load(1) != 0 || zerotune_plan_flip(1) != 0 || load(2) != 0) exit(2);
      rebuild_until = j;
      between = overtake;
      loads_left = k;
      const zt_choice choice = zt_plan_lookup(class_index, 2, BYTES, 0);
      loads_left = -1;
      const int is_one_plan = choice.found && choice.n_channels == choice.epoch && choice.protocol == choice.epoch % 3;
      demand(is_one_plan && (choice.epoch == 1 || choice.epoch == 2), "a lookup saw a plan that never was", k, j);
    }
}

static int n_flips_refused;

static void flip_to_old(void) { n_flips_refused += zerotune_plan_flip(1) != 0; }

static void check_loader(int last_store) {
  mend();
  for (int j = 0; j < last_store; j = next_store(j, last_store)) {
    zt_plan_reset();
    if (load(1) != 0) exit(2);
    n_flips_refused = 0;
    between = flip_to_old;
    stores_left = j;
    (void)load(2);
    stores_left = -1;
    demand(n_flips_refused == 1, "a plan came into force while its table was rebuilt", -1, j);
  }
}

int main(void) {
  zt_plan_reset();
  if (load(1) != 0 || zerotune_plan_flip(1) != 0) return 2;
  const uint32_t class_index = zt_class_index(zt_class_of(8, 1));
  n_loads = n_stores = 0;
  (void)zt_plan_lookup(class_index, 2, BYTES, 0);
  const int loads_of_lookup = n_loads;
  (void)load(3);
  const int stores_of_loading = n_stores;
  demand(loads_of_lookup > 8 && stores_of_loading > 100, "points are missing", loads_of_lookup, stores_of_loading);
  check_reader(loads_of_lookup, stores_of_loading, class_index);
  check_loader(stores_of_loading);
  return 0;
}
