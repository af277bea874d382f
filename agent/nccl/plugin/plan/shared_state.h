/* What the training process tells the plugin a few times per step: one cache line that the
 * setters write and getCollInfo reads, each field by itself, all relaxed. */
#ifndef ZEROTUNE_SHARED_STATE_H
#define ZEROTUNE_SHARED_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
  _Alignas(64) _Atomic uint32_t phase_or_region;
  _Atomic uint32_t step;
  _Atomic uint32_t pressure_bits; /* a float's */
  _Atomic uint32_t recording;
  _Atomic uint32_t observing;
  _Atomic uint32_t timing_source_override;
} zt_shared_state;

extern zt_shared_state zt_shared;

static inline uint32_t zt_read(const _Atomic uint32_t *field) {
  return atomic_load_explicit(field, memory_order_relaxed);
}

/* Phase of a collective (enum Phase of store/records.py) under what was told last: a phase
 * that the runtime said holds for the collectives it names; a region of the step decides by collective. */
uint8_t zt_phase(uint32_t phase_or_region, uint32_t collective, bool gathers_after_step);

float zt_memory_pressure(void);
void zt_shared_state_reset(void);

#endif
