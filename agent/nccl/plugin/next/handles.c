#include "handles.h"

#include <stdatomic.h>
#include <stdbool.h>

#define N_PAIRS 32768u
#define MARK UINT64_C(0xA5C3) /* in the upper 16 bits, which addresses do not use */
#define NUMBER UINT64_C(0xFFFFFFFFFFFF)

typedef struct {
  _Atomic uint64_t number; /* 0 while it is written */
  _Atomic uint64_t next_handle;
  _Atomic uint64_t own_handle;
} pair_slot;

static pair_slot slots[N_PAIRS];
static _Atomic uint64_t n_pairs;

#define READ(word) atomic_load_explicit(&(word), memory_order_acquire)
#define WRITE(word, value) atomic_store_explicit(&(word), (value), memory_order_release)

void *zt_handle_of_pair(zt_pair pair) {
  if (pair.own_handle == 0) return pair.next_handle;
  const uint64_t number = (atomic_fetch_add_explicit(&n_pairs, 1, memory_order_relaxed) & (NUMBER >> 1)) + 1;
  pair_slot *slot = &slots[number % N_PAIRS];
  WRITE(slot->number, 0);
  WRITE(slot->next_handle, (uint64_t)(uintptr_t)pair.next_handle);
  WRITE(slot->own_handle, pair.own_handle);
  WRITE(slot->number, number);
  return (void *)(uintptr_t)(MARK << 48 | number);
}

zt_pair zt_pair_of_handle(const void *handle) {
  const uint64_t word = (uint64_t)(uintptr_t)handle, number = word & NUMBER;
  if (word >> 48 != MARK) return (zt_pair){.next_handle = (void *)(uintptr_t)word};
  pair_slot *slot = &slots[number % N_PAIRS];
  if (READ(slot->number) != number) return (zt_pair){0};
  const uint64_t next_handle = READ(slot->next_handle), own_handle = READ(slot->own_handle);
  const bool is_same = READ(slot->number) == number;
  return is_same ? (zt_pair){(void *)(uintptr_t)next_handle, own_handle} : (zt_pair){0};
}
