/* NCCL's kernels: what was launched, and its times told to the counters that NCCL's profiler reads.
 *
 * Kernel arguments and device structs: src/include/device.h of each release; order of counter and time:
 * src/device/common.h (profiler).
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "mock_cuda.h"

#define RING_WORKS 65536u
#define PROFILER_SLOTS 64u
#define MAX_CHANNELS 64

/* ncclDevKernelArgs */
enum { ARGS_MASK = 8, ARGS_STORAGE = 16, ARGS_WORK_MASK = 20, ARGS_WORK_BUFFER = 24, ARGS_BATCHES = 32, BATCH_BYTES = 16 };
enum { STORAGE_ARGS = 0 };
enum { WORK_COLLECTIVE = 1 };
/* ncclDevWorkColl begins with its channels, one byte each */
enum { WORK_FIRST_CHANNEL = 0, WORK_LAST_CHANNEL = 1 };

typedef struct {
  uint8_t channel;
  uint32_t n_works;
} channel_works;

typedef struct {
  char *communicator;
  uint32_t n_channels;
  channel_works works[MAX_CHANNELS];
} kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static mock_work ring[RING_WORKS];
static uint64_t n_written, n_read, n_launches;
static bool recording;
static double duration_us = 10.0;

void mock_cuda_set_duration_us(double us) {
  pthread_mutex_lock(&lock);
  duration_us = us;
  pthread_mutex_unlock(&lock);
}

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

/* ---- what was launched ---- */

static void record(const mock_work *work) {
  if (n_written - n_read == RING_WORKS) return;
  ring[n_written++ % RING_WORKS] = *work;
}

/* Elements over all of a collective's channels: the first and the last have a share of their own. */
static uint64_t count_of(const char *work, uint32_t n_channels) {
  const int32_t at = mock_the_layout.work_counts;
  if (at < 0) return 0;
  const uint64_t lowest = u64_at(work, at), middle = u64_at(work, at + 8), highest = u64_at(work, at + 16);
  if (n_channels == 1) return lowest;
  return lowest + middle * (n_channels - 2) + highest;
}

static void record_batch(const char *args, const batch *one, uint32_t channel, mock_work *work) {
  const bool within_args = (uint8_t)args[ARGS_STORAGE] == STORAGE_ARGS;
  const char *const buffer = within_args ? args : pointer_at(args, ARGS_WORK_BUFFER);
  const uint32_t mask = within_args ? UINT32_MAX : u32_at(args, ARGS_WORK_MASK);
  uint32_t index = 0;
  for (uint64_t works = one->works; works != 0; works >>= 1, index++) {
    if (!(works & 1)) continue;
    const char *at = buffer + ((one->offset + index * (uint32_t)mock_the_layout.work_bytes) & mask);
    const uint8_t first = (uint8_t)at[WORK_FIRST_CHANNEL], last = (uint8_t)at[WORK_LAST_CHANNEL];
    if (channel != first || last < first || last >= MAX_CHANNELS) continue; /* told once, by its first channel */
    const uint32_t n_channels = last - first + 1u;
    work->channel_mask = (n_channels == 64 ? UINT64_MAX : (UINT64_C(1) << n_channels) - 1) << first;
    work->count = count_of(at, n_channels);
    work->function_id = one->function_id;
    record(work);
  }
}

/* ---- times ---- */

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Time before counter: the reader takes a slot for valid once its counter fits. */
static void tell(char *counters, uint32_t channel, uint64_t number, uint64_t time_ns) {
  if (!mock_the_layout.times) {
    atomic_store((_Atomic uint64_t *)(void *)counters + channel, number);
    return;
  }
  _Atomic uint64_t *slot = (_Atomic uint64_t *)(void *)counters + 2 * (PROFILER_SLOTS * channel + number % PROFILER_SLOTS);
  atomic_store(&slot[1], time_ns);
  atomic_store(&slot[0], number);
}

static void finish(const kernel *launch, uint64_t start_ns, uint64_t end_ns) {
  const mock_layout *layout = &mock_the_layout;
  if (layout->work_started < 0) return;
  char *const channels = pointer_at(launch->communicator, layout->channels);
  char *const started = pointer_at(launch->communicator, layout->work_started);
  char *const completed = pointer_at(launch->communicator, layout->work_completed);
  for (uint32_t i = 0; i < launch->n_channels; i++) {
    const uint32_t channel = launch->works[i].channel;
    char *const counter = channels + layout->channel_bytes * (int64_t)channel + layout->work_counter;
    uint64_t number = u64_at(counter, 0);
    for (uint32_t work = 0; work < launch->works[i].n_works; work++) {
      number++;
      if (started != NULL) tell(started, channel, number, start_ns);
      if (completed != NULL) tell(completed, channel, number, end_ns);
    }
    memcpy(counter, &number, sizeof number);
  }
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
  for (uint32_t channel = 0; channel < MAX_CHANNELS; channel++) {
    if (!(mask >> channel & 1)) continue;
    uint32_t n_works = 0, index = first_batch++;
    for (;;) {
      const batch one = batch_at(args, index);
      n_works += (uint32_t)__builtin_popcountll(one.works);
      if (recording && one.type == WORK_COLLECTIVE) record_batch(args, &one, channel, work);
      if (one.jump == 0) break;
      index += one.jump;
    }
    launch->works[launch->n_channels++] = (channel_works){(uint8_t)channel, n_works};
  }
  mock_let_proxies_run(launch->communicator, mask);
}

void mock_on_launch(void **parameters, void **extra, void *stream) {
  const char *const args = arguments_of(parameters, extra);
  pthread_mutex_lock(&lock);
  const uint64_t number = ++n_launches;
  if (!mock_the_layout.batches && parameters != NULL) /* 2.21: {&communicator, &channelMask, &works} */
    mock_let_proxies_run(pointer_at(parameters[0], 0), u64_at(parameters[1], 0));
  if (args != NULL && mock_the_layout.batches) {
    kernel launch = {.communicator = pointer_at(args, 0)};
    mock_work work = {.launch = number,
                      .communicator = (uint64_t)(uintptr_t)launch.communicator,
                      .stream = (uint64_t)(uintptr_t)stream,
                      .device = (uint32_t)mock_current_device()};
    read_launch(args, &launch, &work);
    const uint64_t start_ns = now_ns();
    finish(&launch, start_ns, start_ns + (uint64_t)(duration_us * 1000.0));
  }
  pthread_mutex_unlock(&lock);
}
