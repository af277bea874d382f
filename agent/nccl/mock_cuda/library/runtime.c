/* cudart as NCCL calls it. Streams and events have always finished. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mock_cuda.h"

#define UNUSED __attribute__((unused))

/* ---- memory ---- */

static cuda_error cudaMalloc(void **pointer, size_t n_bytes) { return mock_allocate(pointer, n_bytes); }

static cuda_error cudaMallocAsync(void **pointer, size_t n_bytes, UNUSED void *stream) {
  return mock_allocate(pointer, n_bytes);
}

static cuda_error cudaMallocFromPoolAsync(void **pointer, size_t n_bytes, UNUSED void *pool, UNUSED void *stream) {
  return mock_allocate(pointer, n_bytes);
}

static cuda_error cudaFree(void *pointer) { return mock_free(pointer); }

static cuda_error cudaFreeAsync(void *pointer, UNUSED void *stream) { return mock_free(pointer); }

static cuda_error cudaHostAlloc(void **pointer, size_t n_bytes, UNUSED unsigned flags) {
  return mock_allocate(pointer, n_bytes);
}

static cuda_error cudaFreeHost(void *pointer) { return mock_free(pointer); }

static cuda_error cudaHostGetDevicePointer(void **device, void *host, UNUSED unsigned flags) {
  *device = host;
  return CUDA_SUCCESS;
}

static cuda_error cudaMemcpy(void *to, const void *from, size_t n_bytes, UNUSED int kind) {
  memmove(to, from, n_bytes);
  return CUDA_SUCCESS;
}

static cuda_error cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, UNUSED int kind, UNUSED void *stream) {
  memmove(to, from, n_bytes);
  return CUDA_SUCCESS;
}

static cuda_error cudaMemset(void *at, int value, size_t n_bytes) {
  if (value == 0) mock_clear(at, n_bytes);
  else memset(at, value, n_bytes);
  return CUDA_SUCCESS;
}

static cuda_error cudaMemsetAsync(void *at, int value, size_t n_bytes, UNUSED void *stream) {
  return cudaMemset(at, value, n_bytes);
}

static cuda_error cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  const int device = mock_current_device();
  if (device < 0 || device >= (int)mock_the_machine.n_devices) return CUDA_ERROR_INVALID_DEVICE;
  *total_bytes = mock_the_machine.devices[device].memory_bytes;
  *free_bytes = *total_bytes - mock_allocated_bytes(device);
  return CUDA_SUCCESS;
}

static cuda_error cudaIpcGetMemHandle(cuda_ipc_handle *handle, void *pointer) {
  return mock_ipc_handle(handle, pointer);
}

static cuda_error cudaIpcOpenMemHandle(void **pointer, cuda_ipc_handle handle, UNUSED unsigned flags) {
  return mock_ipc_open(pointer, handle);
}

static cuda_error cudaIpcCloseMemHandle(void *pointer) { return mock_ipc_close(pointer); }

static cuda_error cudaPointerGetAttributes(cuda_pointer_attributes *attributes, const void *pointer) {
  void *base;
  size_t n_bytes;
  const bool known = mock_find(pointer, &base, &n_bytes);
  *attributes = (cuda_pointer_attributes){
      .type = known ? MEMORY_TYPE_DEVICE : MEMORY_TYPE_UNREGISTERED,
      .device = mock_current_device(),
      .device_pointer = known ? (void *)(uintptr_t)pointer : NULL,
      .host_pointer = NULL,
  };
  return CUDA_SUCCESS;
}

/* ---- devices ---- */

static const mock_device *device_at(int device) {
  return device >= 0 && device < (int)mock_the_machine.n_devices ? &mock_the_machine.devices[device] : NULL;
}

static cuda_error cudaGetDeviceCount(int *n_devices) {
  *n_devices = (int)mock_the_machine.n_devices;
  return CUDA_SUCCESS;
}

static cuda_error cudaGetDevice(int *device) {
  *device = mock_current_device();
  return CUDA_SUCCESS;
}

static cuda_error cudaSetDevice(int device) {
  if (device_at(device) == NULL) return CUDA_ERROR_INVALID_DEVICE;
  mock_cuda_set_device(device);
  return CUDA_SUCCESS;
}

static cuda_error cudaDeviceGetPCIBusId(char *bus_id, int n_bytes, int device) {
  const mock_device *found = device_at(device);
  if (found == NULL) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(bus_id, (size_t)n_bytes, "%s", found->bus_id);
  return CUDA_SUCCESS;
}

static cuda_error cudaDeviceGetAttribute(int *value, int attribute, int device) {
  const mock_device *found = device_at(device);
  if (found == NULL) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
  case ATTRIBUTE_CAPABILITY_MAJOR:
    *value = found->capability / 10;
    break;
  case ATTRIBUTE_CAPABILITY_MINOR:
    *value = found->capability % 10;
    break;
  case ATTRIBUTE_MULTIPROCESSOR_COUNT:
    *value = found->n_multiprocessors;
    break;
  case ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *value = 227 << 10;
    break;
  case ATTRIBUTE_WARP_SIZE:
    *value = 32;
    break;
  case ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    *value = 1024;
    break;
  case ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
    *value = 2048;
    break;
  case ATTRIBUTE_UNIFIED_ADDRESSING:
  case ATTRIBUTE_GPU_DIRECT_RDMA:
    *value = 1;
    break;
  default:
    *value = 0;
  }
  return CUDA_SUCCESS;
}

static cuda_error cudaGetDeviceProperties_v2(void *properties, int device) {
  const mock_device *found = device_at(device);
  if (found == NULL) return CUDA_ERROR_INVALID_DEVICE;
  memset(properties, 0, DEVICE_PROPERTIES_BYTES);
  cuda_device_properties_head *head = properties;
  snprintf(head->name, sizeof head->name, "%s", found->name);
  head->total_global_bytes = found->memory_bytes;
  head->shared_bytes_per_block = 48 << 10;
  head->warp_size = 32;
  head->max_threads_per_block = 1024;
  head->major = found->capability / 10;
  head->minor = found->capability % 10;
  head->n_multiprocessors = found->n_multiprocessors;
  head->can_map_host_memory = 1;
  return CUDA_SUCCESS;
}

static cuda_error cudaDeviceCanAccessPeer(int *can, UNUSED int device, UNUSED int peer) {
  *can = 1;
  return CUDA_SUCCESS;
}

static cuda_error give_version(int *version) {
  *version = mock_the_machine.cuda_version;
  return CUDA_SUCCESS;
}

static const char *cudaGetErrorString(UNUSED cuda_error error) { return "an error of the mock CUDA"; }

static const char *cudaGetErrorName(UNUSED cuda_error error) { return "mockCudaError"; }

/* ---- streams and events ---- */

static cuda_error make_token(void **token) {
  *token = calloc(1, 16);
  return *token != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static cuda_error drop_token(void *token) {
  free(token);
  return CUDA_SUCCESS;
}

static cuda_error cudaStreamGetId(void *stream, unsigned long long *id) {
  *id = (unsigned long long)(uintptr_t)stream;
  return CUDA_SUCCESS;
}

static cuda_error cudaEventElapsedTime(float *elapsed_ms, UNUSED void *start, UNUSED void *end) {
  *elapsed_ms = 0.0f;
  return CUDA_SUCCESS;
}

static cuda_error cudaStreamIsCapturing(UNUSED void *stream, int *status) {
  *status = 0;
  return CUDA_SUCCESS;
}

static cuda_error cudaStreamGetCaptureInfo(UNUSED void *stream, int *status, unsigned long long *id) {
  *status = 0;
  if (id != NULL) *id = 0;
  return CUDA_SUCCESS;
}

static cuda_error cudaLaunchHostFunc(UNUSED void *stream, void (*function)(void *), void *argument) {
  function(argument);
  return CUDA_SUCCESS;
}

/* ---- kernels ---- */

static cuda_error cudaFuncGetAttributes(cuda_function_attributes *attributes, UNUSED const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->max_threads_per_block = 1024;
  attributes->n_registers = 96;
  return CUDA_SUCCESS;
}

static cuda_error cudaGetFuncBySymbol(void **function, void *symbol) {
  *function = symbol;
  return CUDA_SUCCESS;
}

static cuda_error cudaLaunchKernel(UNUSED const void *function, UNUSED cuda_dim3 grid, UNUSED cuda_dim3 block,
                                   void **parameters, UNUSED size_t shared_bytes, void *stream) {
  mock_on_launch(parameters, NULL, stream);
  return CUDA_SUCCESS;
}

static cuda_error cudaLaunchKernelExC(const cuda_launch_config *config, UNUSED const void *function,
                                      void **parameters) {
  mock_on_launch(parameters, NULL, config->stream);
  return CUDA_SUCCESS;
}

/* ---- the driver behind it ---- */

static cuda_error find_driver(const char *name, void **function, int *result) {
  *function = mock_driver_function(name);
  if (result != NULL) *result = *function != NULL ? 0 : 1; /* success, symbol not found */
  return CUDA_SUCCESS;
}

static cuda_error cudaGetDriverEntryPoint(const char *name, void **function, UNUSED unsigned long long flags,
                                          int *result) {
  return find_driver(name, function, result);
}

static cuda_error cudaGetDriverEntryPointByVersion(const char *name, void **function, UNUSED unsigned version,
                                                   UNUSED unsigned long long flags, int *result) {
  return find_driver(name, function, result);
}

static cuda_error succeed(void) { return CUDA_SUCCESS; }

#define ENTRY(name) {#name, (void *)name}
#define SUCCEEDS(name) {#name, (void *)succeed}
static const struct {
  const char *name;
  void *function;
} functions[] = {
    ENTRY(cudaMalloc),
    ENTRY(cudaMallocAsync),
    ENTRY(cudaMallocFromPoolAsync),
    ENTRY(cudaFree),
    ENTRY(cudaFreeAsync),
    ENTRY(cudaHostAlloc),
    ENTRY(cudaFreeHost),
    SUCCEEDS(cudaHostRegister),
    SUCCEEDS(cudaHostUnregister),
    ENTRY(cudaHostGetDevicePointer),
    ENTRY(cudaMemcpy),
    ENTRY(cudaMemcpyAsync),
    ENTRY(cudaMemset),
    ENTRY(cudaMemsetAsync),
    ENTRY(cudaMemGetInfo),
    ENTRY(cudaIpcGetMemHandle),
    ENTRY(cudaIpcOpenMemHandle),
    ENTRY(cudaIpcCloseMemHandle),
    ENTRY(cudaPointerGetAttributes),
    {"cudaMemPoolCreate", (void *)make_token},
    {"cudaMemPoolDestroy", (void *)drop_token},
    SUCCEEDS(cudaMemPoolSetAttribute),
    ENTRY(cudaGetDeviceCount),
    ENTRY(cudaGetDevice),
    ENTRY(cudaSetDevice),
    ENTRY(cudaDeviceGetPCIBusId),
    ENTRY(cudaDeviceGetAttribute),
    ENTRY(cudaGetDeviceProperties_v2),
    {"cudaGetDeviceProperties", (void *)cudaGetDeviceProperties_v2}, /* CUDA 13 */
    ENTRY(cudaDeviceCanAccessPeer),
    SUCCEEDS(cudaDeviceEnablePeerAccess),
    SUCCEEDS(cudaDeviceSetLimit),
    SUCCEEDS(cudaDeviceSynchronize),
    {"cudaDriverGetVersion", (void *)give_version},
    {"cudaRuntimeGetVersion", (void *)give_version},
    SUCCEEDS(cudaGetLastError),
    SUCCEEDS(cudaPeekAtLastError),
    ENTRY(cudaGetErrorString),
    ENTRY(cudaGetErrorName),
    {"cudaStreamCreate", (void *)make_token},
    {"cudaStreamCreateWithFlags", (void *)make_token},
    {"cudaStreamCreateWithPriority", (void *)make_token},
    {"cudaStreamDestroy", (void *)drop_token},
    SUCCEEDS(cudaStreamSynchronize),
    SUCCEEDS(cudaStreamQuery),
    SUCCEEDS(cudaStreamWaitEvent),
    ENTRY(cudaStreamGetId),
    {"cudaEventCreate", (void *)make_token},
    {"cudaEventCreateWithFlags", (void *)make_token},
    {"cudaEventDestroy", (void *)drop_token},
    SUCCEEDS(cudaEventRecord),
    SUCCEEDS(cudaEventQuery),
    SUCCEEDS(cudaEventSynchronize),
    ENTRY(cudaEventElapsedTime),
    SUCCEEDS(cudaThreadExchangeStreamCaptureMode),
    ENTRY(cudaStreamIsCapturing),
    {"cudaStreamGetCaptureInfo", (void *)cudaStreamGetCaptureInfo},
    {"cudaStreamGetCaptureInfo_v2", (void *)cudaStreamGetCaptureInfo},
    {"cudaStreamGetCaptureInfo_v3", (void *)cudaStreamGetCaptureInfo},
    ENTRY(cudaLaunchHostFunc),
    ENTRY(cudaFuncGetAttributes),
    SUCCEEDS(cudaFuncSetAttribute),
    ENTRY(cudaGetFuncBySymbol),
    ENTRY(cudaLaunchKernel),
    ENTRY(cudaLaunchKernelExC),
    ENTRY(cudaGetDriverEntryPoint),
    ENTRY(cudaGetDriverEntryPointByVersion),
};

void *mock_runtime_function(const char *name) {
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (strcmp(functions[i].name, name) == 0) return functions[i].function;
  return NULL;
}
