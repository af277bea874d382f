/* The profiler plugin: ABI versions 3 to 7 over one body; older versions report no times of kernels.
 *
 * It asks for collectives, their kernel channels and (v6 and newer) collectives of copy engines only. With kernel
 * channels NCCL also reports sends. NCCL 2.27 and older start a collective's event only under a group event whose
 * handle is not NULL. So an event that is not followed gets a handle, too, which is not of the pool.
 */
#include "../nccl_abi.h"
#include "../next/handles.h"
#include "../next/profiler.h"
#include "../plan/plan.h"
#include "../plan/shared_state.h"
#include "../tuner/communicator.h"
#include "events.h"
#include "names.h"
#include "observing.h"
#include "passages.h"
#include "shifts.h"

#define EXPORT __attribute__((visibility("default")))

/* handles of events that are not followed */
#define UNTRACKED ((zt_handle)0xFFFF)
#define CAPTURED ((zt_handle)0xFFFE) /* an API call under CUDA-graph capture, from v5 on */
#define GROUP_MARK 0xFFFDu           /* in the low bits, below the group's number */
#define CALL_MARK 0xFFFCu            /* in the low bits, below the microsecond of an API call: v7 */

/* ---- one collective, whatever the version ---- */

typedef struct {
  uint64_t sequence;
  uint64_t count; /* all_gather, broadcast: bytes per rank; other collectives: elements */
  uint8_t collective, datatype, algorithm, protocol;
  uint32_t n_channels;
  uint32_t rank;
  bool channels_are_certain;
  uint64_t group;
  bool reports_capture; /* v5 and newer: `flags` has ZT_FLAG_CAPTURED for a capture */
  bool is_symmetric;
  int abi;
  uint64_t called_us; /* 0 = unknown */
  uint8_t flags;
} collective_event;

/* NCCL's nBytes: total over ranks for all_gather and reduce_scatter. NCCL passes all_gather and broadcast to its
 * kernels as bytes, so their count is in bytes. */
static uint64_t total_bytes(const collective_event *coll, uint32_t n_ranks) {
  switch (coll->collective) {
  case NCCL_ALL_GATHER:
    return coll->count * n_ranks;
  case NCCL_BROADCAST:
    return coll->count;
  case NCCL_REDUCE_SCATTER:
    return coll->count * zt_datatype_bytes(coll->datatype) * n_ranks;
  default:
    return coll->count * zt_datatype_bytes(coll->datatype);
  }
}

/* No decision does not mean a bypass if observation was turned on or off between decision and launch. */
static enum zt_passage passage_of(const collective_event *coll, bool has_decision) {
  if (coll->is_symmetric) return ZT_SYMMETRIC;
  if (has_decision || coll->flags & ZT_FLAG_CAPTURED) return ZT_DECIDED;
  if (coll->algorithm >= NCCL_MAX_ALGORITHMS) return ZT_UNKNOWN_PASSAGE;
  return coll->reports_capture && zt_read(&zt_shared.observing) ? ZT_UNKNOWN_PASSAGE : ZT_DECIDED;
}

/* NCCL reports 0 channels for CollNet and multi-node NVLS, which runs as CollNet. Symmetric kernels have none. */
static uint32_t channels_to_expect(const collective_event *coll) {
  const bool is_unknown = coll->n_channels == 0 && coll->algorithm < NCCL_MAX_ALGORITHMS && !coll->is_symmetric;
  return is_unknown ? NCCL_MAX_CHANNELS : coll->n_channels;
}

/* The chunk size given to NCCL. A graph's replay keeps that of its capture, which is unknown here. */
static uint32_t chunk_bytes_of(const zt_communicator *communicator, const collective_event *coll) {
  if (!communicator->chunks.is_enabled) return 0;
  if (coll->flags & ZT_FLAG_CAPTURED) return ZT_UNKNOWN_CHUNK;
  return zt_chunk_decided(&communicator->chunks, coll->collective, coll->algorithm, coll->protocol);
}

static zt_handle begin(zt_communicator *communicator, const collective_event *coll) {
  zt_class *its_class = atomic_load_explicit(&communicator->its_class, memory_order_relaxed);
  if (its_class == NULL || coll->collective >= NCCL_N_COLLECTIVES) return UNTRACKED;
  const uint64_t bytes = total_bytes(coll, zt_class_n_ranks(its_class));
  if (bytes == 0) return UNTRACKED;

  /* The tuner was not asked for kernels outside its table (symmetric kernels), nor for a graph's replay. A replay must
   * not consume a decision: a callback thread reports it while the training thread may be deciding. */
  const bool was_asked =
      coll->algorithm < NCCL_MAX_ALGORITHMS && !coll->is_symmetric && !(coll->flags & ZT_FLAG_CAPTURED);
  zt_decided decided = {0};
  if (was_asked) decided = zt_decision_find(communicator, coll->collective, bytes);
  if (decided.number == 0) {
    const zt_choice here = zt_plan_lookup(ZT_MAX_CLASSES, coll->collective, bytes, zt_read(&zt_shared.phase_or_region));
    const uint32_t agreed = atomic_load_explicit(&communicator->agreed.epoch, memory_order_relaxed);
    decided.epoch = agreed > here.epoch ? agreed : here.epoch;
    decided.phase = here.phase;
    decided.message_bytes = bytes; /* flags are 0: a capture's or NCCL's own choice */
  }
  const enum zt_passage passage = passage_of(coll, decided.number != 0);
  if (passage != ZT_DECIDED) decided.flags |= ZT_FLAG_PASSED_BY;
  zt_passage_add(passage, bytes);
  zt_reported_kernel *kernel = coll->flags & ZT_FLAG_CAPTURED ? &communicator->replayed : &communicator->enqueued;
  const bool is_of_kernel = coll->group != 0 && coll->group == kernel->group;
  const bool is_of_run = is_of_kernel && decided.number != 0 && decided.number == kernel->decision;
  if (is_of_kernel && !is_of_run) zt_event_mix(kernel->event);
  const zt_event_start start = {
      .record = {.comm_id = atomic_load_explicit(&communicator->comm_id, memory_order_relaxed),
                 .message_bytes = decided.message_bytes,
                 .sequence = (uint32_t)coll->sequence,
                 .epoch = decided.epoch,
                 .n_ranks = zt_class_n_ranks(its_class),
                 .n_nodes = zt_class_n_nodes(its_class),
                 .rank = coll->rank,
                 .collective = coll->collective,
                 .algorithm = coll->algorithm,
                 .protocol = coll->protocol,
                 .n_channels = (uint8_t)coll->n_channels,
                 .phase = decided.phase,
                 .datatype = coll->datatype,
                 .flags = (uint8_t)(decided.flags | coll->flags),
                 .memory_pressure = zt_memory_pressure(),
                 .step = zt_read(&zt_shared.step),
                 .chunk_bytes = chunk_bytes_of(communicator, coll)},
      .its_class = coll->is_symmetric ? NULL : its_class, /* their channels say nothing about the class */
      .owner = communicator->owner,
      .group = coll->group,
      .run = is_of_run ? kernel->event : 0,
      .member_bytes = bytes,
      .is_mixed = is_of_kernel && !is_of_run,
      .n_channels = channels_to_expect(coll),
      .channels_are_certain = coll->channels_are_certain && coll->n_channels != 0,
      .passage = passage,
      .checked = coll->abi >= 4 ? communicator : NULL,
      .number = coll->abi >= 4 && !(coll->flags & ZT_FLAG_CAPTURED) ? zt_shifts_enqueued(communicator) : 0,
      .called_us = coll->called_us,
  };
  const zt_handle handle = zt_event_begin(&start, &communicator->latest_event);
  if (!is_of_run) *kernel = (zt_reported_kernel){coll->group, handle, decided.number};
  return handle != 0 ? handle : UNTRACKED;
}

static void *pointer(zt_handle handle) { return (void *)(uintptr_t)handle; }

static zt_handle handle_in(const void *pointer) { return (zt_handle)(uintptr_t)pointer; }

static zt_handle next_group(void) {
  static _Atomic uint64_t n_groups;
  return atomic_fetch_add_explicit(&n_groups, 1, memory_order_relaxed) << 16 | GROUP_MARK;
}

/* ---- kernel channels ---- */

static zt_handle begin_channel(const void *parent, uint32_t channel, bool has_gpu_time, uint64_t gpu_ns) {
  const zt_handle handle = zt_channel_begin(handle_in(parent), channel, has_gpu_time, gpu_ns);
  return handle != 0 ? handle : UNTRACKED;
}

/* ---- startEvent by version ---- */

static void learn_id(zt_communicator *communicator, uint64_t comm_hash) {
  atomic_store_explicit(&communicator->comm_id, comm_hash, memory_order_relaxed);
}

static nccl_result start_v3(void *context, void **handle, nccl_event_v3 *event) {
  zt_handle made = event->type == NCCL_PROFILE_GROUP ? next_group() : UNTRACKED;
  if (context != NULL && event->type == NCCL_PROFILE_COLL) {
    const nccl_coll_v3 *coll = &event->coll;
    learn_id(context, coll->comm_hash);
    made = begin(context, &(collective_event){.sequence = coll->sequence,
                                  .count = coll->count,
                                  .collective = zt_collective_named(coll->collective),
                                  .datatype = zt_datatype_named(coll->datatype),
                                  .algorithm = zt_algorithm_named(coll->algorithm),
                                  .protocol = zt_protocol_named(coll->protocol),
                                  .n_channels = coll->n_max_channels,
                                  .rank = (uint32_t)event->rank,
                                  .group = handle_in(event->parent)});
  } else if (context != NULL && event->type == NCCL_PROFILE_KERNEL_CHANNEL) {
    made = begin_channel(event->parent, event->kernel_channel, false, 0);
  }
  *handle = pointer(made);
  return NCCL_SUCCESS;
}

static zt_handle call_now(void) { return zt_cpu_ns() / 1000u << 16 | CALL_MARK; }

static bool is_call(zt_handle handle) { return (handle & 0xFFFFu) == CALL_MARK; }

/* v4 and newer: one collective, timed by the GPU; `parent` NULL = v4 */
static zt_handle begin_v4(zt_communicator *communicator, const nccl_coll_v4 *coll, int rank, const void *parent,
                          zt_handle group, int abi, bool is_symmetric) {
  const zt_handle call = handle_in(parent);
  return begin(communicator, &(collective_event){.sequence = coll->sequence,
                                     .count = coll->count,
                                     .collective = zt_collective_named(coll->collective),
                                     .datatype = zt_datatype_named(coll->datatype),
                                     .algorithm = zt_algorithm_named(coll->algorithm),
                                     .protocol = zt_protocol_named(coll->protocol),
                                     .n_channels = coll->n_channels,
                                     .rank = (uint32_t)rank,
                                     .channels_are_certain = true,
                                     .group = group,
                                     .reports_capture = abi >= 5,
                                     .is_symmetric = is_symmetric,
                                     .abi = abi,
                                     .called_us = is_call(call) ? call >> 16 : 0,
                                     .flags = call == CAPTURED ? ZT_FLAG_CAPTURED : 0});
}

/* Counts sends only: each receive is another rank's send. */
static void count_message(const zt_communicator *communicator, const nccl_p2p_v4 *p2p) {
  (void)zt_shifts_enqueued(communicator);
  if (p2p->function != NULL && p2p->function[0] == 'S')
    zt_passage_add(ZT_POINT_TO_POINT, p2p->count * zt_datatype_bytes(zt_datatype_named(p2p->datatype)));
}

/* Copies have no kernel to time. */
static void count_copy(const zt_communicator *communicator, const nccl_ce_coll_v6 *copy) {
  const zt_class *its_class = atomic_load_explicit(&communicator->its_class, memory_order_relaxed);
  if (its_class == NULL) return;
  const uint64_t rank_bytes = copy->count * zt_datatype_bytes(zt_datatype_named(copy->datatype));
  zt_passage_add(ZT_COPY_ENGINE, rank_bytes * zt_class_n_ranks(its_class));
}

/* 0 = the GPU does not write the globaltimer, but a valid time of the emulated NCCL's clock. */
static zt_handle begin_channel_v4(const void *parent, const nccl_kernel_channel_v4 *channel) {
  const bool has_gpu_time = channel->start_ns != 0 || zt_read(&zt_shared.timing_source_override) != 0;
  return begin_channel(parent, channel->channel, has_gpu_time, channel->start_ns);
}

static nccl_result start_v4(void *context, void **handle, nccl_event_v4 *event) {
  zt_handle made = event->type == NCCL_PROFILE_GROUP ? next_group() : UNTRACKED;
  if (context != NULL && event->type == NCCL_PROFILE_COLL)
    made = begin_v4(context, &event->coll, event->rank, NULL, handle_in(event->parent), 4, false);
  else if (event->type == NCCL_PROFILE_P2P)
    count_message(context, &event->p2p);
  else if (event->type == NCCL_PROFILE_KERNEL_CHANNEL)
    made = begin_channel_v4(event->parent, &event->kernel_channel);
  *handle = pointer(made);
  return NCCL_SUCCESS;
}

static zt_handle group_of(const nccl_coll_v5 *coll) {
  return zt_has_next_profiler() ? zt_pair_of_handle(coll->parent_group).own_handle : handle_in(coll->parent_group);
}

static nccl_result start_v5(void *context, void **handle, nccl_event_v5 *event) {
  zt_handle made = event->type == NCCL_PROFILE_GROUP ? next_group() : UNTRACKED;
  if (event->type == NCCL_PROFILE_COLL_API && event->coll_api.graph_captured)
    made = CAPTURED;
  else if (context != NULL && event->type == NCCL_PROFILE_COLL)
    made = begin_v4(context, &event->coll.coll, event->rank, event->parent, group_of(&event->coll), 5, false);
  else if (event->type == NCCL_PROFILE_P2P)
    count_message(context, &event->p2p);
  else if (context != NULL && event->type == NCCL_PROFILE_CE_COLL)
    count_copy(context, &event->ce_coll);
  else if (event->type == NCCL_PROFILE_KERNEL_CHANNEL)
    made = begin_channel_v4(event->parent, &event->kernel_channel);
  *handle = pointer(made);
  return NCCL_SUCCESS;
}

/* Events that the next profiler asks for, or that NCCL must count, also come while zerotune's is not observing.
 * Channels are followed to the end of their collective. */
static bool is_followed_type(uint64_t type, const void *parent) {
  if (type == NCCL_PROFILE_KERNEL_CHANNEL) return parent != NULL;
  if (!zt_read(&zt_shared.observing)) return false;
  return type == NCCL_PROFILE_COLL || type == NCCL_PROFILE_COLL_API || type == NCCL_PROFILE_P2P ||
         type == NCCL_PROFILE_CE_COLL || type == NCCL_PROFILE_GROUP;
}

static nccl_result start_v7(void *context, void **handle, nccl_event_v7 *event) {
  *handle = NULL;
  const zt_communicator *const its = context;
  if (its != NULL && atomic_load_explicit(&its->is_uncounted, memory_order_relaxed)) return NCCL_SUCCESS;
  if (event->type == NCCL_PROFILE_KERNEL_CHANNEL)
    zt_shifts_reported(context, event->kernel_channel.start_ns);
  else if (event->type == NCCL_PROFILE_COLL && !event->coll_v7.is_symmetric)
    zt_shifts_launched(context, event->coll_v7.coll.coll.n_channels);
  if (!is_followed_type(event->type, event->parent)) return NCCL_SUCCESS;
  if (event->type == NCCL_PROFILE_COLL_API && !event->coll_api.graph_captured) {
    *handle = pointer(call_now());
    return NCCL_SUCCESS;
  }
  if (context == NULL || event->type != NCCL_PROFILE_COLL)
    return start_v5(context, handle, event);
  const nccl_coll_v7 *coll = &event->coll_v7;
  *handle = pointer(begin_v4(context, &coll->coll.coll, event->rank, event->parent, group_of(&coll->coll), 7,
                             coll->is_symmetric));
  return NCCL_SUCCESS;
}

/* ---- with a next profiler ---- */

typedef nccl_result (*start_function)(void *context, void **handle, void *event);

/* An API call whose handle is invalid by now was long ago: a graph's capture. */
static void *own_parent(int abi, uint64_t type, void *given) {
  const zt_handle own_handle = zt_pair_of_handle(given).own_handle;
  return pointer(own_handle == 0 && given != NULL && abi >= 5 && type == NCCL_PROFILE_COLL ? CAPTURED : own_handle);
}

static zt_handle start_own(int abi, zt_both_contexts *both, void *event, uint64_t type, start_function start) {
  void **parent = (void **)((char *)event + offsetof(nccl_event_v3, parent));
  void *const given = *parent;
  void *made = NULL;
  *parent = own_parent(abi, type, given);
  if (abi >= 7 || is_followed_type(type, *parent)) (void)start(both->communicator, &made, event);
  *parent = given;
  return handle_in(made);
}

/* A group needs a handle. An API call that is no capture gets one, too: without a handle it would count as a capture.
 * */
static bool is_worth_a_handle(zt_handle own_handle, uint64_t type, const void *next_handle) {
  if (type == NCCL_PROFILE_COLL_API) return own_handle == UNTRACKED || is_call(own_handle) || next_handle == NULL;
  return own_handle != UNTRACKED || (type == NCCL_PROFILE_GROUP && next_handle == NULL);
}

static nccl_result start_both(int abi, void *given, void **handle, void *event, uint64_t type, start_function start) {
  zt_both_contexts *both = zt_both_contexts_of(given);
  void *next_handle = given == NULL ? NULL : zt_next_profiler_begin(abi, both, given, event, type);
  const zt_handle own_handle = both == NULL ? 0 : start_own(abi, both, event, type, start);
  const bool is_kept = is_worth_a_handle(own_handle, type, next_handle);
  *handle = zt_handle_of_pair((zt_pair){next_handle, is_kept ? own_handle : 0});
  return NCCL_SUCCESS;
}

#define START(version)                                                                                             \
  static nccl_result untyped_start_v##version(void *context, void **handle, void *event) {                         \
    return start_v##version(context, handle, event);                                                               \
  }                                                                                                                \
  static nccl_result dispatch_v##version(void *context, void **handle, nccl_event_v##version *event) {                \
    if (!zt_has_next_profiler()) return start_v##version(context, handle, event);                                  \
    return start_both(version, context, handle, event, event->type, untyped_start_v##version);                     \
  }

#define start_v6 start_v5
START(3)
START(4)
START(5)
START(6)
START(7)
#undef start_v6

/* ---- the rest ---- */

static nccl_result stop(void *handle) {
  if (!zt_has_next_profiler()) {
    zt_event_stop(handle_in(handle));
    return NCCL_SUCCESS;
  }
  const zt_pair pair = zt_pair_of_handle(handle);
  zt_event_stop(pair.own_handle);
  if (pair.next_handle != NULL) zt_next_profiler_stop(pair.next_handle);
  return NCCL_SUCCESS;
}

static nccl_result record_for_other(void *handle, int state, nccl_event_state_args *args) {
  void *next_handle = zt_has_next_profiler() ? zt_pair_of_handle(handle).next_handle : NULL;
  if (next_handle != NULL) zt_next_profiler_record(next_handle, state, args);
  return NCCL_SUCCESS;
}

static nccl_result record_stop(void *handle, int state, nccl_event_state_args *args) {
  if (state == NCCL_STATE_KERNEL_CHANNEL_STOP && args != NULL &&
      (args->kernel_channel_stop_ns != 0 || zt_read(&zt_shared.timing_source_override) != 0))
    zt_channel_gpu_stop(zt_has_next_profiler() ? zt_pair_of_handle(handle).own_handle : handle_in(handle),
                        args->kernel_channel_stop_ns);
  return record_for_other(handle, state, args);
}

static _Atomic uint32_t abi_in_use;

uint32_t zerotune_profiler_abi(void) { return atomic_load_explicit(&abi_in_use, memory_order_relaxed); }

static nccl_result attach(const zt_profiler_start *start, uint32_t rank, void **context) {
  atomic_store_explicit(&abi_in_use, (uint32_t)start->abi, memory_order_relaxed);
  zt_communicator *communicator =
      zt_attach(ZT_PROFILER, start->comm_id, (size_t)start->n_ranks, (size_t)start->n_nodes, rank);
  *context = communicator;
  if (communicator == NULL) return NCCL_SUCCESS;
  communicator->mask = start->mask;
  if (start->abi >= 4) zt_shifts_add(communicator);
  /* After one kernel whose events were not asked for, NCCL would report times of an earlier kernel for each channel. */
  zt_mask_add(start->mask, NCCL_PROFILE_COLL | NCCL_PROFILE_KERNEL_CHANNEL |
                               (start->abi >= 6 ? NCCL_PROFILE_CE_COLL : 0),
              start->abi >= NCCL_COUNTS_REQUESTED_ONLY ? NCCL_PROFILE_KERNEL_CHANNEL : 0);
  *context = zt_next_profiler_init(communicator, start);
  if (*context == NULL) {
    zt_mask_remove(start->mask);
    zt_shifts_remove(communicator);
    zt_detach(communicator, ZT_PROFILER);
  }
  return NCCL_SUCCESS;
}

static nccl_result init_v3(void **context, int *mask) {
  return attach(&(zt_profiler_start){.abi = 3, .mask = mask}, ZT_RANK_UNKNOWN, context);
}

#define START_OF(version) \
  &(zt_profiler_start) { version, mask, comm_id, comm_name, n_nodes, n_ranks, rank, log }

static nccl_result init_v4(void **context, int *mask, const char *comm_name, uint64_t comm_id, int n_nodes,
                           int n_ranks, int rank, nccl_logger log) {
  return attach(START_OF(4), (uint32_t)rank, context);
}

#define INIT_NAMED(version)                                                                              \
  static nccl_result init_v##version(void **context, uint64_t comm_id, int *mask, const char *comm_name, \
                                     int n_nodes, int n_ranks, int rank, nccl_logger log) {              \
    return attach(START_OF(version), (uint32_t)rank, context);                                           \
  }

INIT_NAMED(5)
INIT_NAMED(6)
INIT_NAMED(7)

static nccl_result finalize(void *context) {
  zt_communicator *communicator = zt_next_profiler_end(context);
  if (communicator == NULL) return NCCL_SUCCESS;
  zt_mask_remove(communicator->mask);
  zt_events_end(communicator->owner);
  zt_shifts_remove(communicator);
  zt_detach(communicator, ZT_PROFILER);
  return NCCL_SUCCESS;
}

EXPORT const nccl_profiler_v3 ncclProfiler_v3 = {"zerotune", init_v3, dispatch_v3, stop, record_for_other, finalize};
EXPORT const nccl_profiler_v4 ncclProfiler_v4 = {"zerotune", init_v4, dispatch_v4, stop, record_stop, finalize};
EXPORT const nccl_profiler_v5 ncclProfiler_v5 = {"zerotune", init_v5, dispatch_v5, stop, record_stop, finalize};
EXPORT const nccl_profiler_v6 ncclProfiler_v6 = {"zerotune", init_v6, dispatch_v6, stop, record_stop, finalize};
EXPORT const nccl_profiler_v7 ncclProfiler_v7 = {"zerotune", init_v7, dispatch_v7, stop, record_stop, finalize};
