/* State that the training process sets a few times per step: one cache line that the setters write and getCollInfo
 * reads. Fields are independent, and all accesses relaxed. */
#ifndef ZEROTUNE_SHARED_STATE_H
#define ZEROTUNE_SHARED_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../zerotune_plugin.h"

typedef struct {
  _Alignas(64) _Atomic uint32_t phase_or_region;
  _Atomic uint32_t step;
  _Atomic uint32_t pressure_bits; /* a float's */
  _Atomic uint32_t recording;
  _Atomic uint32_t observing;
  _Atomic uint32_t capturing; /* a graph */
  _Atomic uint32_t timing_source_override;
  _Atomic uint64_t step_epochs; /* of the calls in this step: ZT_NO_CALLS, or the epoch (0 = none), | ZT_MIXED_EPOCHS */
} zt_shared_state;

#define ZT_NO_CALLS UINT64_MAX

extern zt_shared_state zt_shared;

static inline uint32_t zt_read(const _Atomic uint32_t *field) {
  return atomic_load_explicit(field, memory_order_relaxed);
}

/* Note that a call of this step runs under `epoch`; 0 = NCCL's own choice. */
static inline void zt_step_ran_under(uint32_t epoch) {
  const uint64_t before = atomic_load_explicit(&zt_shared.step_epochs, memory_order_relaxed);
  if (__builtin_expect(before == epoch, 1) || before == (ZT_MIXED_EPOCHS | epoch)) return;
  if (epoch == 0 && before != ZT_NO_CALLS) return;
  const uint64_t now = before == ZT_NO_CALLS || before == 0 ? epoch : ZT_MIXED_EPOCHS | epoch;
  atomic_store_explicit(&zt_shared.step_epochs, now, memory_order_relaxed);
}

/* Phase of a collective (enum Phase of store/records.py). A phase that the runtime set applies to collectives of its
 * kind; a region of the step gives a phase for each collective. */
uint8_t zt_phase(uint32_t phase_or_region, uint32_t collective, bool gathers_after_step);

float zt_memory_pressure(void);
void zt_shared_state_reset(void);

#endif
