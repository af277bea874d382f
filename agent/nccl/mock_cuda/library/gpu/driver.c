/* The part of the CUDA driver that NCCL calls, by cudaGetDriverEntryPoint. */
#include <stddef.h>

#include "../mock_cuda.h"

#define UNUSED __attribute__((unused))
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

MOCK_API cuda_error cuInit(UNUSED unsigned flags) { return CUDA_SUCCESS; }

MOCK_API cuda_error cuDriverGetVersion(int *version) {
  *version = mock_the_machine.cuda_version;
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuDeviceGet(int *device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuDeviceGetCount(int *n_devices) {
  *n_devices = (int)mock_the_machine.n_devices;
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
  case ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT:
  case ATTRIBUTE_POSIX_FILE_HANDLES:
    *value = 1;
    return CUDA_SUCCESS;
  case ATTRIBUTE_MULTICAST:
    *value = mock_the_machine.multicast;
    return CUDA_SUCCESS;
  default: /* the numbers are those of cudart */
    return ((cuda_error (*)(int *, int, int))mock_runtime_function("cudaDeviceGetAttribute", true))(value, attribute,
                                                                                                    device);
  }
}

MOCK_API cuda_error cuDeviceGetUuid(cu_uuid *uuid, int device) {
  *uuid = mock_uuid(device);
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuGetErrorString(UNUSED cuda_error error, const char **text) {
  *text = "an error of the mock CUDA";
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuGetErrorName(cuda_error error, const char **text) { return cuGetErrorString(error, text); }

MOCK_API cuda_error cuMemGetAddressRange_v2(uint64_t *base, size_t *n_bytes, uint64_t pointer) {
  void *found;
  size_t size;
  if (!mock_find((void *)(uintptr_t)pointer, &found, &size)) return CUDA_ERROR_INVALID_VALUE;
  if (base != NULL) *base = (uint64_t)(uintptr_t)found;
  if (n_bytes != NULL) *n_bytes = size;
  return CUDA_SUCCESS;
}

/* A context per device, by which communicators of one process are distinguished. */
char mock_contexts[MOCK_MAX_DEVICES];

MOCK_API cuda_error cuCtxGetCurrent(void **context) {
  *context = &mock_contexts[mock_current_device() % MOCK_MAX_DEVICES];
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuCtxCreate_v2(void **context, UNUSED unsigned flags, int device) {
  *context = &mock_contexts[device % MOCK_MAX_DEVICES];
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuCtxSetCurrent(void *context) {
  if (context != NULL) mock_cuda_set_device((int)((char *)context - mock_contexts));
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuCtxGetDevice(int *device) {
  *device = mock_current_device();
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuDevicePrimaryCtxRetain(void **context, int device) { return cuCtxCreate_v2(context, 0, device); }

/* No attribute is supported, as for memory that is not exported. */
static cuda_error no_attribute(void) { return CUDA_ERROR_INVALID_VALUE; }

static cuda_error cuStreamWriteValue32(UNUSED void *stream, uint64_t at, uint32_t word, UNUSED unsigned flags) {
  *(volatile uint32_t *)(uintptr_t)at = word;
  return CUDA_SUCCESS;
}

/* ---- NCCL's kernels are collectives ---- */

static cuda_error cuLaunchKernel(UNUSED void *function, UNUSED unsigned grid_x, UNUSED unsigned grid_y,
                                 UNUSED unsigned grid_z, UNUSED unsigned block_x, UNUSED unsigned block_y,
                                 UNUSED unsigned block_z, UNUSED unsigned shared_bytes, void *stream, void **parameters,
                                 void **extra) {
  return mock_on_launch(parameters, extra, stream);
}

static cuda_error cuLaunchKernelEx(const cu_launch_config *config, UNUSED void *function, void **parameters,
                                   void **extra) {
  return mock_on_launch(parameters, extra, config->stream);
}

/* ---- by name ---- */

static cuda_error succeed(void) { return CUDA_SUCCESS; }

static const mock_function functions[] = {
    MOCK_FUNCTION(cuInit),
    MOCK_FUNCTION(cuDriverGetVersion),
    MOCK_FUNCTION(cuDeviceGet),
    MOCK_FUNCTION(cuDeviceGetCount),
    MOCK_FUNCTION(cuDeviceGetAttribute),
    MOCK_FUNCTION(cuDeviceGetUuid),
    MOCK_FUNCTION(cuGetErrorString),
    MOCK_FUNCTION(cuGetErrorName),
    {"cuMemGetAddressRange", (void *)cuMemGetAddressRange_v2},
    {"cuCtxCreate", (void *)cuCtxCreate_v2},
    {"cuCtxDestroy", (void *)succeed},
    MOCK_FUNCTION(cuCtxSetCurrent),
    MOCK_FUNCTION(cuDevicePrimaryCtxRetain),
    MOCK_FUNCTION(cuCtxGetCurrent),
    MOCK_FUNCTION(cuCtxGetDevice),
    MOCK_FUNCTION(cuStreamWriteValue32),
    {"cuPointerGetAttribute", (void *)no_attribute},
    MOCK_FUNCTION(cuLaunchKernel),
    MOCK_FUNCTION(cuLaunchKernelEx),
};

void *mock_driver_function(const char *name) {
  void *found = mock_rehearsed_function != NULL ? mock_rehearsed_function(name, true) : NULL;
  if (found == NULL) found = MOCK_FIND(functions, name);
  return found != NULL ? found : mock_memory_function(name);
}
