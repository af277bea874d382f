#include "profiler.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "../profiler/observing.h"
#include "../zerotune_plugin.h"
#include "handles.h"
#include "library.h"
#include "loading.h"

#define MAX_COMMUNICATORS 4096

/* One of v3, v4 and v5 is set. */
typedef struct {
  int abi;
  const char *name;
  const nccl_profiler_v3 *v3;
  const nccl_profiler_v4 *v4;
  const nccl_profiler_v5 *v5; /* and newer */
  nccl_result (*start_event)(void *context, void **handle, void *event);
  nccl_result (*stop_event)(void *handle);
  nccl_result (*record_event_state)(void *handle, int state, nccl_event_state_args *args);
  nccl_result (*finalize)(void *context);
} next_profiler;

static pthread_mutex_t finding = PTHREAD_MUTEX_INITIALIZER;
static bool has_searched;
static next_profiler found;
static _Atomic(const next_profiler *) next; /* NULL = there is none */
static zt_both_contexts all_both[MAX_COMMUNICATORS];
static _Atomic uint64_t n_faults;

static void check(nccl_result result) {
  if (result != NCCL_SUCCESS) atomic_fetch_add_explicit(&n_faults, 1, memory_order_relaxed);
}

bool zt_has_next_profiler(void) { return atomic_load_explicit(&next, memory_order_acquire) != NULL; }

/* ---- finding it ---- */

static next_profiler described(int abi, const void *table) {
  next_profiler its = {.abi = abi, .name = ((const nccl_profiler_v3 *)table)->name};
#define TAKE(member)                                                     \
  do {                                                                   \
    its.member = table;                                                  \
    its.start_event = (__typeof__(its.start_event))its.member->start_event; \
    its.stop_event = its.member->stop_event;                             \
    its.record_event_state = its.member->record_event_state;             \
    its.finalize = its.member->finalize;                                 \
  } while (0)
  if (abi == 3)
    TAKE(v3);
  else if (abi == 4)
    TAKE(v4);
  else
    TAKE(v5);
  return its;
}

/* From v5 on later versions only add to events. v4's events have other heads and can be made from v5's; v3's differ. */
static bool is_convertible(int abi, int newest_abi) { return abi == newest_abi || (abi >= 4 && newest_abi >= 5); }

static void find(int newest_abi) {
  has_searched = true;
  void *library = zt_open_next("ZEROTUNE_NEXT_PROFILER", "profiler");
  for (int abi = newest_abi; library != NULL && abi >= 3; abi--) {
    char symbol[32];
    (void)snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", abi);
    const void *table = dlsym(library, symbol);
    if (table == NULL) continue;
    found = described(abi, table);
    const bool is_zerotune = found.name != NULL && strcmp(found.name, "zerotune") == 0;
    if (!is_zerotune && !is_convertible(abi, newest_abi)) atomic_fetch_add(&n_faults, 1);
    if (!is_zerotune && is_convertible(abi, newest_abi)) atomic_store_explicit(&next, &found, memory_order_release);
    return;
  }
}

const char *zerotune_next_profiler(void) {
  const next_profiler *its = atomic_load(&next);
  return its == NULL ? "" : its->name == NULL ? "?" : its->name;
}

void zt_next_profiler_forget(void) {
  pthread_mutex_lock(&finding);
  has_searched = false;
  atomic_store(&next, NULL);
  atomic_store(&n_faults, 0);
  pthread_mutex_unlock(&finding);
}

uint64_t zt_next_profiler_faults(void) { return atomic_load_explicit(&n_faults, memory_order_relaxed); }

/* ---- communicators ---- */

static zt_both_contexts *take_free(zt_communicator *communicator) {
  for (int i = 0; i < MAX_COMMUNICATORS; i++)
    if (all_both[i].communicator == NULL) {
      all_both[i].communicator = communicator;
      return &all_both[i];
    }
  return NULL;
}

/* Events of this version; NCCL's own adapters do not pass later ones. */
static int known_events(int abi) { return abi <= 4 ? 0xFF : abi == 5 ? 0xFFF : abi == 6 ? 0x7FFF : -1; }

static nccl_result init(const next_profiler *its, void **context, int *mask, const zt_profiler_start *start) {
  if (its->abi == 3) return its->v3->init(context, mask);
  if (its->abi == 4)
    return its->v4->init(context, mask, start->comm_name, start->comm_id, start->n_nodes, start->n_ranks, start->rank,
                         start->log);
  return its->v5->init(context, start->comm_id, mask, start->comm_name, start->n_nodes, start->n_ranks, start->rank,
                       start->log);
}

void *zt_next_profiler_init(zt_communicator *communicator, const zt_profiler_start *start) {
  pthread_mutex_lock(&finding);
  if (!has_searched) find(start->abi);
  const next_profiler *its = atomic_load(&next);
  zt_both_contexts *both = its == NULL ? NULL : take_free(communicator);
  pthread_mutex_unlock(&finding);
  if (its == NULL) return communicator;
  int *mask = both == NULL ? NULL : zt_mask_of_next(start->mask);
  if (mask == NULL) {
    check(1);
    return both;
  }
  const int before = __atomic_load_n(mask, __ATOMIC_RELAXED);
  void *context = NULL;
  const nccl_result result = init(its, &context, mask, start);
  both->context = context;
  check(result);
  const int wanted = result == NCCL_SUCCESS ? __atomic_load_n(mask, __ATOMIC_RELAXED) & known_events(its->abi) : before;
  __atomic_store_n(mask, wanted, __ATOMIC_RELAXED);
  if (result == NCCL_SUCCESS) both->mask = mask;
  zt_masks_follow();
  return both;
}

zt_communicator *zt_next_profiler_end(void *nccl_context) {
  zt_both_contexts *both = zt_both_contexts_of(nccl_context);
  if (both == NULL) return zt_has_next_profiler() ? NULL : nccl_context;
  zt_communicator *communicator = both->communicator;
  void *context = both->context;
  const bool is_initialised = atomic_exchange(&both->mask, NULL) != NULL;
  if (is_initialised && context != NULL) check(atomic_load(&next)->finalize(context)); /* as NCCL does */
  both->context = NULL;
  both->communicator = NULL;
  return communicator;
}

zt_both_contexts *zt_both_contexts_of(void *nccl_context) {
  const uintptr_t offset = (uintptr_t)nccl_context - (uintptr_t)all_both;
  return offset < sizeof all_both && offset % sizeof *all_both == 0 ? nccl_context : NULL;
}

/* ---- events ---- */

/* The mask bits for which NCCL reports a type: it also reports the ancestors of an event. */
static uint64_t mask_bits_for(uint64_t type) {
  enum { GROUP = 1, COLL = 2, P2P = 4, PROXY_OP = 8, PROXY_STEP = 16, KERNEL_CHANNEL = 64, NET_PLUGIN = 128 };
  enum { COLL_API = 512, P2P_API = 1024, COPY = 4096 | 8192 | 16384 };
  const uint64_t below = PROXY_OP | PROXY_STEP | KERNEL_CHANNEL | NET_PLUGIN;
  switch (type) {
  case GROUP:
    return GROUP | COLL | P2P | below;
  case COLL:
    return COLL | below;
  case P2P:
    return P2P | below;
  case PROXY_OP:
    return PROXY_OP | PROXY_STEP | NET_PLUGIN;
  case PROXY_STEP:
    return PROXY_STEP | NET_PLUGIN;
  case 256: /* the API call of a group */
    return ~UINT64_C(0);
  case COLL_API:
    return COLL_API | COLL | below | COPY;
  case P2P_API:
    return P2P_API | P2P | below;
  case 4096:
    return COPY;
  default:
    return type;
  }
}

/* Parents are passed as the next profiler's own handles. */
static nccl_result start_v4_of_v5(const next_profiler *its, void *context, void **handle, const nccl_event_v5 *event) {
  nccl_event_v4 narrow;
  memcpy((char *)&narrow + offsetof(nccl_event_v4, parent), (const char *)event + offsetof(nccl_event_v5, parent),
         sizeof narrow - offsetof(nccl_event_v4, parent));
  narrow.type = (uint8_t)event->type;
  if (event->type == NCCL_PROFILE_COLL) narrow.parent = zt_pair_of_handle(event->coll.parent_group).next_handle;
  if (event->type == NCCL_PROFILE_P2P) narrow.parent = zt_pair_of_handle(event->p2p_v5.parent_group).next_handle;
  return its->start_event(context, handle, &narrow);
}

static nccl_result start_v5(const next_profiler *its, void *context, void **handle, nccl_event_v5 *event) {
  void **group = event->type == NCCL_PROFILE_COLL  ? &event->coll.parent_group
                 : event->type == NCCL_PROFILE_P2P ? &event->p2p_v5.parent_group
                                                   : NULL;
  void *const given = group == NULL ? NULL : *group;
  if (group != NULL) *group = zt_pair_of_handle(given).next_handle;
  const nccl_result result = its->start_event(context, handle, event);
  if (group != NULL) *group = given;
  return result;
}

void *zt_next_profiler_begin(int abi, const zt_both_contexts *both, void *nccl_context, void *event, uint64_t type) {
  const next_profiler *its = atomic_load_explicit(&next, memory_order_acquire);
  if (type > (uint64_t)(uint32_t)known_events(its->abi)) return NULL;
  const int *mask = both == NULL ? NULL : both->mask;
  const uint32_t asked = mask == NULL ? 0 : (uint32_t)__atomic_load_n(mask, __ATOMIC_RELAXED);
  if (both != NULL && !(mask_bits_for(type) & asked)) return NULL;
  void **parent = (void **)((char *)event + offsetof(nccl_event_v3, parent));
  void *const given = *parent, *context = both != NULL ? both->context : nccl_context;
  *parent = zt_pair_of_handle(given).next_handle;
  /* up to v4 NCCL reports no collective whose group has no handle */
  const bool is_without_group = abi <= 4 && (type == NCCL_PROFILE_COLL || type == NCCL_PROFILE_P2P) && *parent == NULL;
  void *next_handle = NULL;
  nccl_result result = NCCL_SUCCESS;
  if (!is_without_group)
    result = abi >= 5 && its->abi == 4 ? start_v4_of_v5(its, context, &next_handle, event)
             : abi >= 5                ? start_v5(its, context, &next_handle, event)
                                       : its->start_event(context, &next_handle, event);
  *parent = given;
  check(result);
  return result == NCCL_SUCCESS ? next_handle : NULL;
}

void zt_next_profiler_stop(void *next_handle) { check(atomic_load(&next)->stop_event(next_handle)); }

void zt_next_profiler_record(void *next_handle, int state, nccl_event_state_args *args) {
  check(atomic_load(&next)->record_event_state(next_handle, state, args));
}
