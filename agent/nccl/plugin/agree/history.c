#include "history.h"

#include <stdbool.h>

#include "../plan/shared_state.h"

#define READ(word) atomic_load_explicit(&(word), memory_order_relaxed)
#define WRITE(word, value) atomic_store_explicit(&(word), (value), memory_order_relaxed)
#define CHECKPOINT_EVERY 64u

/* It depends on the order of calls. Every bit of a call reaches the upper half, which is folded back. */
static uint64_t hashed(uint64_t hash, uint32_t collective, uint64_t message_bytes) {
  const uint64_t product = (hash ^ message_bytes ^ (uint64_t)collective << 56) * UINT64_C(0x9E3779B97F4A7C15);
  return (product ^ product >> 32) + 1;
}

static void count_step(zt_history *history, uint64_t call) {
  const uint32_t step = zt_read(&zt_shared.step), before = READ(history->step);
  if (step == before && call > 1) return;
  if (step == before + 1 && READ(history->step_began) > 0) {
    const uint64_t n_calls = call - READ(history->step_began);
    WRITE(history->n_steady, n_calls == READ(history->calls_per_step) ? READ(history->n_steady) + 1 : 1);
    WRITE(history->calls_per_step, n_calls);
  } else {
    WRITE(history->n_steady, 0);
  }
  WRITE(history->n_steps, READ(history->n_steps) + (step != before));
  WRITE(history->step_began, call);
  WRITE(history->step, step);
}

uint64_t zt_history_add(zt_history *history, uint32_t collective, uint64_t message_bytes) {
  const uint64_t call = READ(history->n_calls) + 1;
  count_step(history, call);
  zt_logged_call *logged = &history->log[call % ZT_LOGGED_CALLS];
  WRITE(logged->message_bytes, message_bytes);
  WRITE(logged->collective, collective);
  WRITE(logged->phase_or_region, zt_read(&zt_shared.phase_or_region));
  const uint64_t hash = hashed(READ(history->hash), collective, message_bytes);
  WRITE(history->hash, hash);
  if (call % CHECKPOINT_EVERY == 0 || (call < CHECKPOINT_EVERY && (call & (call - 1)) == 0)) {
    const uint32_t at = history->n_checkpoints++ % ZT_N_CHECKPOINTS;
    WRITE(history->checkpoint_calls[at], 0); /* so that it is not compared while it is written */
    atomic_store_explicit(&history->checkpoint_hash[at], hash, memory_order_release);
    atomic_store_explicit(&history->checkpoint_calls[at], call, memory_order_release);
  }
  /* Sequentially consistent: this thread sees a promise made meanwhile, or the promising thread sees this call. */
  atomic_store(&history->n_calls, call);
  return call;
}

void zt_history_describe(zt_history *history, zt_communicator_state *out) {
  out->n_calls = atomic_load(&history->n_calls);
  out->step_began = READ(history->step_began);
  out->calls_per_step = READ(history->calls_per_step);
  out->n_steady = READ(history->n_steady);
  out->n_steps = READ(history->n_steps);
  for (uint32_t i = 0; i < ZT_N_CHECKPOINTS; i++) {
    const uint64_t call = atomic_load_explicit(&history->checkpoint_calls[i], memory_order_acquire);
    const uint64_t hash = atomic_load_explicit(&history->checkpoint_hash[i], memory_order_acquire);
    const bool is_whole = atomic_load_explicit(&history->checkpoint_calls[i], memory_order_relaxed) == call;
    out->checkpoint_calls[i] = is_whole ? call : 0;
    out->checkpoint_hash[i] = hash;
  }
}

static zt_cycle_call call_at(const zt_history *history, uint64_t call, uint32_t gathers_after_step) {
  const zt_logged_call *logged = &history->log[call % ZT_LOGGED_CALLS];
  const uint32_t collective = READ(logged->collective);
  return (zt_cycle_call){.message_bytes = READ(logged->message_bytes),
                         .collective = collective,
                         .phase = zt_phase(READ(logged->phase_or_region), collective, gathers_after_step != 0)};
}

uint32_t zt_history_cycle(zt_history *history, uint32_t gathers_after_step, zt_cycle_call *out, uint32_t max_calls) {
  const uint64_t n_calls = READ(history->calls_per_step), began = READ(history->step_began);
  if (READ(history->n_steady) < 2 || n_calls == 0 || n_calls > max_calls || began <= 2 * n_calls) return 0;
  bool repeats = true;
  for (uint64_t i = 0; i < n_calls && repeats; i++) {
    const zt_cycle_call before = call_at(history, began - 2 * n_calls + i, gathers_after_step);
    out[i] = call_at(history, began - n_calls + i, gathers_after_step);
    repeats = before.message_bytes == out[i].message_bytes && before.collective == out[i].collective &&
              before.phase == out[i].phase;
  }
  /* The log is a ring: its entries may have been overwritten while they were read. */
  const bool is_whole = atomic_load(&history->n_calls) < began - 2 * n_calls + ZT_LOGGED_CALLS;
  return repeats && is_whole ? (uint32_t)n_calls : 0;
}

void zt_history_forget(zt_history *history) {
  atomic_store(&history->n_calls, 0);
  WRITE(history->hash, 0);
  history->n_checkpoints = 0;
  for (uint32_t i = 0; i < ZT_N_CHECKPOINTS; i++) WRITE(history->checkpoint_calls[i], 0);
  WRITE(history->step, 0);
  WRITE(history->step_began, 0);
  WRITE(history->calls_per_step, 0);
  WRITE(history->n_steady, 0);
  WRITE(history->n_steps, 0);
}
