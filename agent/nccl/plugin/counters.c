/* Counters and reset of all parts. */
#include "next/profiler.h"
#include "plan/shared_state.h"
#include "profiler/events.h"
#include "profiler/passages.h"
#include "profiler/shifts.h"
#include "records/records.h"
#include "tuner/communicator.h"

void zerotune_counters(zt_counters *out) {
  *out = (zt_counters){.n_dropped_records = zt_records_dropped(), .n_dropped_costs = zt_costs_dropped()};
  zt_communicators_count(out);
  zt_events_count(out);
  out->n_next_profiler_faults = zt_next_profiler_faults();
}

void zerotune_reset(void) {
  zt_shared_state_reset();
  zerotune_ask_chunk_sizes(0);
  zerotune_set_observing(0);
  zerotune_set_capturing(0);
  zt_communicators_reset();
  zt_events_reset();
  zt_passages_reset();
  zt_shifts_reset();
  zt_records_reset();
}
