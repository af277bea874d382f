/* NCCL's network proxies wait for kernels to fill and empty buffers. An infinitely fast GPU never lets them wait: its
 * tails and heads are far ahead, and a slot that a proxy took is ready at once, with size 0. */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#include "../mock_cuda.h"

#if defined(__x86_64__) && defined(__GLIBC__)
/* Wheels are for glibc 2.17 and newer; newer glibc has both symbol versions. */
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_detach,pthread_detach@GLIBC_2.2.5");
#endif

#define FAR_AHEAD (UINT64_C(1) << 62)
#define N_SLOTS 8        /* NCCL_STEPS */
#define CONNECTION 152   /* ncclConnInfo, the same from 2.21 to 2.32 */
#define N_CONNECTIONS 2  /* NCCL_MAX_CONNS, for sending; as many follow for receiving */
#define TAIL 48
#define HEAD 56
#define FIFO 96
#define OFTEN_NS 20000
#define SELDOM_NS 1000000
#define N_IDLE 1000u /* idle polls before polling seldom: 20 ms and more */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char **fifos;
static size_t n_fifos, n_room;
static bool draining;

static void *pointer_at(const char *base, int64_t offset) {
  void *value;
  memcpy(&value, base + offset, sizeof value);
  return value;
}

static bool drain_once(void) {
  const mock_layout *layout = &mock_the_layout;
  bool any = false;
  for (size_t i = 0; i < n_fifos; i++)
    for (int slot = 0; slot < N_SLOTS; slot++) {
      char *const at = fifos[i] + (ptrdiff_t)layout->fifo_slot_bytes * slot + layout->fifo_size;
      _Atomic int64_t *size = (_Atomic int64_t *)(void *)at;
      int64_t taken = -1;
      any |= atomic_compare_exchange_strong(size, &taken, 0);
    }
  return any;
}

/* Polls often while proxies take slots, and seldom after they have taken none for a while. */
static void *drain(void *nothing) {
  for (unsigned n_idle = 0;; n_idle++) {
    pthread_mutex_lock(&lock);
    if (drain_once()) n_idle = 0;
    pthread_mutex_unlock(&lock);
    const struct timespec pause = {0, n_idle < N_IDLE ? OFTEN_NS : SELDOM_NS};
    nanosleep(&pause, NULL);
  }
  return nothing;
}

static void add_fifo(char *fifo) {
  pthread_mutex_lock(&lock);
  if (n_fifos == n_room) {
    const size_t room = n_room == 0 ? 256 : 2 * n_room;
    char **const grown = realloc(fifos, room * sizeof *fifos);
    if (grown != NULL) fifos = grown, n_room = room;
  }
  if (n_fifos < n_room) fifos[n_fifos++] = fifo;
  if (!draining) {
    pthread_t thread;
    draining = pthread_create(&thread, NULL, drain, NULL) == 0 && pthread_detach(thread) == 0;
  }
  pthread_mutex_unlock(&lock);
}

void mock_forget_proxies(const void *base, size_t n_bytes) {
  pthread_mutex_lock(&lock);
  size_t n_kept = 0;
  for (size_t i = 0; i < n_fifos; i++)
    if (fifos[i] < (const char *)base || fifos[i] >= (const char *)base + n_bytes) fifos[n_kept++] = fifos[i];
  n_fifos = n_kept;
  pthread_mutex_unlock(&lock);
}

static bool move_ahead(_Atomic uint64_t *position) {
  if (position == NULL || atomic_load(position) >= FAR_AHEAD / 2) return false;
  atomic_store(position, FAR_AHEAD);
  return true;
}

static void open_peer(const char *peer) {
  for (int i = 0; i < N_CONNECTIONS; i++) {
    const char *const sending = peer + CONNECTION * i, *const receiving = peer + CONNECTION * (N_CONNECTIONS + i);
    char *const fifo = pointer_at(sending, FIFO);
    if (fifo != NULL && move_ahead(pointer_at(sending, TAIL))) add_fifo(fifo);
    (void)move_ahead(pointer_at(receiving, HEAD));
  }
}

void mock_let_proxies_run(const char *communicator, uint64_t channel_mask) {
  const mock_layout *layout = &mock_the_layout;
  int32_t n_ranks;
  memcpy(&n_ranks, communicator + layout->n_ranks, sizeof n_ranks);
  const char *const channels = pointer_at(communicator, layout->channels);
  for (int channel = 0; channel < MOCK_MAX_CHANNELS; channel++) {
    if (!(channel_mask >> channel & 1)) continue;
    /* The entry after the ranks is the root of collectives in the switches. Its proxies compare slots with sizes that
     * only kernels know, so they must wait forever. */
    char **const peers = pointer_at(channels + layout->channel_bytes * (int64_t)channel, 0);
    for (int rank = 0; peers != NULL && rank < n_ranks; rank++)
      if (peers[rank] != NULL) open_peer(peers[rank]);
  }
}
