/* NCCL's kernels: records launched collectives, and writes their times to the counters that NCCL's profiler reads.
 *
 * Kernel arguments and device structs: src/include/device.h of each release; order of counter and time:
 * src/device/common.h (profiler).
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "launch.h"

#define RING_WORKS 65536u
#define OWN_WORKS 4096u /* of one group */
#define PROFILER_SLOTS 64u
#define MAX_CHANNELS 64

/* ncclDevKernelArgs */
enum { ARGS_MASK = 8, ARGS_STORAGE = 16, ARGS_WORK_MASK = 20, ARGS_WORK_BUFFER = 24, ARGS_BATCHES = 32, BATCH_BYTES = 16 };
enum { STORAGE_ARGS = 0 };
enum { WORK_P2P = 0, WORK_COLLECTIVE = 1, WORK_REGISTERED = 2 };
/* ncclDevWorkColl begins with its channels, one byte each */
enum { WORK_FIRST_CHANNEL = 0, WORK_LAST_CHANNEL = 1 };
/* profilerEnabled, for collectives and for ncclDevWorkP2p: byte and bit */
enum { COLLECTIVE_WATCHED = 3, COLLECTIVE_WATCHED_BIT = 0x80, P2P_WATCHED = 46, P2P_WATCHED_BIT = 0x40 };
/* size of ncclDevWorkP2p and ncclDevWorkBcast; size of the rest of ncclDevWorkCollReg after a collective's work */
enum { OTHER_WORK_BYTES = 48, REGISTERED_BYTES = 192 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static mock_work ring[RING_WORKS];
static uint64_t n_written, n_read, n_launches;
static bool recording;
static double duration_us = 10.0;
static _Atomic uint64_t timer_step_ns = 1;
/* Works of this thread's latest launch. */
static _Thread_local mock_work own[OWN_WORKS];

void mock_cuda_set_duration_us(double us) {
  pthread_mutex_lock(&lock);
  duration_us = us;
  pthread_mutex_unlock(&lock);
}

void mock_cuda_set_timer_step_ns(uint64_t step_ns) { atomic_store(&timer_step_ns, step_ns > 0 ? step_ns : 1); }

void mock_cuda_set_recording(int on) {
  pthread_mutex_lock(&lock);
  recording = on != 0;
  pthread_mutex_unlock(&lock);
}

size_t mock_cuda_drain(mock_work *out, size_t max_works) {
  pthread_mutex_lock(&lock);
  size_t n = 0;
  while (n < max_works && n_read < n_written) out[n++] = ring[n_read++ % RING_WORKS];
  pthread_mutex_unlock(&lock);
  return n;
}

/* ---- reading NCCL's structs ---- */

static uint64_t u64_at(const char *base, int64_t offset) {
  uint64_t value;
  memcpy(&value, base + offset, sizeof value);
  return value;
}

static uint32_t u32_at(const char *base, int64_t offset) {
  uint32_t value;
  memcpy(&value, base + offset, sizeof value);
  return value;
}

static char *pointer_at(const char *base, int64_t offset) { return (char *)(uintptr_t)u64_at(base, offset); }

typedef struct {
  uint32_t jump, type, function_id, offset;
  uint64_t works;
} batch;

/* {nextJump:14, nextExtends:1, workType:2, funcId:15}, offsetBase, offsetBitset */
static batch batch_at(const char *args, uint32_t index) {
  const char *at = args + ARGS_BATCHES + BATCH_BYTES * index;
  const uint32_t flags = u32_at(at, 0);
  return (batch){flags & 0x3fff, flags >> 15 & 3, flags >> 17 & (uint32_t)mock_the_layout.function_mask, u32_at(at, 4), u64_at(at, 8)};
}

/* ---- recording ---- */

static void record(const mock_work *work) {
  own[work->number] = *work;
  if (recording && n_written - n_read < RING_WORKS) ring[n_written++ % RING_WORKS] = *work;
}

static void add_step(kernel *launch, uint32_t channel, uint32_t work) {
  if (launch->n_steps == launch->room) {
    const uint32_t room = launch->room == 0 ? MAX_CHANNELS : 2 * launch->room;
    step *const grown = realloc(launch->steps, room * sizeof *grown);
    if (grown == NULL) return;
    launch->steps = grown;
    launch->room = room;
  }
  launch->steps[launch->n_steps++] = (step){(uint8_t)channel, work};
}

/* Elements over all of a collective's channels: the first and the last channel have other counts. */
static uint64_t count_of(const char *work, uint32_t n_channels) {
  const int32_t at = mock_the_layout.work_counts;
  if (at < 0) return 0;
  const uint64_t lowest = u64_at(work, at), middle = u64_at(work, at + 8), highest = u64_at(work, at + 16);
  if (n_channels == 1) return lowest;
  return lowest + middle * (n_channels - 2) + highest;
}

/* {chunkGrainsLo:21, chunkGrainsMid:21, chunkGrainsHi:21}, after the counts */
static uint32_t chunk_grains_of(const char *work) {
  const int32_t at = mock_the_layout.work_counts;
  return at < 0 ? 0 : (uint32_t)u64_at(work, at + 24) & 0x1fffff;
}

/* The number of the work at this place in the buffer. Mostly it is `guess`, since channels of a work are consecutive.
 * */
static uint32_t number_of(const uint64_t *places, uint32_t n, uint64_t place, uint32_t guess) {
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t at = (guess + i) % n;
    if (places[at] == place) return at;
  }
  return NO_WORK;
}

static uint32_t work_bytes(uint32_t type) {
  const uint32_t of_collective = (uint32_t)mock_the_layout.work_bytes;
  if (type == WORK_COLLECTIVE) return of_collective;
  return type == WORK_REGISTERED ? of_collective + REGISTERED_BYTES : OTHER_WORK_BYTES;
}

/* Whether host and device count it. They must agree: otherwise the host reads times of earlier works. Grouped
 * broadcasts have no mark, so a host that counts marked works only does not count them. */
static bool is_counted(const char *work, uint32_t type) {
  if (!mock_the_layout.counts_watched_only) return true;
  if (type == WORK_P2P) return work[P2P_WATCHED] & P2P_WATCHED_BIT;
  return (type == WORK_COLLECTIVE || type == WORK_REGISTERED) && work[COLLECTIVE_WATCHED] & COLLECTIVE_WATCHED_BIT;
}

typedef struct {
  uint64_t places[OWN_WORKS];
  uint32_t latest;
} known_works;

static void read_batch(const char *args, const batch *one, uint32_t channel, kernel *launch, known_works *known,
                       mock_work *work) {
  const bool within_args = (uint8_t)args[ARGS_STORAGE] == STORAGE_ARGS;
  const char *const buffer = within_args ? args : pointer_at(args, ARGS_WORK_BUFFER);
  const uint32_t mask = within_args ? UINT32_MAX : u32_at(args, ARGS_WORK_MASK);
  uint32_t index = 0;
  for (uint64_t works = one->works; works != 0; works >>= 1, index++) {
    if (!(works & 1)) continue;
    const uint64_t place = (one->offset + index * work_bytes(one->type)) & mask;
    const char *at = buffer + place;
    const uint8_t first = (uint8_t)at[WORK_FIRST_CHANNEL], last = (uint8_t)at[WORK_LAST_CHANNEL];
    uint32_t number = NO_WORK;
    if (one->type == WORK_COLLECTIVE) {
      number = number_of(known->places, launch->n_works, place, known->latest + 1);
      if (number == NO_WORK && last >= first && last < MAX_CHANNELS && launch->n_works < OWN_WORKS) {
        number = launch->n_works++;
        known->places[number] = place;
        const uint32_t n_channels = last - first + 1u;
        work->channel_mask = (n_channels == 64 ? UINT64_MAX : (UINT64_C(1) << n_channels) - 1) << first;
        work->count = count_of(at, n_channels);
        work->chunk_grains = chunk_grains_of(at);
        work->function_id = one->function_id;
        work->number = number;
        record(work);
      }
      if (number != NO_WORK) known->latest = number;
    }
    if (is_counted(at, one->type)) add_step(launch, channel, number);
  }
}

/* ---- times ---- */

/* Time before counter: a slot is valid for the reader once it has the expected counter. */
static void report(char *counters, uint32_t channel, uint64_t number, uint64_t time_ns) {
  if (!mock_the_layout.times) {
    atomic_store((_Atomic uint64_t *)(void *)counters + channel, number);
    return;
  }
  _Atomic uint64_t *slot = (_Atomic uint64_t *)(void *)counters + 2 * (PROFILER_SLOTS * channel + number % PROFILER_SLOTS);
  atomic_store(&slot[1], time_ns - time_ns % atomic_load(&timer_step_ns));
  atomic_store(&slot[0], number);
}

/* Writes the times of each work; a work that is no collective gets those of the last. */
static void finish(const kernel *launch, const uint64_t *start_ns, const uint64_t *end_ns) {
  const mock_layout *layout = &mock_the_layout;
  if (layout->work_started < 0) return;
  char *const channels = pointer_at(launch->communicator, layout->channels);
  char *const started = pointer_at(launch->communicator, layout->work_started);
  char *const completed = pointer_at(launch->communicator, layout->work_completed);
  for (uint32_t i = 0; i < launch->n_steps; i++) {
    const uint32_t channel = launch->steps[i].channel, work = launch->steps[i].work;
    const uint32_t place = work != NO_WORK ? work : launch->n_works != 0 ? launch->n_works - 1 : 0;
    char *const counter = channels + layout->channel_bytes * (int64_t)channel + layout->work_counter;
    const uint64_t number = u64_at(counter, 0) + 1;
    if (started != NULL) report(started, channel, number, start_ns[place]);
    if (completed != NULL) report(completed, channel, number, end_ns[place]);
    memcpy(counter, &number, sizeof number);
  }
}

void mock_kernel_ran(const kernel *one, const uint64_t *start_ns, const uint64_t *end_ns) {
  pthread_mutex_lock(&lock);
  finish(one, start_ns, end_ns);
  pthread_mutex_unlock(&lock);
}

/* For a kernel without modelled times. */
static void finish_now(const kernel *launch) {
  uint64_t start_ns[OWN_WORKS], end_ns[OWN_WORKS];
  if (duration_us < 0) return;
  const uint64_t now = mock_now_ns(), end = now + (uint64_t)(duration_us * 1000.0);
  for (uint32_t i = 0; i == 0 || i < launch->n_works; i++) start_ns[i] = now, end_ns[i] = end;
  finish(launch, start_ns, end_ns);
}

/* ---- a launch ---- */

static char *arguments_of(void **parameters, void **extra) {
  for (size_t i = 0; extra != NULL && extra[i] != LAUNCH_PARAM_END; i += 2)
    if (extra[i] == LAUNCH_PARAM_BUFFER_POINTER) return extra[i + 1];
  return parameters != NULL ? parameters[0] : NULL;
}

static void read_launch(const char *args, kernel *launch, mock_work *work) {
  const uint64_t mask = u64_at(args, ARGS_MASK);
  uint32_t first_batch = 0; /* a channel's first batch is its rank among the mask's bits */
  known_works known; /* not cleared: only the first n_works places are read */
  known.latest = 0;
  for (uint32_t channel = 0; channel < MAX_CHANNELS; channel++) {
    if (!(mask >> channel & 1)) continue;
    for (uint32_t index = first_batch++;;) {
      const batch one = batch_at(args, index);
      read_batch(args, &one, channel, launch, &known, work);
      if (one.jump == 0) break;
      index += one.jump;
    }
  }
}

cuda_error mock_on_launch(void **parameters, void **extra, void *stream) {
  const char *const args = arguments_of(parameters, extra);
  if (args == NULL || !mock_the_layout.batches) return CUDA_SUCCESS; /* launches of 2.21 cannot be read */
  const bool is_priced = mock_is_priced != NULL && mock_is_priced();
  pthread_mutex_lock(&lock);
  kernel launch = {.communicator = pointer_at(args, 0)};
  mock_work work = {.launch = ++n_launches,
                    .communicator = (uint64_t)(uintptr_t)launch.communicator,
                    .stream = (uint64_t)(uintptr_t)stream,
                    .device = (uint32_t)mock_current_device()};
  read_launch(args, &launch, &work);
  mock_let_proxies_run(launch.communicator, u64_at(args, ARGS_MASK));
  if (!is_priced) {
    finish_now(&launch);
    free(launch.steps);
  }
  pthread_mutex_unlock(&lock);
  return is_priced ? mock_enqueue_launch(stream, &launch, own) : CUDA_SUCCESS;
}
