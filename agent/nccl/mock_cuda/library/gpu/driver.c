/* The CUDA driver, handed out by cudaGetDriverEntryPoint and under its own names: a link called libcuda.so.1 to this library
 * is one for torch, NVRTC and Triton. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "streams.h"

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

MOCK_API cuda_error cuDeviceGetName(char *name, int n_bytes, int device) {
  snprintf(name, (size_t)n_bytes, "%s", mock_the_machine.devices[device % MOCK_MAX_DEVICES].name);
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuDeviceTotalMem_v2(size_t *n_bytes, int device) {
  *n_bytes = mock_the_machine.devices[device % MOCK_MAX_DEVICES].memory_bytes;
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
  default: /* they share their numbers with cudart's */
    return ((cuda_error (*)(int *, int, int))mock_runtime_function("cudaDeviceGetAttribute", false))(value, attribute,
                                                                                                    device);
  }
}

/* Different for each GPU, and not all zero. */
cu_uuid mock_uuid(int device) { return (cu_uuid){{(unsigned char)(1 + device)}}; }

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

/* A context per device, as communicators of one process tell each other apart by it. */
static char contexts[MOCK_MAX_DEVICES];

MOCK_API cuda_error cuCtxGetCurrent(void **context) {
  *context = &contexts[mock_current_device() % MOCK_MAX_DEVICES];
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuCtxCreate_v2(void **context, UNUSED unsigned flags, int device) {
  *context = &contexts[device % MOCK_MAX_DEVICES];
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuCtxSetCurrent(void *context) {
  if (context != NULL) mock_cuda_set_device((int)((char *)context - contexts));
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuCtxGetDevice(int *device) {
  *device = mock_current_device();
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }

MOCK_API cuda_error cuCtxPopCurrent_v2(void **context) { return cuCtxGetCurrent(context); }

MOCK_API cuda_error cuDevicePrimaryCtxRetain(void **context, int device) { return cuCtxCreate_v2(context, 0, device); }

MOCK_API cuda_error cuDevicePrimaryCtxGetState(UNUSED int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

/* What NCCL asks for has no answer here, as for memory that is not exported. */
static cuda_error no_attribute(void) { return CUDA_ERROR_INVALID_VALUE; }

enum { POINTER_ATTRIBUTE_CONTEXT = 1, POINTER_ATTRIBUTE_DEVICE_POINTER = 3 };
MOCK_API cuda_error cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
  cuda_pointer_attributes of;
  mock_describe_pointer(&of, (void *)(uintptr_t)pointer);
  if (of.device_pointer == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == POINTER_ATTRIBUTE_CONTEXT) *(void **)value = &contexts[of.device % MOCK_MAX_DEVICES];
  else if (attribute == POINTER_ATTRIBUTE_DEVICE_POINTER) *(uint64_t *)value = pointer;
  else return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

MOCK_API cuda_error cuCtxGetLimit(size_t *n_bytes, UNUSED int limit) {
  *n_bytes = 1 << 20;
  return CUDA_SUCCESS;
}

/* ---- modules: a handle is all that there is of one ---- */

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

MOCK_API cuda_error cuStreamWriteValue32_v2(void *stream, uint64_t at, uint32_t word, UNUSED unsigned flags) {
  return mock_set_words((void *)(uintptr_t)at, word, 1, stream);
}

MOCK_API cuda_error cuStreamWriteValue32(void *stream, uint64_t at, uint32_t word, unsigned flags) {
  return cuStreamWriteValue32_v2(stream, at, word, flags);
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

/* NCCL's kernels are collectives. */
static cuda_error launch_of_nccl(UNUSED void *function, UNUSED unsigned grid_x, UNUSED unsigned grid_y,
                                 UNUSED unsigned grid_z, UNUSED unsigned block_x, UNUSED unsigned block_y,
                                 UNUSED unsigned block_z, UNUSED unsigned shared_bytes, void *stream,
                                 void **parameters, void **extra) {
  return mock_on_launch(parameters, extra, stream);
}

static cuda_error configured_launch_of_nccl(const cu_launch_config *config, UNUSED void *function, void **parameters,
                                            void **extra) {
  return mock_on_launch(parameters, extra, config->stream);
}

/* ---- by name ---- */

#define NEWER(name) {#name, (void *)name##_v2}
static const mock_function OF_NCCL[] = {
    {"cuLaunchKernel", (void *)launch_of_nccl},
    {"cuLaunchKernelEx", (void *)configured_launch_of_nccl},
    {"cuPointerGetAttribute", (void *)no_attribute},
};
static const mock_function FUNCTIONS[] = {
    MOCK_FUNCTION(cuInit),
    MOCK_FUNCTION(cuDriverGetVersion),
    MOCK_FUNCTION(cuDeviceGet),
    MOCK_FUNCTION(cuDeviceGetCount),
    MOCK_FUNCTION(cuDeviceGetName),
    NEWER(cuDeviceTotalMem),
    MOCK_FUNCTION(cuDeviceGetAttribute),
    MOCK_FUNCTION(cuDeviceGetUuid),
    {"cuDeviceGetUuid_v2", (void *)cuDeviceGetUuid},
    MOCK_FUNCTION(cuGetErrorString),
    MOCK_FUNCTION(cuGetErrorName),
    NEWER(cuMemGetAddressRange),
    NEWER(cuCtxCreate),
    NEWER(cuCtxDestroy),
    NEWER(cuCtxPushCurrent),
    NEWER(cuCtxPopCurrent),
    MOCK_FUNCTION(cuCtxSetCurrent),
    MOCK_FUNCTION(cuCtxGetCurrent),
    MOCK_FUNCTION(cuCtxGetDevice),
    MOCK_FUNCTION(cuDevicePrimaryCtxRetain),
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

void *mock_driver_function(const char *name, bool of_nccl) {
  void *found = of_nccl ? MOCK_FIND(OF_NCCL, name) : NULL;
  if (found == NULL) found = MOCK_FIND(FUNCTIONS, name);
  return found != NULL ? found : mock_memory_function(name);
}

MOCK_API cuda_error cuGetProcAddress_v2(const char *name, void **function, UNUSED int version, UNUSED uint64_t flags,
                                        int *result) {
  *function = mock_driver_function(name, false);
  if (result != NULL) *result = *function != NULL ? 0 : 1; /* success, symbol not found */
  return *function != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

MOCK_API cuda_error cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
