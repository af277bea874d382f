/* A kernel of NCCL's as it was launched. */
#ifndef ZEROTUNE_MOCK_LAUNCH_H
#define ZEROTUNE_MOCK_LAUNCH_H

#include "../mock_cuda.h"

#define NO_WORK UINT32_MAX

/* One work on one channel: the unit in which NCCL's profiler counts. */
typedef struct {
  uint8_t channel;
  uint32_t work; /* number within the launch, NO_WORK for what is no collective */
} step;

typedef struct {
  char *communicator;
  uint32_t n_works, n_steps, room;
  step *steps; /* of each channel in the order in which it runs them */
} kernel;

/* Tell NCCL's profiler when its works began and ended; at least one time each, and as many as it has works. */
void mock_kernel_ran(const kernel *one, const uint64_t *start_ns, const uint64_t *end_ns);

/* Put a kernel into a stream, with the calls of this thread that it carries out; its steps are taken. */
MOCK_ADDED cuda_error mock_enqueue_launch(void *stream, const kernel *launched, const mock_work *works);

#endif
