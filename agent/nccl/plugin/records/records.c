#include "records.h"

#include "../profiler/observing.h"
#include "ring.h"

_Static_assert(sizeof(zt_record) == 72, "store/wire.py: OBSERVATION_BYTES");
_Static_assert(sizeof(zt_cost_record) == 120, "store/wire.py: COST_BYTES");
_Static_assert((ZT_RING_RECORDS & (ZT_RING_RECORDS - 1)) == 0, "a power of two keeps division cheap");

static struct {
  uint64_t sequence;
  zt_record record;
} record_slots[ZT_RING_RECORDS];

static struct {
  uint64_t sequence;
  zt_cost_record record;
} cost_slots[ZT_COST_RING_RECORDS];

_Static_assert(sizeof record_slots[0] == sizeof(uint64_t) + sizeof(zt_record), "no padding");
_Static_assert(sizeof cost_slots[0] == sizeof(uint64_t) + sizeof(zt_cost_record), "no padding");

static zt_ring record_ring = {.draining = ATOMIC_FLAG_INIT};
static zt_ring cost_ring = {.draining = ATOMIC_FLAG_INIT};

void zt_records_prepare(void) {
  static _Atomic bool done;
  if (atomic_exchange(&done, true)) return;
  zt_ring_touch(record_slots, ZT_RING_RECORDS, sizeof(zt_record));
  zt_ring_touch(cost_slots, ZT_COST_RING_RECORDS, sizeof(zt_cost_record));
}

bool zt_record_push(const zt_record *record) {
  return zt_ring_push(&record_ring, record_slots, ZT_RING_RECORDS, record, sizeof *record);
}

bool zt_cost_push(const zt_cost_record *record) {
  return zt_ring_push(&cost_ring, cost_slots, ZT_COST_RING_RECORDS, record, sizeof *record);
}

size_t zerotune_drain(zt_record *out, size_t max_records) {
  zt_masks_follow();
  return zt_ring_drain(&record_ring, record_slots, ZT_RING_RECORDS, out, max_records, sizeof *out);
}

size_t zerotune_drain_costs(zt_cost_record *out, size_t max_records) {
  return zt_ring_drain(&cost_ring, cost_slots, ZT_COST_RING_RECORDS, out, max_records, sizeof *out);
}

uint64_t zt_records_dropped(void) { return atomic_load_explicit(&record_ring.n_dropped, memory_order_relaxed); }

uint64_t zt_costs_dropped(void) { return atomic_load_explicit(&cost_ring.n_dropped, memory_order_relaxed); }

void zt_records_reset(void) {
  zt_record record;
  zt_cost_record cost;
  while (zerotune_drain(&record, 1) == 1) continue;
  while (zerotune_drain_costs(&cost, 1) == 1) continue;
  atomic_store_explicit(&record_ring.n_dropped, 0, memory_order_relaxed);
  atomic_store_explicit(&cost_ring.n_dropped, 0, memory_order_relaxed);
}
