/* A bounded queue of fixed-size records: many producers, one consumer, no lock, no allocation.
 *
 * D. Vyukov's bounded queue: each slot has a sequence number. In lap n, a producer may fill a slot whose number is 2n,
 * and sets it to 2n+1. The consumer empties the slot and sets it to 2n+2, for lap n+1. A smaller number means that the
 * slot is not empty yet: the ring is full, and the record is dropped and counted. All-zero memory is an empty ring.
 */
#ifndef ZEROTUNE_RING_H
#define ZEROTUNE_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef struct {
  _Alignas(64) _Atomic uint64_t tail; /* next position to fill */
  _Alignas(64) _Atomic uint64_t head; /* next position to empty: the consumer's */
  atomic_flag draining;
  _Atomic uint64_t n_dropped;
} zt_ring;

#define ZT_RING_PREFETCH 6u

/* Slots are arrays of { _Atomic uint64_t sequence; record }, declared by the ring's owner. */
static inline bool zt_ring_push(zt_ring *ring, void *slots, uint64_t n_slots, const void *record,
                                size_t record_bytes) {
  const size_t slot_bytes = sizeof(uint64_t) + record_bytes;
  uint64_t position = atomic_load_explicit(&ring->tail, memory_order_relaxed);
  for (;;) {
    unsigned char *slot = (unsigned char *)slots + (position % n_slots) * slot_bytes;
    _Atomic uint64_t *sequence = (_Atomic uint64_t *)(void *)slot;
    const uint64_t wanted = 2 * (position / n_slots);
    const int64_t ahead = (int64_t)(atomic_load_explicit(sequence, memory_order_acquire) - wanted);
    if (ahead == 0) {
      if (atomic_compare_exchange_weak_explicit(&ring->tail, &position, position + 1, memory_order_relaxed,
                                                memory_order_relaxed)) {
        /* The slot a few records ahead has left every cache by now. */
        const uint64_t later = (position + ZT_RING_PREFETCH) % n_slots;
        __builtin_prefetch((unsigned char *)slots + later * slot_bytes, 1);
        __builtin_prefetch((unsigned char *)slots + later * slot_bytes + slot_bytes - 1, 1);
        memcpy(slot + sizeof(uint64_t), record, record_bytes);
        atomic_store_explicit(sequence, wanted + 1, memory_order_release);
        return true;
      }
    } else if (ahead < 0) {
      atomic_fetch_add_explicit(&ring->n_dropped, 1, memory_order_relaxed);
      return false;
    } else {
      position = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    }
  }
}

/* Touch the slots' pages, so that no producer ever waits for one. */
static inline void zt_ring_touch(void *slots, uint64_t n_slots, size_t record_bytes) {
  const size_t slot_bytes = sizeof(uint64_t) + record_bytes, step = 4096 / slot_bytes;
  for (uint64_t position = 0; position < n_slots; position += step)
    atomic_fetch_add_explicit((_Atomic uint64_t *)(void *)((unsigned char *)slots + position * slot_bytes), 0,
                              memory_order_relaxed);
}

/* Move up to max_records out, the oldest first. A second consumer at the same time gets none. */
static inline size_t zt_ring_drain(zt_ring *ring, void *slots, uint64_t n_slots, void *out, size_t max_records,
                                   size_t record_bytes) {
  if (atomic_flag_test_and_set_explicit(&ring->draining, memory_order_acquire)) return 0;
  const size_t slot_bytes = sizeof(uint64_t) + record_bytes;
  uint64_t position = atomic_load_explicit(&ring->head, memory_order_relaxed);
  size_t n_records = 0;
  for (; n_records < max_records; n_records++, position++) {
    unsigned char *slot = (unsigned char *)slots + (position % n_slots) * slot_bytes;
    _Atomic uint64_t *sequence = (_Atomic uint64_t *)(void *)slot;
    const uint64_t filled = 2 * (position / n_slots) + 1;
    if (atomic_load_explicit(sequence, memory_order_acquire) != filled) break;
    memcpy((unsigned char *)out + n_records * record_bytes, slot + sizeof(uint64_t), record_bytes);
    atomic_store_explicit(sequence, filled + 1, memory_order_release);
  }
  atomic_store_explicit(&ring->head, position, memory_order_relaxed);
  atomic_flag_clear_explicit(&ring->draining, memory_order_release);
  return n_records;
}

#endif
