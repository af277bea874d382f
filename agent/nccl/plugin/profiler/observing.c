#include "observing.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "../plan/shared_state.h"
#include "../zerotune_plugin.h"

#define N_MASKS 64 /* NCCL has a single mask; the emulated NCCL may have one per communicator */

static struct {
  int *mask;
  const int *last_mask;
  int events;
  int always; /* events of these that stay on while not observing */
  int next_events; /* the next profiler's, which may write it at any time */
  int n_users;
} masks[N_MASKS];

/* Taken by init, finalize and the setters. A mask may be freed after finalize, so the setters must not write it then.
 * */
static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

static void write_mask(int *mask, int events) { __atomic_store_n(mask, events, __ATOMIC_RELAXED); }

static void write_joined(int i) {
  const int asked = zt_read(&zt_shared.observing) ? masks[i].events : masks[i].always;
  const int own_events = zt_read(&zt_shared.capturing) ? 0 : asked;
  write_mask(masks[i].mask, own_events | __atomic_load_n(&masks[i].next_events, __ATOMIC_RELAXED));
}

/* The mask's earlier entry, so that the next profiler's int stays the same; else an unused entry; -1 = none. */
static int entry_for(const int *mask) {
  int chosen = -1;
  for (int i = N_MASKS - 1; i >= 0; i--) {
    if (masks[i].last_mask == mask) return i;
    if (masks[i].n_users == 0) chosen = i;
  }
  return chosen;
}

void zt_mask_add(int *mask, int events, int always) {
  pthread_mutex_lock(&changing);
  const int chosen = entry_for(mask);
  if (chosen >= 0) {
    if (masks[chosen].n_users == 0) __atomic_store_n(&masks[chosen].next_events, 0, __ATOMIC_RELAXED);
    masks[chosen].last_mask = mask;
    masks[chosen].n_users++;
    masks[chosen].events = events;
    masks[chosen].always = always;
    masks[chosen].mask = mask;
  }
  if (chosen >= 0)
    write_joined(chosen);
  else
    write_mask(mask, 0);
  pthread_mutex_unlock(&changing);
}

void zt_mask_remove(int *mask) {
  pthread_mutex_lock(&changing);
  for (int i = 0; i < N_MASKS; i++)
    if (masks[i].n_users > 0 && masks[i].mask == mask) {
      if (--masks[i].n_users == 0) {
        __atomic_fetch_and(mask, ~masks[i].always, __ATOMIC_RELAXED);
        masks[i].mask = NULL;
      }
      break;
    }
  pthread_mutex_unlock(&changing);
}

static void change(_Atomic uint32_t *which, uint32_t on) {
  pthread_mutex_lock(&changing);
  atomic_store_explicit(which, on != 0, memory_order_relaxed);
  for (int i = 0; i < N_MASKS; i++)
    if (masks[i].mask != NULL) write_joined(i);
  pthread_mutex_unlock(&changing);
}

void zerotune_set_observing(uint32_t on) { change(&zt_shared.observing, on); }

void zerotune_set_capturing(uint32_t on) { change(&zt_shared.capturing, on); }

int *zt_mask_of_next(const int *mask) {
  int *next_events = NULL;
  pthread_mutex_lock(&changing);
  for (int i = 0; i < N_MASKS && next_events == NULL; i++)
    if (masks[i].mask == mask) next_events = &masks[i].next_events;
  pthread_mutex_unlock(&changing);
  return next_events;
}

void zt_masks_follow(void) {
  pthread_mutex_lock(&changing);
  for (int i = 0; i < N_MASKS; i++)
    if (masks[i].mask != NULL) write_joined(i);
  pthread_mutex_unlock(&changing);
}
