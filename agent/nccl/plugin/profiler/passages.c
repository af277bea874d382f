#include "passages.h"

#include <stdatomic.h>

/* One cache line for sums of calls, which the training thread writes, one for sums of times, which NCCL's does. */
static struct {
  _Alignas(64) _Atomic uint64_t n_calls;
  _Atomic uint64_t message_bytes;
  _Alignas(64) _Atomic uint64_t n_timed;
  _Atomic uint64_t kernel_ns;
} sums[ZT_N_PASSAGES];

#define ADD(word, value) atomic_fetch_add_explicit(&(word), (value), memory_order_relaxed)
#define READ(word) atomic_load_explicit(&(word), memory_order_relaxed)
#define CLEAR(word) atomic_store_explicit(&(word), 0, memory_order_relaxed)

void zt_passage_add(enum zt_passage passage, uint64_t message_bytes) {
  ADD(sums[passage].n_calls, 1);
  ADD(sums[passage].message_bytes, message_bytes);
}

void zt_passage_timed(enum zt_passage passage, uint64_t kernel_ns) {
  ADD(sums[passage].n_timed, 1);
  ADD(sums[passage].kernel_ns, kernel_ns);
}

void zerotune_passages(zt_passage_sum out[ZT_N_PASSAGES]) {
  for (int i = 0; i < ZT_N_PASSAGES; i++)
    out[i] = (zt_passage_sum){READ(sums[i].n_calls), READ(sums[i].message_bytes), READ(sums[i].n_timed),
                              READ(sums[i].kernel_ns)};
}

void zt_passages_reset(void) {
  for (int i = 0; i < ZT_N_PASSAGES; i++) {
    CLEAR(sums[i].n_calls);
    CLEAR(sums[i].message_bytes);
    CLEAR(sums[i].n_timed);
    CLEAR(sums[i].kernel_ns);
  }
}
