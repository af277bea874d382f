/* The part of cudart that NCCL calls. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../mock_cuda.h"

#define UNUSED __attribute__((unused))

/* ---- memory ---- */

static cuda_error cudaMalloc(void **pointer, size_t n_bytes) { return mock_allocate(pointer, n_bytes, false); }

static cuda_error cudaMallocAsync(void **pointer, size_t n_bytes, UNUSED void *stream) {
  return mock_allocate(pointer, n_bytes, true);
}

static cuda_error cudaMallocFromPoolAsync(void **pointer, size_t n_bytes, UNUSED void *pool, void *stream) {
  return cudaMallocAsync(pointer, n_bytes, stream);
}

static cuda_error cudaFree(void *pointer) { return mock_free(pointer, mock_now_ns()); }

static cuda_error cudaHostAlloc(void **pointer, size_t n_bytes, UNUSED unsigned flags) {
  return mock_allocate_host(pointer, n_bytes);
}

static cuda_error cudaHostGetDevicePointer(void **device, void *host, UNUSED unsigned flags) {
  *device = host;
  return CUDA_SUCCESS;
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
  mock_describe_pointer(attributes, pointer);
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

static cuda_error cudaDeviceGetByPCIBusId(int *device, const char *bus_id) {
  for (int i = 0; i < (int)mock_the_machine.n_devices; i++)
    if (strcasecmp(bus_id, mock_the_machine.devices[i].bus_id) == 0) {
      *device = i;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_INVALID_VALUE;
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
  case ATTRIBUTE_MAX_GRID_X:
    *value = INT32_MAX;
    break;
  case ATTRIBUTE_MAX_GRID_Y:
  case ATTRIBUTE_MAX_GRID_Z:
    *value = 65535;
    break;
  case ATTRIBUTE_MAX_BLOCK_Z:
    *value = 64;
    break;
  case ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
    *value = 48 << 10;
    break;
  case ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = 228 << 10;
    break;
  case ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
  case ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
    *value = 65536;
    break;
  case ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
    *value = 32;
    break;
  case ATTRIBUTE_MAX_BLOCK_X:
  case ATTRIBUTE_MAX_BLOCK_Y:
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

static int bus_of(int device) {
  return (int)strtol(mock_the_machine.devices[device].bus_id + strlen("0000:"), NULL, 16);
}

/* cudaDeviceProp in the layouts of CUDA 12 and CUDA 13, whose functions have different names. */
static cuda_error fill_properties(char *properties, int device, bool since_13) {
  const mock_device *found = device_at(device);
  if (found == NULL) return CUDA_ERROR_INVALID_DEVICE;
  memset(properties, 0, since_13 ? 1008 : 1032);
  const struct {
    int at_12, at_13;
    int64_t value;
    size_t n_bytes;
  } fields[] = {
      {288, 288, (int64_t)found->memory_bytes, 8}, /* totalGlobalMem */
      {296, 296, 48 << 10, 8},                     /* sharedMemPerBlock */
      {304, 304, 65536, 4},                        /* regsPerBlock */
      {308, 308, 32, 4},                           /* warpSize */
      {320, 320, 1024, 4},                         /* maxThreadsPerBlock */
      {324, 324, 1024, 4},                         /* maxThreadsDim */
      {328, 328, 1024, 4},
      {332, 332, 64, 4},
      {336, 336, INT32_MAX, 4}, /* maxGridSize */
      {340, 340, 65535, 4},
      {344, 344, 65535, 4},
      {360, 360, found->capability / 10, 4},
      {364, 364, found->capability % 10, 4},
      {388, 384, found->n_multiprocessors, 4},
      {400, 392, 1, 4},         /* canMapHostMemory */
      {576, 560, 1, 4},         /* concurrentKernels */
      {584, 568, bus_of(device), 4},
      {600, 584, 3, 4},         /* asyncEngineCount */
      {604, 588, 1, 4},         /* unifiedAddressing */
      {612, 592, 5120, 4},      /* memoryBusWidth */
      {616, 596, 50 << 20, 4},  /* l2CacheSize */
      {624, 604, 2048, 4},      /* maxThreadsPerMultiProcessor */
      {640, 624, 228 << 10, 8}, /* sharedMemPerMultiprocessor */
      {648, 632, 65536, 4},     /* regsPerMultiprocessor */
      {652, 636, 1, 4},         /* managedMemory */
      {688, 668, 1, 4},         /* cooperativeLaunch */
      {696, 672, 227 << 10, 8}, /* sharedMemPerBlockOptin */
      {712, 688, 32, 4},        /* maxBlocksPerMultiProcessor */
      {720, 696, 1024, 8},      /* reservedSharedMemPerBlock */
  };
  snprintf(properties, 256, "%s", found->name);
  const cu_uuid uuid = mock_uuid(device);
  memcpy(properties + 256, &uuid, sizeof uuid);
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
    memcpy(properties + (since_13 ? fields[i].at_13 : fields[i].at_12), &fields[i].value, fields[i].n_bytes);
  return CUDA_SUCCESS;
}

static cuda_error cudaGetDeviceProperties_v2(char *properties, int device) {
  return fill_properties(properties, device, false);
}

static cuda_error cudaGetDeviceProperties(char *properties, int device) {
  return fill_properties(properties, device, true);
}

static cuda_error cudaDeviceCanAccessPeer(int *can, UNUSED int device, UNUSED int peer) {
  *can = 1;
  return CUDA_SUCCESS;
}

static cuda_error return_version(int *version) {
  *version = mock_the_machine.cuda_version;
  return CUDA_SUCCESS;
}

static const char *cudaGetErrorString(UNUSED cuda_error error) { return "an error of the mock CUDA"; }

static const char *cudaGetErrorName(UNUSED cuda_error error) { return "mockCudaError"; }

/* ---- kernels ---- */

static cuda_error cudaFuncGetAttributes(cuda_function_attributes *attributes, UNUSED const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->max_threads_per_block = 1024;
  attributes->n_registers = 96;
  attributes->max_dynamic_shared_bytes = 227 << 10;
  attributes->ptx_version = attributes->binary_version = mock_the_machine.devices[0].capability;
  return CUDA_SUCCESS;
}

static cuda_error cudaGetFuncBySymbol(void **function, void *symbol) {
  *function = symbol;
  return CUDA_SUCCESS;
}

static cuda_error cudaLaunchKernelExC(const cuda_launch_config *config, UNUSED const void *function, void **parameters) {
  return mock_on_launch(parameters, NULL, config->stream);
}

/* ---- the driver ---- */

static cuda_error cudaGetDriverEntryPoint(const char *name, void **function, UNUSED unsigned long long flags,
                                          int *result) {
  *function = mock_driver_function(name);
  if (result != NULL) *result = *function != NULL ? 0 : 1; /* success, symbol not found */
  return CUDA_SUCCESS;
}

static cuda_error cudaGetDriverEntryPointByVersion(const char *name, void **function, UNUSED unsigned version,
                                                   unsigned long long flags, int *result) {
  return cudaGetDriverEntryPoint(name, function, flags, result);
}

static cuda_error succeed(void) { return CUDA_SUCCESS; }

#define SUCCEEDS(name) {#name, (void *)succeed}
static const mock_function functions[] = {
    MOCK_FUNCTION(cudaMalloc),
    MOCK_FUNCTION(cudaMallocAsync),
    MOCK_FUNCTION(cudaMallocFromPoolAsync),
    MOCK_FUNCTION(cudaFree),
    MOCK_FUNCTION(cudaHostAlloc),
    {"cudaFreeHost", (void *)cudaFree},
    {"cudaFreeAsync", (void *)cudaFree}, /* streams are never behind */
    SUCCEEDS(cudaHostRegister),
    SUCCEEDS(cudaHostUnregister),
    MOCK_FUNCTION(cudaHostGetDevicePointer),
    MOCK_FUNCTION(cudaMemGetInfo),
    MOCK_FUNCTION(cudaIpcGetMemHandle),
    MOCK_FUNCTION(cudaIpcOpenMemHandle),
    MOCK_FUNCTION(cudaIpcCloseMemHandle),
    MOCK_FUNCTION(cudaPointerGetAttributes),
    SUCCEEDS(cudaMemPoolSetAttribute),
    SUCCEEDS(cudaMemPoolSetAccess),
    SUCCEEDS(cudaMemPoolTrimTo),
    MOCK_FUNCTION(cudaGetDeviceCount),
    MOCK_FUNCTION(cudaGetDevice),
    MOCK_FUNCTION(cudaSetDevice),
    MOCK_FUNCTION(cudaDeviceGetPCIBusId),
    MOCK_FUNCTION(cudaDeviceGetByPCIBusId),
    MOCK_FUNCTION(cudaDeviceGetAttribute),
    MOCK_FUNCTION(cudaGetDeviceProperties_v2),
    MOCK_FUNCTION(cudaGetDeviceProperties),
    MOCK_FUNCTION(cudaDeviceCanAccessPeer),
    SUCCEEDS(cudaDeviceEnablePeerAccess),
    SUCCEEDS(cudaSetDeviceFlags),
    SUCCEEDS(cudaDeviceSetLimit),
    {"cudaDriverGetVersion", (void *)return_version},
    {"cudaRuntimeGetVersion", (void *)return_version},
    SUCCEEDS(cudaGetLastError),
    SUCCEEDS(cudaPeekAtLastError),
    MOCK_FUNCTION(cudaGetErrorString),
    MOCK_FUNCTION(cudaGetErrorName),
    MOCK_FUNCTION(cudaFuncGetAttributes),
    SUCCEEDS(cudaFuncSetAttribute),
    MOCK_FUNCTION(cudaGetFuncBySymbol),
    SUCCEEDS(cudaLaunchKernel), /* not a collective: it scales the numbers of a single rank */
    MOCK_FUNCTION(cudaLaunchKernelExC),
    MOCK_FUNCTION(cudaGetDriverEntryPoint),
    MOCK_FUNCTION(cudaGetDriverEntryPointByVersion),
};

void *mock_runtime_function(const char *name, bool of_nccl) {
  void *found = mock_rehearsed_function != NULL ? mock_rehearsed_function(name, of_nccl) : NULL;
  if (found == NULL) found = MOCK_FIND(functions, name);
  return found != NULL ? found : mock_stream_function(name);
}

void *mock_cuda_function(const char *name) { return mock_runtime_function(name, false); }
