#include "observing.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "../plan/shared_state.h"
#include "../zerotune_plugin.h"

#define N_MASKS 64 /* one in practice: NCCL has a single mask, a stand-in may have one per communicator */

static struct {
  int *mask;
  int events;
  int n_users;
} masks[N_MASKS];

/* Init, finalize and the switch only. A mask may be freed after finalize: the switch writes none that is going. */
static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

static void write_mask(int *mask, int events) { __atomic_store_n(mask, events, __ATOMIC_RELAXED); }

void zt_mask_add(int *mask, int events) {
  pthread_mutex_lock(&changing);
  int chosen = -1;
  for (int i = N_MASKS - 1; i >= 0; i--)
    if (masks[i].n_users == 0 ? chosen < 0 || masks[chosen].n_users == 0 : masks[i].mask == mask)
      chosen = i;
  if (chosen >= 0) {
    masks[chosen].n_users++;
    masks[chosen].events = events;
    masks[chosen].mask = mask;
  }
  write_mask(mask, chosen >= 0 && zt_read(&zt_shared.observing) ? events : 0);
  pthread_mutex_unlock(&changing);
}

void zt_mask_remove(int *mask) {
  pthread_mutex_lock(&changing);
  for (int i = 0; i < N_MASKS; i++)
    if (masks[i].n_users > 0 && masks[i].mask == mask) {
      if (--masks[i].n_users == 0) masks[i].mask = NULL;
      break;
    }
  pthread_mutex_unlock(&changing);
}

void zerotune_set_observing(uint32_t on) {
  pthread_mutex_lock(&changing);
  atomic_store_explicit(&zt_shared.observing, on != 0, memory_order_relaxed);
  for (int i = 0; i < N_MASKS; i++) {
    int *mask = masks[i].mask;
    if (mask != NULL) write_mask(mask, on ? masks[i].events : 0);
  }
  pthread_mutex_unlock(&changing);
}
