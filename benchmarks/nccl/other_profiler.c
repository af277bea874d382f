/* A foreign profiler of one version (-DVERSION=3 .. 7). It trusts its arguments: a parent or a handle that is no event of
 * its own ends the process. Tests set the events that it asks for. */
#define _POSIX_C_SOURCE 200809L
#include <time.h>

#include "nccl_abi.h"

#define N_EVENTS 4096
#ifndef MASK
#define MASK 0
#endif
#ifndef CHANNEL_NS /* the delay of NCCL's thread at each kernel channel */
#define CHANNEL_NS 0
#endif

/* tests set and read these */
int other_mask = MASK, other_fails, other_init_fails, other_reuses, other_is_off;
uint64_t other_untracked; /* types that get no handle */
int other_n_inits, other_n_ends, other_n_starts, other_n_stops, other_n_records, other_n_orphans;
int other_n_of_type[16];
int *other_nccl_mask;
void *other_foreign_context;

static uint64_t pool[N_EVENTS]; /* types of events; used again and again */
static int contexts[64];

static int is_mine(const void *handle) {
  if (handle < (const void *)pool || handle >= (const void *)(pool + N_EVENTS)) return 0;
  return __atomic_load_n((const uint64_t *)handle, __ATOMIC_RELAXED) != 0;
}

static int is_context(const void *context) {
  return context >= (const void *)contexts && context < (const void *)(contexts + 64);
}

static nccl_result made(void **context, int *mask) {
  *context = &contexts[__atomic_fetch_add(&other_n_inits, 1, __ATOMIC_RELAXED) % 64];
  __atomic_store_n(&other_nccl_mask, mask, __ATOMIC_RELAXED);
  if (other_is_off) { /* as NCCL Inspector does: no error, no context */
    *context = NULL;
    return 0;
  }
  __atomic_store_n(mask, other_mask, __ATOMIC_RELAXED); /* NCCL and ours may be reading it */
  return other_init_fails ? 3 : 0;
}

static nccl_result begin(void *context, void **handle, uint64_t type, const void *parent) {
  if (context != other_foreign_context && !is_context(context)) __builtin_trap();
  if (parent != NULL && !is_mine(parent)) __builtin_trap();
  const int number = __atomic_fetch_add(&other_n_starts, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&other_n_of_type[__builtin_ctzll(type)], 1, __ATOMIC_RELAXED);
  if (parent == NULL) __atomic_fetch_add(&other_n_orphans, 1, __ATOMIC_RELAXED);
  if (CHANNEL_NS > 0 && type == NCCL_PROFILE_KERNEL_CHANNEL) nanosleep(&(struct timespec){0, CHANNEL_NS}, NULL);
  uint64_t *its = &pool[other_reuses ? __builtin_ctzll(type) : number % N_EVENTS];
  __atomic_store_n(its, type, __ATOMIC_RELAXED);
  *handle = type & other_untracked ? NULL : its;
  return other_fails ? 3 : 0;
}

static nccl_result stop(void *handle) {
  if (!is_mine(handle)) __builtin_trap();
  __atomic_fetch_add(&other_n_stops, 1, __ATOMIC_RELAXED);
  return other_fails ? 3 : 0;
}

static nccl_result record(void *handle, int state, nccl_event_state_args *args) {
  (void)state, (void)args;
  if (!is_mine(handle)) __builtin_trap();
  __atomic_fetch_add(&other_n_records, 1, __ATOMIC_RELAXED);
  return other_fails ? 3 : 0;
}

static nccl_result finalize(void *context) {
  if (!is_context(context)) __builtin_trap();
  __atomic_fetch_add(&other_n_ends, 1, __ATOMIC_RELAXED);
  return other_fails ? 3 : 0;
}

#define JOIN(left, right) left##right
#define NAMED(prefix, version) JOIN(prefix, version)
#define EVENT NAMED(nccl_event_v, VERSION)

static nccl_result start(void *context, void **handle, EVENT *told) {
#if VERSION >= 5
  const void *group = told->type == NCCL_PROFILE_COLL ? told->coll.parent_group : NULL;
  if (group != NULL && !is_mine(group)) __builtin_trap();
#endif
  return begin(context, handle, told->type, told->parent);
}

#if VERSION == 3
static nccl_result init(void **context, int *mask) { return made(context, mask); }
#elif VERSION == 4
static nccl_result init(void **context, int *mask, const char *comm_name, uint64_t comm_id, int n_nodes, int n_ranks,
                        int rank, nccl_logger log) {
  (void)comm_name, (void)comm_id, (void)n_nodes, (void)n_ranks, (void)rank, (void)log;
  return made(context, mask);
}
#else
static nccl_result init(void **context, uint64_t comm_id, int *mask, const char *comm_name, int n_nodes, int n_ranks,
                        int rank, nccl_logger log) {
  (void)comm_name, (void)comm_id, (void)n_nodes, (void)n_ranks, (void)rank, (void)log;
  return made(context, mask);
}
#endif

const NAMED(nccl_profiler_v, VERSION) NAMED(ncclProfiler_v, VERSION) = {"other", init, start, stop, record, finalize};
