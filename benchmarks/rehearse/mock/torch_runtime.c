/* cudart as torch calls it beside NCCL: on a GPU whose streams take their time. */
#include <stdlib.h>
#include <string.h>

#include "streams.h"

#define UNUSED __attribute__((unused))

/* ---- memory in streams ---- */

/* Waits for all that runs, unless streams order the memory: then who frees it has waited. */
static cuda_error cudaFree(void *pointer) {
  if (pointer != NULL && !mock_is_ordered(pointer)) mock_wait_for_stream(NULL, true, true);
  return mock_free(pointer, mock_now_ns());
}

typedef struct {
  operation base;
  void *pointer;
} free_operation;

static bool run_free(operation *self, uint64_t *ready_ns) {
  mock_free(((free_operation *)self)->pointer, *ready_ns);
  return true;
}

static const operation_kind FREE = {run_free, NULL, NULL, NULL, false};

/* In the stream's turn. What a graph frees whenever it is launched stays. */
static cuda_error cudaFreeAsync(void *pointer, void *stream) {
  void *base;
  size_t n_bytes;
  if (pointer == NULL || mock_is_capturing(stream)) return CUDA_SUCCESS;
  if (!mock_find(pointer, &base, &n_bytes) || base != pointer) return CUDA_ERROR_INVALID_VALUE;
  free_operation *const made = malloc(sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = (free_operation){.base.kind = &FREE, .pointer = pointer};
  return mock_enqueue(stream, &made->base);
}

static cuda_error cudaDeviceGetDefaultMemPool(void **pool, UNUSED int device) {
  static char the_pool;
  *pool = &the_pool;
  return CUDA_SUCCESS;
}

static cuda_error cudaMemPoolGetAttribute(UNUSED void *pool, UNUSED int attribute, uint64_t *value) {
  *value = 0;
  return CUDA_SUCCESS;
}

/* ---- kernels ---- */

static cuda_error cudaOccupancyMaxActiveBlocks(int *n_blocks, UNUSED const void *function, UNUSED int block_size,
                                               UNUSED size_t shared_bytes, UNUSED unsigned flags) {
  *n_blocks = 8;
  return CUDA_SUCCESS;
}

static cuda_error cudaLaunchKernel(const void *function, cuda_dim3 grid, UNUSED cuda_dim3 block,
                                   void **parameters, UNUSED size_t shared_bytes, void *stream) {
  mock_uses uses = {0};
  const cuda_error error = mock_compute(function, grid, parameters, stream, &uses);
  return error != CUDA_SUCCESS ? error : mock_enqueue_kernel(stream, mock_kernel_ns, &uses);
}

static cuda_error cudaLaunchKernelExC(const cuda_launch_config *config, UNUSED const void *function,
                                      UNUSED void **parameters) {
  return mock_enqueue_kernel(config->stream, mock_kernel_ns, NULL);
}

/* ---- the driver behind it ---- */

static cuda_error cudaGetDriverEntryPoint(const char *name, void **function, UNUSED unsigned long long flags,
                                          int *result) {
  *function = mock_torch_driver_function(name);
  if (result != NULL) *result = *function != NULL ? 0 : 1; /* success, symbol not found */
  return CUDA_SUCCESS;
}

static cuda_error cudaGetDriverEntryPointByVersion(const char *name, void **function, UNUSED unsigned version,
                                                   unsigned long long flags, int *result) {
  return cudaGetDriverEntryPoint(name, function, flags, result);
}

static cuda_error succeed(void) { return CUDA_SUCCESS; }

#define SUCCEEDS(name) {#name, (void *)succeed}
static const mock_function OF_BOTH[] = {
    MOCK_FUNCTION(cudaFree),
    MOCK_FUNCTION(cudaFreeAsync),
};
static const mock_function OF_TORCH[] = {
    MOCK_FUNCTION(cudaMemPoolGetAttribute),
    MOCK_FUNCTION(cudaDeviceGetDefaultMemPool),
    SUCCEEDS(cudaProfilerStart),
    SUCCEEDS(cudaProfilerStop),
    SUCCEEDS(cudaFuncSetCacheConfig),
    SUCCEEDS(cudaInitDevice),
    {"cudaOccupancyMaxActiveBlocksPerMultiprocessor", (void *)cudaOccupancyMaxActiveBlocks},
    {"cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", (void *)cudaOccupancyMaxActiveBlocks},
    MOCK_FUNCTION(cudaLaunchKernel),
    MOCK_FUNCTION(cudaLaunchKernelExC),
    MOCK_FUNCTION(cudaGetDriverEntryPoint),
    MOCK_FUNCTION(cudaGetDriverEntryPointByVersion),
};

/* ---- of the copy that NCCL links: its kernels are collectives, but for one that scales the numbers of a single rank ---- */

static cuda_error launch_of_nccl(UNUSED const void *function, UNUSED cuda_dim3 grid, UNUSED cuda_dim3 block,
                                 UNUSED void **parameters, UNUSED size_t shared_bytes, void *stream) {
  return mock_enqueue_kernel(stream, mock_kernel_ns, NULL);
}

static const mock_function OF_NCCL[] = {
    {"cudaLaunchKernel", (void *)launch_of_nccl},
    {"cuStreamWriteValue32", (void *)mock_write_word},
};

void *mock_rehearsed_function(const char *name, bool of_nccl) {
  void *(*const others[])(const char *) = {mock_copy_function, mock_timed_stream_function, mock_event_function,
                                           mock_graph_function, mock_kernel_function};
  void *found = of_nccl ? MOCK_FIND(OF_NCCL, name) : MOCK_FIND(OF_TORCH, name);
  if (found == NULL) found = MOCK_FIND(OF_BOTH, name);
  for (size_t i = 0; found == NULL && i < sizeof others / sizeof *others; i++) found = others[i](name);
  return found;
}
