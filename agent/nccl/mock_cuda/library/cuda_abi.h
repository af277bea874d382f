/* The part of CUDA's runtime, driver and NVML that the mock implements, declared from their documented interfaces.
 * Structs have only the members that NCCL reads. */
#ifndef ZEROTUNE_CUDA_ABI_H
#define ZEROTUNE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int cuda_error;
enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_ILLEGAL_STATE = 401,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_NOT_SUPPORTED = 801
};

typedef struct {
  unsigned x, y, z;
} cuda_dim3;

/* Numbers of cudaDeviceAttr and CUdevice_attribute. */
enum {
  ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
  ATTRIBUTE_MAX_BLOCK_X = 2,
  ATTRIBUTE_MAX_BLOCK_Y = 3,
  ATTRIBUTE_MAX_BLOCK_Z = 4,
  ATTRIBUTE_MAX_GRID_X = 5,
  ATTRIBUTE_MAX_GRID_Y = 6,
  ATTRIBUTE_MAX_GRID_Z = 7,
  ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK = 8,
  ATTRIBUTE_WARP_SIZE = 10,
  ATTRIBUTE_MAX_REGISTERS_PER_BLOCK = 12,
  ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
  ATTRIBUTE_UNIFIED_ADDRESSING = 41,
  ATTRIBUTE_CAPABILITY_MAJOR = 75,
  ATTRIBUTE_CAPABILITY_MINOR = 76,
  ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
  ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
  ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT = 102,
  ATTRIBUTE_POSIX_FILE_HANDLES = 103,
  ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
  ATTRIBUTE_GPU_DIRECT_RDMA = 116,
  ATTRIBUTE_MULTICAST = 132
};

typedef struct {
  char reserved[64];
} cuda_ipc_handle;

/* cudaPointerAttributes */
enum { MEMORY_TYPE_UNREGISTERED = 0, MEMORY_TYPE_HOST = 1, MEMORY_TYPE_DEVICE = 2 };
typedef struct {
  int type;
  int device;
  void *device_pointer;
  void *host_pointer;
} cuda_pointer_attributes;

/* cudaFuncAttributes, its head */
typedef struct {
  size_t shared_bytes, const_bytes, local_bytes;
  int max_threads_per_block, n_registers, ptx_version, binary_version, cache_mode, max_dynamic_shared_bytes;
  int rest[12];
} cuda_function_attributes;

/* CUlaunchConfig and cudaLaunchConfig_t */
typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream;
  void *attributes;
  unsigned n_attributes;
} cu_launch_config;
typedef struct {
  cuda_dim3 grid, block;
  size_t shared_bytes;
  void *stream;
  void *attributes;
  unsigned n_attributes;
} cuda_launch_config;
/* keys of a launch's `extra` array */
#define LAUNCH_PARAM_END ((void *)0)
#define LAUNCH_PARAM_BUFFER_POINTER ((void *)1)

/* CUmemAllocationProp */
enum { HANDLE_TYPE_POSIX_FILE = 1 };
typedef struct {
  int type, requested_handle_types;
  int location_type, location_id;
  void *metadata;
  unsigned char flags[8];
} cu_allocation_properties;

/* CUmulticastObjectProp */
typedef struct {
  unsigned n_devices;
  size_t n_bytes;
  unsigned long long handle_types, flags;
} cu_multicast_properties;

typedef struct {
  unsigned char bytes[16];
} cu_uuid;

/* NVML */
enum { NVML_SUCCESS = 0, NVML_ERROR_INVALID_ARGUMENT = 2, NVML_ERROR_NOT_SUPPORTED = 3, NVML_ERROR_NOT_FOUND = 6 };
typedef struct {
  char legacy_bus_id[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
} nvml_pci_info;
typedef struct {
  unsigned long long total_bytes, free_bytes, used_bytes;
} nvml_memory;

#endif
