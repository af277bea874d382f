#include "events.h"

#include <stdatomic.h>
#include <time.h>

#include "../nccl_abi.h"
#include "../plan/shared_state.h"
#include "../records/records.h"
#include "passages.h"
#include "shifts.h"

#define N_EVENTS 1024u
#define N_CHANNELS 128u /* RCCL's; NCCL has 64 */

/* TimingSource of store/records.py */
enum { TIMING_NONE = 0, TIMING_GPU_KERNEL = 1, TIMING_CPU_KERNEL = 2, TIMING_CPU_COLLECTIVE = 3 };

enum { IDLE = 0, STARTED_BY_CPU, STARTED_BY_GPU, STOPPED_BY_CPU, STOPPED_BY_GPU, NOT_TIMED };
#define NO_TIME UINT64_MAX

/* Over the channels of one collective */
typedef struct {
  uint64_t first_start_ns, last_start_ns, first_stop_ns, last_stop_ns;
} zt_channel_times;

typedef struct {
  _Atomic uint64_t tag; /* generation << 8 | one of the above */
  _Atomic uint64_t start_ns;
  _Atomic uint64_t stop_ns; /* NO_TIME until it is reported */
} channel_slot;

/* Sums over the members of a run that are over; a single event is a run of one */
typedef struct {
  _Atomic uint64_t bytes;
  _Atomic uint64_t first_start_ns, last_stop_ns;
  _Atomic uint64_t channels[N_CHANNELS / 64]; /* a bit each */
  _Atomic uint32_t sources; /* a bit for each TimingSource; TIMING_NONE: some times are missing or impossible */
} fused_run;

typedef struct {
  /* generation << 32 | parts not over yet: host, kernel, later members of its run; 0 parts = free */
  _Alignas(64) _Atomic uint64_t pending;
  _Atomic uint64_t host_part; /* generation << 8 | 1 when over */
  _Atomic uint64_t kernel_part;
  _Atomic uint64_t n_started, n_stopped; /* generation << 32 | channels; n_started: only if not `is_certain` */
  _Atomic uint64_t group;
  _Atomic uint32_t n_expected; /* channels */
  _Atomic bool is_certain;     /* `n_expected` is exact */
  _Atomic bool is_mixed, is_reported, is_late, is_followed; /* followed by a kernel of another group */
  _Atomic uint64_t earlier;     /* the previous event of the communicator */
  _Atomic(const void *) checked; /* as in `start`; atomic, since NCCL's thread may read it while the event is reused */
  _Atomic uint64_t number;
  fused_run run;
  _Atomic uint32_t next_free; /* 1 + index */
  _Atomic uint64_t owner;
  uint64_t host_start_ns, host_stop_ns;
  zt_event_start start;
  channel_slot channels[N_CHANNELS];
} event;

static event pool[N_EVENTS];
static _Atomic uint64_t free_list;   /* uses << 32 | 1 + index of the first free event that was used before */
static _Atomic uint32_t n_ever_used; /* later events were never used */
static _Atomic uint64_t n_timed, n_lost, n_abandoned, n_impossible, n_inseparable;

#define READ(word) atomic_load_explicit(&(word), memory_order_acquire)
#define WRITE(word, value) atomic_store_explicit(&(word), (value), memory_order_release)

uint64_t zt_cpu_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- handles: generation << 32 | 1 + channel, 0 for the event itself, << 16 | 1 + index ---- */

static zt_handle handle_of(const event *its, uint32_t generation, uint32_t one_plus_channel) {
  return (uint64_t)generation << 32 | (uint64_t)one_plus_channel << 16 | (uint64_t)(its - pool + 1);
}

static uint32_t generation_of(zt_handle handle) { return (uint32_t)(handle >> 32); }

static uint32_t parts(uint64_t pending) { return (uint32_t)pending; }

/* The event, if it is in use and the handle is of this use; else NULL. */
static event *event_of(zt_handle handle) {
  const uint64_t index = handle & 0xFFFFu;
  if (index == 0 || index > N_EVENTS) return NULL;
  event *its = &pool[index - 1];
  const uint64_t pending = READ(its->pending);
  return pending >> 32 == generation_of(handle) && parts(pending) != 0 ? its : NULL;
}

static channel_slot *channel_of(event *its, zt_handle handle) {
  return &its->channels[((handle >> 16 & 0xFFu) - 1) % N_CHANNELS];
}

/* Count one more channel of this generation; returns their number, 0 if the event has another generation. */
static uint32_t count_up(_Atomic uint64_t *count, uint32_t generation) {
  uint64_t now = READ(*count);
  do {
    if (now >> 32 != generation) return 0;
  } while (!atomic_compare_exchange_weak(count, &now, now + 1));
  return (uint32_t)now + 1;
}

/* ---- the pool ---- */

static event *take_free(void) {
  uint64_t head = READ(free_list);
  while ((uint32_t)head != 0) {
    event *first = &pool[(uint32_t)head - 1];
    const uint64_t rest = ((head >> 32) + 1) << 32 | READ(first->next_free);
    if (atomic_compare_exchange_weak(&free_list, &head, rest)) return first;
  }
  const uint32_t index = atomic_fetch_add(&n_ever_used, READ(n_ever_used) < N_EVENTS ? 1 : 0);
  return index < N_EVENTS ? &pool[index] : NULL;
}

static void return_free(event *its) {
  uint64_t head = READ(free_list), mine;
  do {
    WRITE(its->next_free, (uint32_t)head);
    mine = ((head >> 32) + 1) << 32 | (uint64_t)(its - pool + 1);
  } while (!atomic_compare_exchange_weak(&free_list, &head, mine));
}

/* ---- the end of an event ---- */

/* Whether all channels are timed, and by one clock. */
static bool kernel_times(event *its, uint32_t generation, zt_channel_times *times, uint64_t *channels, uint8_t *source) {
  *times = (zt_channel_times){.first_start_ns = UINT64_MAX, .first_stop_ns = UINT64_MAX};
  const bool is_certain = its->start.channels_are_certain;
  const uint32_t n_over = (uint32_t)READ(its->n_stopped);
  const uint32_t n_used = is_certain ? n_over : (uint32_t)READ(its->n_started);
  if (n_over == 0 || (is_certain && n_over < its->start.n_channels)) return false;
  uint32_t n_gpu = 0, n_cpu = 0, n_untimed = 0;
  for (uint32_t i = 0; i < N_CHANNELS && n_gpu + n_cpu + n_untimed < n_used; i++) {
    channel_slot *slot = &its->channels[i];
    const uint64_t tag = READ(slot->tag);
    if (tag >> 8 != generation) continue;
    const uint32_t state = tag & 0xFFu;
    channels[i / 64] |= UINT64_C(1) << i % 64;
    n_gpu += state == STOPPED_BY_GPU;
    n_cpu += state == STOPPED_BY_CPU;
    n_untimed += state != STOPPED_BY_GPU && state != STOPPED_BY_CPU;
    const uint64_t start = READ(slot->start_ns), stop = READ(slot->stop_ns);
    if (start < times->first_start_ns) times->first_start_ns = start;
    if (start > times->last_start_ns) times->last_start_ns = start;
    if (stop < times->first_stop_ns) times->first_stop_ns = stop;
    if (stop > times->last_stop_ns) times->last_stop_ns = stop;
  }
  const uint32_t override = zt_read(&zt_shared.timing_source_override);
  *source = n_cpu > 0 ? TIMING_CPU_KERNEL : override != 0 ? (uint8_t)override : TIMING_GPU_KERNEL;
  return n_untimed == 0 && (n_gpu == 0) != (n_cpu == 0) && times->last_stop_ns >= times->first_start_ns;
}

/* Channels of one work run at the same time, except in a fused run, whose works may follow each other on a channel. */
static bool is_impossible(const event *its, const zt_channel_times *times, uint8_t source) {
  if (source != TIMING_GPU_KERNEL) return false;
  const bool never_ran_together =
      !(its->start.record.flags & ZT_FLAG_FUSED) && times->last_start_ns > times->first_stop_ns;
  const void *checked = READ(its->checked);
  const bool is_foreign = checked != NULL && zt_shifts_is_foreign(checked, times->first_start_ns, its->start.called_us);
  const uint64_t number = READ(its->number);
  const bool is_late = READ(its->is_late) || (number != 0 && zt_shifts_are_late(checked, number));
  if (!never_ran_together && !is_foreign && !is_late) {
    if (number != 0) zt_shifts_add_duration(checked, times->last_stop_ns - times->first_start_ns);
    return false;
  }
  atomic_fetch_add_explicit(&n_impossible, 1, memory_order_relaxed);
  return true;
}

static void store_min(_Atomic uint64_t *least, uint64_t value) {
  uint64_t now = READ(*least);
  while (value < now && !atomic_compare_exchange_weak(least, &now, value)) continue;
}

static void store_max(_Atomic uint64_t *most, uint64_t value) {
  uint64_t now = READ(*most);
  while (value > now && !atomic_compare_exchange_weak(most, &now, value)) continue;
}

/* Add the kernel's times to those of the run. */
static void add_times(event *its, uint32_t generation, event *whole) {
  zt_channel_times times;
  uint64_t channels[N_CHANNELS / 64] = {0};
  uint8_t *source = &its->start.record.timing_source;
  const bool is_timed = kernel_times(its, generation, &times, channels, source) && !is_impossible(its, &times, *source);
  atomic_fetch_or(&whole->run.sources, 1u << (is_timed ? *source : TIMING_NONE));
  atomic_fetch_add(&whole->run.bytes, its->start.member_bytes);
  if (!is_timed) return;
  store_min(&whole->run.first_start_ns, times.first_start_ns);
  store_max(&whole->run.last_stop_ns, times.last_stop_ns);
  for (uint32_t i = 0; i < N_CHANNELS / 64; i++) atomic_fetch_or(&whole->run.channels[i], channels[i]);
}

static bool is_timed_by_one_clock(event *its) {
  const uint32_t sources = READ(its->run.sources);
  return !(sources & 1u << TIMING_NONE) && (sources & (sources - 1)) == 0;
}

static bool is_separable(event *its) {
  if (!READ(its->is_mixed) && READ(its->run.bytes) == its->start.record.message_bytes) return true;
  atomic_fetch_add_explicit(&n_inseparable, 1, memory_order_relaxed);
  return false;
}

static void report(event *its, bool host_is_over) {
  zt_record *record = &its->start.record;
  const bool has_kernel_times = is_timed_by_one_clock(its) && is_separable(its);
  const uint64_t start_ns = has_kernel_times ? READ(its->run.first_start_ns) : its->host_start_ns;
  const uint64_t stop_ns = has_kernel_times ? READ(its->run.last_stop_ns) : its->host_stop_ns;
  if (has_kernel_times) {
    uint32_t n_channels = 0;
    for (uint32_t i = 0; i < N_CHANNELS / 64; i++) n_channels += (uint32_t)__builtin_popcountll(READ(its->run.channels[i]));
    record->n_channels = (uint8_t)n_channels;
    if (its->start.its_class != NULL) zt_class_saw_channels(its->start.its_class, record->n_channels);
    if (host_is_over) zt_passage_timed(its->start.passage, stop_ns - start_ns);
  } else {
    record->timing_source = TIMING_CPU_COLLECTIVE;
  }
  if (host_is_over) {
    record->start_ns = (int64_t)start_ns;
    record->duration_us = (float)((double)(stop_ns - start_ns) * 1e-3);
    record->flags |= ZT_FLAG_TIMED;
    atomic_fetch_add_explicit(&n_timed, 1, memory_order_relaxed);
    zt_record_push(record);
  } else {
    atomic_fetch_add_explicit(&n_abandoned, 1, memory_order_relaxed);
  }
}

static void release_part(event *its, uint32_t generation);

/* All parts are over, or the communicator is being destroyed: the caller owns the event. */
static void finish(event *its, uint32_t generation) {
  const zt_handle run = its->start.run;
  event *whole = run != 0 ? event_of(run) : its; /* NULL: abandoned */
  if (whole != NULL) add_times(its, generation, whole);
  if (whole == its) report(its, READ(its->host_part) == ((uint64_t)generation << 8 | 1));
  WRITE(its->owner, 0);
  return_free(its);
  if (whole != NULL && whole != its) release_part(whole, generation_of(run));
}

static void release_part(event *its, uint32_t generation) {
  uint64_t pending = READ(its->pending);
  do {
    if (pending >> 32 != generation || parts(pending) == 0) return;
  } while (!atomic_compare_exchange_weak(&its->pending, &pending, pending - 1));
  if (parts(pending) == 1) finish(its, generation);
}

/* One part is over; only the first call for this generation counts. */
static void end_part(event *its, _Atomic uint64_t *part, uint32_t generation) {
  uint64_t open = (uint64_t)generation << 8;
  if (atomic_compare_exchange_strong(part, &open, open | 1)) release_part(its, generation);
}

/* ---- events ---- */

/* Add a member, if the run's first member is still in use. */
static bool join(zt_handle run) {
  event *whole = event_of(run);
  if (whole == NULL) return false;
  uint64_t pending = READ(whole->pending);
  do {
    if (pending >> 32 != generation_of(run) || parts(pending) == 0) return false;
  } while (!atomic_compare_exchange_weak(&whole->pending, &pending, pending + 1));
  return true;
}

zt_handle zt_event_begin(const zt_event_start *start, _Atomic uint64_t *latest) {
  event *its = take_free();
  if (its != NULL && start->run != 0 && !join(start->run)) {
    return_free(its);
    its = NULL;
  }
  if (its == NULL) {
    atomic_fetch_add_explicit(&n_lost, 1, memory_order_relaxed);
    return 0;
  }
  const uint32_t generation = (uint32_t)(READ(its->pending) >> 32) + 1;
  its->start = *start;
  its->host_start_ns = zt_cpu_ns();
  WRITE(its->n_started, (uint64_t)generation << 32);
  WRITE(its->n_stopped, (uint64_t)generation << 32);
  WRITE(its->group, start->group);
  WRITE(its->n_expected, start->n_channels);
  WRITE(its->is_certain, start->channels_are_certain);
  WRITE(its->is_mixed, start->is_mixed);
  WRITE(its->is_reported, false);
  WRITE(its->is_late, false);
  WRITE(its->is_followed, false);
  WRITE(its->earlier, 0);
  WRITE(its->checked, start->checked);
  WRITE(its->number, start->number);
  WRITE(its->run.bytes, 0);
  WRITE(its->run.first_start_ns, NO_TIME);
  WRITE(its->run.last_stop_ns, 0);
  for (uint32_t i = 0; i < N_CHANNELS / 64; i++) WRITE(its->run.channels[i], 0);
  WRITE(its->run.sources, 0);
  WRITE(its->host_part, (uint64_t)generation << 8);
  WRITE(its->kernel_part, (uint64_t)generation << 8);
  WRITE(its->owner, start->owner);
  WRITE(its->pending, (uint64_t)generation << 32 | (start->n_channels > 0 ? 2 : 1));
  const zt_handle handle = handle_of(its, generation, 0);
  if (start->n_channels > 0) WRITE(its->earlier, atomic_exchange(latest, handle));
  return handle;
}

static void host_stop(zt_handle handle) {
  event *its = event_of(handle);
  if (its == NULL || READ(its->host_part) != (uint64_t)generation_of(handle) << 8) return;
  its->host_stop_ns = zt_cpu_ns();
  end_part(its, &its->host_part, generation_of(handle));
}

/* NCCL launches a communicator's kernels one after another, and polls all of them in turn. It drops a channel whose
 * start and end both fall between two polls (2.27 to 2.30: src/transport/profiler.cc). So once a later kernel has
 * ended, it reports nothing more of earlier ones: they are over without times, so that their events can be reused. */
static void kernel_is_over(event *its, uint32_t generation) {
  for (zt_handle handle = READ(its->earlier); event_of(handle) != NULL;) {
    event *earlier = event_of(handle);
    const zt_handle next = READ(earlier->earlier);
    if (READ(earlier->group) != READ(its->group)) end_part(earlier, &earlier->kernel_part, generation_of(handle));
    handle = next;
  }
  end_part(its, &its->kernel_part, generation);
}

/* Ends a kernel whose number of channels is unknown, if another group's kernel has started and all its channels that
 * have started are over. */
static void end_if_stopped(event *its, uint32_t generation) {
  const uint64_t stopped = READ(its->n_stopped);
  const bool may_be_over = READ(its->is_followed) && !READ(its->is_certain);
  if (may_be_over && (uint32_t)stopped > 0 && stopped == READ(its->n_started)) kernel_is_over(its, generation);
}

static void end_earlier(event *running) {
  for (zt_handle handle = READ(running->earlier); event_of(handle) != NULL;) {
    event *its = event_of(handle);
    const zt_handle next = READ(its->earlier);
    if (READ(its->group) != READ(running->group)) {
      WRITE(its->is_followed, true);
      end_if_stopped(its, generation_of(handle));
    }
    handle = next;
  }
}

zt_handle zt_channel_begin(zt_handle handle, uint32_t channel, bool has_gpu_time, uint64_t gpu_ns) {
  event *its = event_of(handle);
  if (its == NULL || channel >= N_CHANNELS) return 0;
  const uint32_t generation = generation_of(handle);
  channel_slot *slot = &its->channels[channel];
  uint64_t tag = READ(slot->tag);
  const uint64_t started = (uint64_t)generation << 8 | (has_gpu_time ? STARTED_BY_GPU : STARTED_BY_CPU);
  if (tag >> 8 == generation || !atomic_compare_exchange_strong(&slot->tag, &tag, started)) return 0;
  WRITE(slot->start_ns, has_gpu_time ? gpu_ns : zt_cpu_ns());
  WRITE(slot->stop_ns, NO_TIME);
  if (!READ(its->is_certain)) count_up(&its->n_started, generation);
  if (!atomic_exchange(&its->is_reported, true)) {
    const void *checked = READ(its->checked);
    const uint64_t number = READ(its->number); /* 0 without `checked` */
    if (event_of(handle) == NULL) return 0;    /* the event is reused: both may be of its next use */
    if (number != 0 && has_gpu_time) zt_shifts_started(checked, number, gpu_ns);
    if (number != 0 && zt_shifts_are_late(checked, number)) WRITE(its->is_late, true);
    end_earlier(its);
  }
  return handle_of(its, generation, channel + 1);
}

void zt_channel_gpu_stop(zt_handle handle, uint64_t gpu_ns) {
  event *its = event_of(handle);
  if (its == NULL) return;
  channel_slot *slot = channel_of(its, handle);
  if (READ(slot->tag) == ((uint64_t)generation_of(handle) << 8 | STARTED_BY_GPU)) WRITE(slot->stop_ns, gpu_ns);
}

static void channel_stop(zt_handle handle) {
  event *its = event_of(handle);
  if (its == NULL) return;
  channel_slot *slot = channel_of(its, handle);
  const uint32_t generation = generation_of(handle);
  uint64_t tag = READ(slot->tag);
  const uint32_t state = tag & 0xFFu;
  if (tag >> 8 != generation || state >= STOPPED_BY_CPU) return;
  if (state == STARTED_BY_CPU) WRITE(slot->stop_ns, zt_cpu_ns());
  const uint32_t stopped = state == STARTED_BY_CPU           ? STOPPED_BY_CPU
                           : READ(slot->stop_ns) != NO_TIME ? STOPPED_BY_GPU
                                                             : NOT_TIMED;
  if (!atomic_compare_exchange_strong(&slot->tag, &tag, (uint64_t)generation << 8 | stopped)) return;
  if (count_up(&its->n_stopped, generation) == READ(its->n_expected)) kernel_is_over(its, generation);
  end_if_stopped(its, generation);
}

void zt_event_stop(zt_handle handle) {
  if (handle >> 16 & 0xFFu)
    channel_stop(handle);
  else
    host_stop(handle);
}

void zt_event_mix(zt_handle handle) {
  event *its = event_of(handle);
  if (its != NULL) WRITE(its->is_mixed, true);
}

void zt_events_end(uint64_t owner) {
  const uint32_t n_used = READ(n_ever_used) < N_EVENTS ? READ(n_ever_used) : N_EVENTS;
  for (uint32_t i = 0; i < n_used; i++) {
    event *its = &pool[i];
    if (READ(its->owner) != owner) continue;
    uint64_t pending = READ(its->pending);
    while (parts(pending) != 0 && READ(its->owner) == owner) {
      const uint64_t over = pending & ~UINT64_C(0xFFFFFFFF);
      if (!atomic_compare_exchange_weak(&its->pending, &pending, over)) continue;
      finish(its, (uint32_t)(over >> 32));
      break;
    }
  }
}

void zt_events_count(zt_counters *out) {
  out->n_timed = READ(n_timed);
  out->n_lost_events = READ(n_lost);
  out->n_abandoned_events = READ(n_abandoned);
  out->n_impossible_times = READ(n_impossible);
  out->n_inseparable = READ(n_inseparable);
}

void zt_events_reset(void) {
  WRITE(n_timed, 0);
  WRITE(n_lost, 0);
  WRITE(n_abandoned, 0);
  WRITE(n_impossible, 0);
  WRITE(n_inseparable, 0);
}
