#include "communicator.h"

#include <stdlib.h>

#include "../nccl_abi.h"
#include "../next/profiler.h"
#include "../next/tuner.h"
#include "../plan/plan.h"

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static zt_communicator *newest;
static uint64_t n_created, n_of_one_rank;
static uint64_t next_owner = 1;
static zt_counters destroyed;

#define READ(word) atomic_load_explicit(&(word), memory_order_relaxed)
#define WRITE(word, value) atomic_store_explicit(&(word), (value), memory_order_relaxed)

/* pthread_self() would not do: its values are reused. */
static uint64_t this_thread(void) {
  static _Atomic uint64_t n_threads;
  static _Thread_local uint64_t number;
  if (number == 0) number = atomic_fetch_add(&n_threads, 1) + 1;
  return number;
}

static bool fits(const zt_communicator *communicator, enum zt_role role, uint64_t comm_id, const zt_class *its_class) {
  if (communicator->roles_had & role || communicator->creator != this_thread()) return false;
  const uint64_t known_id = READ(communicator->comm_id);
  const zt_class *known_class = READ(communicator->its_class);
  return (comm_id == 0 || known_id == 0 || comm_id == known_id) &&
         (its_class == NULL || known_class == NULL || its_class == known_class);
}

static zt_communicator *create(void) {
  zt_communicator *communicator = calloc(1, sizeof *communicator);
  if (communicator == NULL) return NULL;
  communicator->creator = this_thread();
  communicator->owner = next_owner++;
  zt_agreed_init(&communicator->agreed);
  WRITE(communicator->rank, ZT_RANK_UNKNOWN);
  communicator->next = newest;
  newest = communicator;
  n_created++;
  return communicator;
}

zt_communicator *zt_attach(enum zt_role role, uint64_t comm_id, size_t n_ranks, size_t n_nodes, uint32_t rank) {
  const bool is_possible = n_ranks <= NCCL_MAX_RANKS && n_nodes <= n_ranks;
  zt_class *its_class = is_possible ? zt_class_of((uint32_t)n_ranks, (uint32_t)n_nodes) : NULL;
  pthread_mutex_lock(&registry);
  zt_communicator *found = newest;
  while (found != NULL && !fits(found, role, comm_id, its_class)) found = found->next;
  if (found == NULL) found = create();
  if (found != NULL) {
    found->roles |= role;
    found->roles_had |= role;
    if (comm_id != 0) {
      WRITE(found->comm_id, comm_id);
      found->name = comm_id;
    }
    if (its_class != NULL) WRITE(found->its_class, its_class);
    if (rank != ZT_RANK_UNKNOWN) WRITE(found->rank, rank);
    n_of_one_rank += n_ranks == 1 && !found->has_one_rank;
    found->has_one_rank |= n_ranks == 1;
  }
  pthread_mutex_unlock(&registry);
  return found;
}

static void add(zt_counters *sum, const zt_communicator *communicator) {
  sum->n_calls += READ(communicator->agreed.history.n_calls);
  sum->n_matched += READ(communicator->n_matched);
  sum->n_ignored_cells += READ(communicator->n_ignored_cells);
  sum->n_clamped_channels += READ(communicator->n_clamped_channels);
  sum->n_estimates += READ(communicator->n_estimates);
  sum->n_next_tuner_faults += READ(communicator->n_next_tuner_faults);
}

void zt_detach(zt_communicator *communicator, enum zt_role role) {
  pthread_mutex_lock(&registry);
  communicator->roles &= ~(unsigned)role;
  if (communicator->roles == 0) {
    zt_communicator **link = &newest;
    while (*link != communicator) link = &(*link)->next;
    *link = communicator->next;
    add(&destroyed, communicator);
    zt_agreed_free(&communicator->agreed);
    free(communicator);
  }
  pthread_mutex_unlock(&registry);
}

void zt_communicators_count(zt_counters *out) {
  pthread_mutex_lock(&registry);
  out->n_calls += destroyed.n_calls;
  out->n_matched += destroyed.n_matched;
  out->n_ignored_cells += destroyed.n_ignored_cells;
  out->n_clamped_channels += destroyed.n_clamped_channels;
  out->n_estimates += destroyed.n_estimates;
  out->n_next_tuner_faults += destroyed.n_next_tuner_faults;
  for (const zt_communicator *each = newest; each != NULL; each = each->next) add(out, each);
  out->n_communicators = n_created;
  pthread_mutex_unlock(&registry);
}

uint64_t zerotune_one_rank_communicators(void) {
  pthread_mutex_lock(&registry);
  const uint64_t n_communicators = n_of_one_rank;
  pthread_mutex_unlock(&registry);
  return n_communicators;
}

void zt_registry_lock(void) { pthread_mutex_lock(&registry); }

void zt_registry_unlock(void) { pthread_mutex_unlock(&registry); }

zt_communicator *zt_find_owner(uint64_t owner) {
  zt_communicator *found = newest;
  while (found != NULL && found->owner != owner) found = found->next;
  return found;
}

static void describe(zt_communicator *communicator, zt_communicator_state *out) {
  const zt_class *its_class = READ(communicator->its_class);
  *out = (zt_communicator_state){.owner = communicator->owner,
                                 .comm_id = communicator->name,
                                 .n_ranks = its_class == NULL ? 0 : zt_class_n_ranks(its_class),
                                 .n_nodes = its_class == NULL ? 0 : zt_class_n_nodes(its_class),
                                 .epoch = READ(communicator->agreed.epoch),
                                 .n_off_cycle = READ(communicator->agreed.n_off_cycle)};
  zt_history_describe(&communicator->agreed.history, out);
}

size_t zerotune_communicators(zt_communicator_state *out, size_t max_communicators) {
  size_t n_found = 0;
  pthread_mutex_lock(&registry);
  for (zt_communicator *each = newest; each != NULL; each = each->next) {
    if (!(each->roles & ZT_TUNER)) continue;
    if (n_found < max_communicators) describe(each, &out[n_found]);
    n_found++;
  }
  pthread_mutex_unlock(&registry);
  return n_found;
}

uint32_t zerotune_cycle(uint64_t owner, uint32_t gathers_after_step, zt_cycle_call *out, uint32_t max_calls) {
  pthread_mutex_lock(&registry);
  zt_communicator *found = zt_find_owner(owner);
  const uint32_t n_calls =
      found == NULL ? 0 : zt_history_cycle(&found->agreed.history, gathers_after_step, out, max_calls);
  pthread_mutex_unlock(&registry);
  return n_calls;
}

uint32_t zerotune_active_epoch(void) {
  uint32_t epoch = zt_plan_lookup(ZT_MAX_CLASSES, 0, 0, 0).epoch;
  pthread_mutex_lock(&registry);
  for (const zt_communicator *each = newest; each != NULL; each = each->next) {
    const uint32_t its_epoch = READ(each->agreed.epoch);
    if (its_epoch > epoch) epoch = its_epoch;
  }
  pthread_mutex_unlock(&registry);
  return epoch;
}

static void forget_history(zt_communicator *communicator) {
  zt_history_forget(&communicator->agreed.history);
  WRITE(communicator->n_matched, 0);
  WRITE(communicator->n_ignored_cells, 0);
  WRITE(communicator->n_estimates, 0);
  WRITE(communicator->n_next_tuner_faults, 0);
  WRITE(communicator->n_clamped_channels, 0);
  for (uint32_t i = 0; i < ZT_N_COLLECTIVE_CODES; i++) {
    WRITE(communicator->sequence[i], 0);
    for (uint32_t word = 0; word < 4; word++) WRITE(communicator->costs_reported[i][word], 0);
  }
  WRITE(communicator->n_decisions, 0);
  WRITE(communicator->group_begin, 0);
  WRITE(communicator->group_consumed, 0);
}

void zt_communicators_reset(void) {
  pthread_mutex_lock(&registry);
  for (zt_communicator *each = newest; each != NULL; each = each->next) forget_history(each);
  destroyed = (zt_counters){0};
  n_created = n_of_one_rank = 0;
  zt_plan_reset();
  zt_prepared_forget();
  zt_classes_reset(newest == NULL);
  if (newest == NULL) {
    zt_next_tuner_forget();
    zt_next_profiler_forget();
  }
  pthread_mutex_unlock(&registry);
}

void zt_decision_note(zt_communicator *communicator, uint32_t collective, uint64_t message_bytes,
                      uint32_t epoch, uint8_t phase, uint8_t flags) {
  const uint32_t index = READ(communicator->n_decisions);
  if (READ(communicator->group_consumed)) {
    WRITE(communicator->group_begin, index);
    WRITE(communicator->group_consumed, 0);
  }
  zt_decision *decision = &communicator->decisions[index % ZT_N_DECISIONS];
  WRITE(decision->message_bytes, message_bytes);
  WRITE(decision->bytes_left, message_bytes);
  WRITE(decision->epoch, epoch);
  WRITE(decision->what, collective | (uint32_t)phase << 8 | (uint32_t)flags << 16);
  WRITE(communicator->n_decisions, index + 1);
}

zt_decided zt_decision_find(zt_communicator *communicator, uint32_t collective, uint64_t message_bytes) {
  const uint32_t end = READ(communicator->n_decisions), begin = READ(communicator->group_begin);
  const uint32_t n_kept = end - begin < ZT_N_DECISIONS ? end - begin : ZT_N_DECISIONS;
  WRITE(communicator->group_consumed, 1);
  zt_decision *best = NULL;
  uint64_t least_left = UINT64_MAX;
  uint32_t number = 0;
  for (uint32_t back = 1; back <= n_kept && least_left != message_bytes; back++) {
    zt_decision *decision = &communicator->decisions[(end - back) % ZT_N_DECISIONS];
    const uint64_t left = READ(decision->bytes_left);
    if ((READ(decision->what) & 0xFFu) != collective || left < message_bytes || left >= least_left) continue;
    best = decision;
    least_left = left;
    number = end - back + 1;
  }
  if (best == NULL) return (zt_decided){0};
  WRITE(best->bytes_left, least_left - message_bytes);
  const uint32_t what = READ(best->what);
  const uint64_t decided_bytes = READ(best->message_bytes);
  return (zt_decided){.number = number,
                      .epoch = READ(best->epoch),
                      .message_bytes = decided_bytes,
                      .phase = (uint8_t)(what >> 8),
                      .flags = (uint8_t)(what >> 16 | (decided_bytes > message_bytes ? ZT_FLAG_FUSED : 0))};
}
