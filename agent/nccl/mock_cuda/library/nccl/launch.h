/* A launched kernel of NCCL. */
#ifndef ZEROTUNE_MOCK_LAUNCH_H
#define ZEROTUNE_MOCK_LAUNCH_H

#include "../mock_cuda.h"

#define NO_WORK UINT32_MAX

/* One work on one channel: the unit in which NCCL's profiler counts. */
typedef struct {
  uint8_t channel;
  uint32_t work; /* number within the launch; NO_WORK = not a collective */
} step;

typedef struct {
  char *communicator;
  uint32_t n_works, n_steps, room;
  step *steps; /* each channel's steps are in the order in which it runs them */
} kernel;

/* Report to NCCL's profiler when works began and ended: a time for each of n_works, but at least one. */
void mock_kernel_ran(const kernel *one, const uint64_t *start_ns, const uint64_t *end_ns);

/* Enqueue a kernel and this thread's calls in it on a stream; takes ownership of its steps. */
MOCK_ADDED cuda_error mock_enqueue_launch(void *stream, const kernel *launched, const mock_work *works);

#endif
