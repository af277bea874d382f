/* A kernel of NCCL's as it was launched. */
#ifndef ZEROTUNE_MOCK_LAUNCH_H
#define ZEROTUNE_MOCK_LAUNCH_H

#include "../mock_cuda.h"

typedef struct kernel kernel;

uint32_t mock_kernel_works(const kernel *one);
/* Tell NCCL's profiler when its works began and ended; at least one time each, and as many as it has works. */
void mock_kernel_ran(const kernel *one, const uint64_t *start_ns, const uint64_t *end_ns);
kernel *mock_kernel_copy(const kernel *one); /* NULL = no memory */
void mock_kernel_free(kernel *one);

/* ---- collectives.c ---- */

bool mock_is_priced(void);
/* Put a kernel into a stream, with the calls of this thread that it carries out. */
cuda_error mock_enqueue_launch(void *stream, kernel *launched, const mock_work *works, const char *device);

#endif
