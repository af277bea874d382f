/* The CUDA driver as NCCL calls it, handed out by cudaGetDriverEntryPoint. */
#include <string.h>

#include "mock_cuda.h"

#define UNUSED __attribute__((unused))

static cuda_error cuDeviceGet(int *device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

static cuda_error cuDeviceGetAttribute(int *value, int attribute, UNUSED int device) {
  switch (attribute) {
  case ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT:
  case ATTRIBUTE_POSIX_FILE_HANDLES:
    *value = 1;
    break;
  case ATTRIBUTE_MULTICAST:
    *value = mock_the_machine.multicast;
    break;
  default:
    *value = 0;
  }
  return CUDA_SUCCESS;
}

/* Different for each GPU, and not all zero. */
static cuda_error cuDeviceGetUuid(cu_uuid *uuid, int device) {
  memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = (unsigned char)(1 + device);
  return CUDA_SUCCESS;
}

static cuda_error name_error(UNUSED cuda_error error, const char **text) {
  *text = "an error of the mock CUDA";
  return CUDA_SUCCESS;
}

static cuda_error cuMemGetAddressRange(uint64_t *base, size_t *n_bytes, uint64_t pointer) {
  void *found;
  size_t size;
  if (!mock_find((void *)(uintptr_t)pointer, &found, &size)) return CUDA_ERROR_INVALID_VALUE;
  if (base != NULL) *base = (uint64_t)(uintptr_t)found;
  if (n_bytes != NULL) *n_bytes = size;
  return CUDA_SUCCESS;
}

/* A context per device, as communicators of one process tell each other apart by it. */
static char contexts[MOCK_MAX_DEVICES];

static cuda_error cuCtxGetCurrent(void **context) {
  *context = &contexts[mock_current_device() % MOCK_MAX_DEVICES];
  return CUDA_SUCCESS;
}

static cuda_error cuCtxCreate(void **context, UNUSED unsigned flags, int device) {
  *context = &contexts[device % MOCK_MAX_DEVICES];
  return CUDA_SUCCESS;
}

static cuda_error cuCtxSetCurrent(void *context) {
  if (context != NULL) mock_cuda_set_device((int)((char *)context - contexts));
  return CUDA_SUCCESS;
}

static cuda_error cuCtxGetDevice(int *device) {
  *device = mock_current_device();
  return CUDA_SUCCESS;
}

static cuda_error cuPointerGetAttribute(UNUSED void *value, UNUSED int attribute, UNUSED uint64_t pointer) {
  return CUDA_ERROR_INVALID_VALUE;
}

static cuda_error cuLaunchKernel(UNUSED void *function, UNUSED unsigned grid_x, UNUSED unsigned grid_y,
                                 UNUSED unsigned grid_z, UNUSED unsigned block_x, UNUSED unsigned block_y,
                                 UNUSED unsigned block_z, UNUSED unsigned shared_bytes, void *stream,
                                 void **parameters, void **extra) {
  mock_on_launch(parameters, extra, stream);
  return CUDA_SUCCESS;
}

static cuda_error cuLaunchKernelEx(const cu_launch_config *config, UNUSED void *function, void **parameters,
                                   void **extra) {
  mock_on_launch(parameters, extra, config->stream);
  return CUDA_SUCCESS;
}

static cuda_error succeed(void) { return CUDA_SUCCESS; }

#define ENTRY(name) {#name, (void *)name}
static const struct {
  const char *name;
  void *function;
} functions[] = {
    ENTRY(cuDeviceGet),
    ENTRY(cuDeviceGetAttribute),
    ENTRY(cuDeviceGetUuid),
    {"cuDeviceGetUuid_v2", (void *)cuDeviceGetUuid},
    {"cuGetErrorString", (void *)name_error},
    {"cuGetErrorName", (void *)name_error},
    ENTRY(cuMemGetAddressRange),
    ENTRY(cuCtxCreate),
    {"cuCtxDestroy", (void *)succeed},
    ENTRY(cuCtxSetCurrent),
    ENTRY(cuCtxGetCurrent),
    ENTRY(cuCtxGetDevice),
    ENTRY(cuPointerGetAttribute),
    ENTRY(cuLaunchKernel),
    ENTRY(cuLaunchKernelEx),
};

void *mock_driver_function(const char *name) {
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (strcmp(functions[i].name, name) == 0) return functions[i].function;
  return mock_memory_function(name);
}
