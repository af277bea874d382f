#include "shared_state.h"

#include <string.h>

#include "../nccl_abi.h"
#include "../zerotune_plugin.h"

enum { OTHER = 0, FORWARD_GATHER, BACKWARD_GATHER, GRADIENT_SCATTER, POST_STEP_GATHER };
#define UNKNOWN_PRESSURE (-1.0f)

zt_shared_state zt_shared = {.pressure_bits = 0xBF800000u /* -1.0f */, .step_epochs = ZT_NO_CALLS};

uint8_t zt_phase(uint32_t phase_or_region, uint32_t collective, bool gathers_after_step) {
  const bool gathers = collective == NCCL_ALL_GATHER;
  const bool reduces = collective == NCCL_REDUCE_SCATTER || collective == NCCL_ALL_REDUCE;
  switch (phase_or_region) {
  case FORWARD_GATHER:
  case BACKWARD_GATHER:
  case POST_STEP_GATHER:
    return gathers ? (uint8_t)phase_or_region : OTHER;
  case GRADIENT_SCATTER:
    return reduces ? GRADIENT_SCATTER : OTHER;
  case ZT_REGION_AFTER_BACKWARD:
    if (reduces) return GRADIENT_SCATTER;
    /* fall through */
  case ZT_REGION_FORWARD:
    return !gathers ? OTHER : gathers_after_step ? POST_STEP_GATHER : FORWARD_GATHER;
  case ZT_REGION_BACKWARD:
    return gathers ? BACKWARD_GATHER : reduces ? GRADIENT_SCATTER : OTHER;
  case ZT_REGION_STEP:
    return gathers ? POST_STEP_GATHER : OTHER;
  default:
    return OTHER;
  }
}

float zt_memory_pressure(void) {
  const uint32_t bits = zt_read(&zt_shared.pressure_bits);
  float pressure;
  memcpy(&pressure, &bits, sizeof pressure);
  return pressure;
}

static void set(_Atomic uint32_t *field, uint32_t value) {
  atomic_store_explicit(field, value, memory_order_relaxed);
}

void zt_shared_state_reset(void) {
  zerotune_set_phase(OTHER);
  (void)zerotune_set_step(0);
  zerotune_set_memory_pressure(UNKNOWN_PRESSURE);
  zerotune_set_recording(0);
}

uint32_t zerotune_layout_version(void) { return ZT_LAYOUT_VERSION; }

void zerotune_set_phase(uint32_t phase_or_region) { set(&zt_shared.phase_or_region, phase_or_region); }

uint64_t zerotune_set_step(uint32_t step) {
  set(&zt_shared.step, step);
  return atomic_exchange_explicit(&zt_shared.step_epochs, ZT_NO_CALLS, memory_order_relaxed);
}

void zerotune_set_memory_pressure(float pressure) {
  uint32_t bits;
  memcpy(&bits, &pressure, sizeof bits);
  set(&zt_shared.pressure_bits, bits);
}

void zerotune_set_recording(uint32_t decisions_on) { set(&zt_shared.recording, decisions_on != 0); }

void zerotune_set_timing_source_override(uint32_t timing_source) {
  set(&zt_shared.timing_source_override, timing_source);
}
