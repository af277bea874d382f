#include "cycle.h"

#include <stdlib.h>
#include <string.h>

static bool fits(const zt_cycle_call *expected, uint32_t collective, uint64_t message_bytes) {
  return expected->message_bytes == message_bytes && expected->collective == collective;
}

zt_cycle *zt_cycle_new(const zt_cycle_call *calls, uint32_t n_calls) {
  zt_cycle *cycle = calloc(1, sizeof *cycle);
  if (cycle == NULL) return NULL;
  *cycle = (zt_cycle){1, n_calls, calloc(n_calls, sizeof *calls), calloc(n_calls, sizeof(uint32_t))};
  if (cycle->calls == NULL || cycle->borders == NULL) {
    zt_cycle_release(cycle);
    return NULL;
  }
  memcpy(cycle->calls, calls, n_calls * sizeof *calls);
  for (uint32_t i = 1, border = 0; i < n_calls; i++) {
    while (border > 0 && !fits(&calls[border], calls[i].collective, calls[i].message_bytes))
      border = cycle->borders[border - 1];
    border += fits(&calls[border], calls[i].collective, calls[i].message_bytes);
    cycle->borders[i] = border;
  }
  return cycle;
}

bool zt_cycle_equals(const zt_cycle *cycle, const zt_cycle_call *calls, uint32_t n_calls) {
  return cycle != NULL && cycle->n_calls == n_calls && memcmp(cycle->calls, calls, n_calls * sizeof *calls) == 0;
}

void zt_cycle_release(zt_cycle *cycle) {
  if (cycle == NULL || --cycle->n_references > 0) return;
  free(cycle->calls);
  free(cycle->borders);
  free(cycle);
}

uint32_t zt_cycle_follow(zt_cycle_position *place, const zt_cycle *cycle, uint32_t collective, uint64_t message_bytes) {
  if (place->cycle != cycle) *place = (zt_cycle_position){cycle, 0, true}; /* changes begin at the first call */
  if (cycle == NULL) return ZT_NO_PHASE;
  const zt_cycle_call *expected = &cycle->calls[place->at];
  if (fits(expected, collective, message_bytes)) {
    place->at = place->at + 1 == cycle->n_calls ? 0 : place->at + 1;
    if (place->is_on) return expected->phase;
    place->is_on = place->at == 0;
    return ZT_NO_PHASE;
  }
  place->is_on = false;
  while (place->at > 0 && !fits(&cycle->calls[place->at], collective, message_bytes))
    place->at = cycle->borders[place->at - 1];
  place->at += fits(&cycle->calls[place->at], collective, message_bytes);
  return ZT_NO_PHASE;
}
