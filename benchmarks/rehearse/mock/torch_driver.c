/* The CUDA driver as torch, NVRTC and Triton call it beside NCCL: a link called libcuda.so.1 to this library is one. */
#include <stdio.h>
#include <string.h>

#include "streams.h"

#define UNUSED __attribute__((unused))
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

/* ---- those of NCCL, in driver.c ---- */

cuda_error cuDeviceGetUuid(cu_uuid *uuid, int device);
cuda_error cuCtxGetCurrent(void **context);
cuda_error cuCtxSetCurrent(void *context);

/* ---- devices, contexts ---- */

MOCK_API cuda_error cuDeviceGetName(char *name, int n_bytes, int device) {
  snprintf(name, (size_t)n_bytes, "%s", mock_the_machine.devices[device % MOCK_MAX_DEVICES].name);
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuDeviceTotalMem_v2(size_t *n_bytes, int device) {
  *n_bytes = mock_the_machine.devices[device % MOCK_MAX_DEVICES].memory_bytes;
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }

MOCK_API cuda_error cuCtxPopCurrent_v2(void **context) { return cuCtxGetCurrent(context); }

MOCK_API cuda_error cuDevicePrimaryCtxGetState(UNUSED int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

enum { POINTER_ATTRIBUTE_CONTEXT = 1, POINTER_ATTRIBUTE_DEVICE_POINTER = 3 };
MOCK_API cuda_error cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
  cuda_pointer_attributes of;
  mock_describe_pointer(&of, (void *)(uintptr_t)pointer);
  if (of.device_pointer == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == POINTER_ATTRIBUTE_CONTEXT) *(void **)value = &mock_contexts[of.device % MOCK_MAX_DEVICES];
  else if (attribute == POINTER_ATTRIBUTE_DEVICE_POINTER) *(uint64_t *)value = pointer;
  else return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuCtxGetLimit(size_t *n_bytes, UNUSED int limit) {
  *n_bytes = 1 << 20;
  return CUDA_SUCCESS;
}

/* ---- modules: a module is only a handle ---- */

static char a_module, a_function;

MOCK_API cuda_error cuModuleLoadData(void **module, UNUSED const void *image) {
  *module = &a_module;
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuModuleLoadDataEx(void **module, const void *image, UNUSED unsigned n_options, UNUSED void *options,
                                       UNUSED void *values) {
  return cuModuleLoadData(module, image);
}

MOCK_API cuda_error cuModuleLoad(void **module, UNUSED const char *path) { return cuModuleLoadData(module, NULL); }

MOCK_API cuda_error cuModuleGetFunction(void **function, UNUSED void *module, UNUSED const char *name) {
  *function = &a_function;
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuFuncGetAttribute(int *value, UNUSED int attribute, UNUSED void *function) {
  *value = attribute == 0 ? 1024 : 0; /* maximal threads per block; no registers are spilled */
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n_blocks, UNUSED void *function,
                                                                UNUSED int block_size, UNUSED size_t shared_bytes) {
  *n_blocks = 8;
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuOccupancyMaxActiveClusters(int *n_clusters, UNUSED void *function, UNUSED const void *config) {
  *n_clusters = 8;
  return CUDA_SUCCESS;
}

#define SUCCEEDS(name) \
  MOCK_API cuda_error name(void) { return CUDA_SUCCESS; }
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuLinkAddData_v2)
SUCCEEDS(cuLinkComplete)
SUCCEEDS(cuLinkCreate_v2)
SUCCEEDS(cuTensorMapEncodeTiled)
SUCCEEDS(cuCtxDestroy_v2)
SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuDevicePrimaryCtxRelease_v2)

/* ---- memory in streams ---- */

MOCK_API cuda_error cuMemsetD32Async(uint64_t at, unsigned word, size_t n_words, void *stream) {
  return mock_set_words((void *)(uintptr_t)at, word, n_words, stream);
}

cuda_error mock_write_word(void *stream, uint64_t at, uint32_t word, UNUSED unsigned flags) {
  return mock_set_words((void *)(uintptr_t)at, word, 1, stream);
}

MOCK_API cuda_error cuStreamWriteValue32_v2(void *stream, uint64_t at, uint32_t word, unsigned flags) {
  return mock_write_word(stream, at, word, flags);
}

MOCK_API cuda_error cuStreamWriteValue32(void *stream, uint64_t at, uint32_t word, unsigned flags) {
  return mock_write_word(stream, at, word, flags);
}

/* ---- kernels ---- */

MOCK_API cuda_error cuLaunchKernel(UNUSED void *function, UNUSED unsigned grid_x, UNUSED unsigned grid_y,
                                   UNUSED unsigned grid_z, UNUSED unsigned block_x, UNUSED unsigned block_y,
                                   UNUSED unsigned block_z, UNUSED unsigned shared_bytes, void *stream,
                                   UNUSED void **parameters, UNUSED void **extra) {
  return mock_enqueue_kernel(stream, mock_kernel_ns, NULL);
}

MOCK_API cuda_error cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                              unsigned block_x, unsigned block_y, unsigned block_z,
                                              unsigned shared_bytes, void *stream, void **parameters) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters,
                        NULL);
}

MOCK_API cuda_error cuLaunchKernelEx(const cu_launch_config *config, UNUSED void *function, UNUSED void **parameters,
                                     UNUSED void **extra) {
  return mock_enqueue_kernel(config->stream, mock_kernel_ns, NULL);
}

/* ---- by name ---- */

#define NEWER(name) {#name, (void *)name##_v2}
static const mock_function FUNCTIONS[] = {
    MOCK_FUNCTION(cuDeviceGetName),
    NEWER(cuDeviceTotalMem),
    {"cuDeviceGetUuid_v2", (void *)cuDeviceGetUuid},
    NEWER(cuCtxDestroy),
    NEWER(cuCtxPushCurrent),
    NEWER(cuCtxPopCurrent),
    MOCK_FUNCTION(cuDevicePrimaryCtxGetState),
    MOCK_FUNCTION(cuPointerGetAttribute),
    MOCK_FUNCTION(cuModuleLoadData),
    MOCK_FUNCTION(cuModuleLoadDataEx),
    MOCK_FUNCTION(cuModuleGetFunction),
    MOCK_FUNCTION(cuModuleUnload),
    MOCK_FUNCTION(cuFuncGetAttribute),
    MOCK_FUNCTION(cuFuncSetAttribute),
    MOCK_FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor),
    MOCK_FUNCTION(cuOccupancyMaxActiveClusters),
    MOCK_FUNCTION(cuTensorMapEncodeTiled),
    MOCK_FUNCTION(cuMemsetD32Async),
    NEWER(cuStreamWriteValue32),
    MOCK_FUNCTION(cuLaunchKernel),
    MOCK_FUNCTION(cuLaunchKernelEx),
    MOCK_FUNCTION(cuLaunchCooperativeKernel),
};

void *mock_torch_driver_function(const char *name) {
  void *const found = MOCK_FIND(FUNCTIONS, name);
  return found != NULL ? found : mock_driver_function(name);
}

MOCK_API cuda_error cuGetProcAddress_v2(const char *name, void **function, UNUSED int version, UNUSED uint64_t flags,
                                        int *result) {
  *function = mock_torch_driver_function(name);
  if (result != NULL) *result = *function != NULL ? 0 : 1; /* success, symbol not found */
  return *function != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

MOCK_API cuda_error cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
