/* What the training process tells the plugin a few times per step: one cache line of words that
 * the setters write and getCollInfo reads, each by itself, all relaxed. */
#ifndef ZEROTUNE_WORDS_H
#define ZEROTUNE_WORDS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
  _Alignas(64) _Atomic uint32_t phase_word;
  _Atomic uint32_t step;
  _Atomic uint32_t pressure_bits; /* a float's */
  _Atomic uint32_t recording;
  _Atomic uint32_t observing;
  _Atomic uint32_t timing_source_override;
} zt_words;

extern zt_words zt_the_words;

static inline uint32_t zt_word(const _Atomic uint32_t *word) {
  return atomic_load_explicit(word, memory_order_relaxed);
}

/* Phase of a collective (enum Phase of store/records.py) under a phase word. A phase that the
 * runtime said holds for the collectives it names; a region of the step decides by collective. */
uint8_t zt_phase(uint32_t phase_word, uint32_t collective, bool gathers_after_step);

float zt_memory_pressure(void);
void zt_words_reset(void);

#endif
