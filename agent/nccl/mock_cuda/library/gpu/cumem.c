/* cuMem: each handle has its own file, which NCCL passes to other processes as a descriptor. */
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory.h"

#define GRANULARITY (2u << 20)

typedef struct handle {
  int file;
  int n_references;
  size_t n_bytes;
  int device;
  cu_allocation_properties properties;
} handle;

typedef struct mapping {
  char *base;
  size_t n_bytes;
  uint64_t offset; /* in the handle's file */
  handle *of;
  struct mapping *next;
} mapping;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static mapping *mappings;

static handle *new_handle(int file, size_t n_bytes) {
  handle *const made = calloc(1, sizeof *made);
  if (made == NULL) return NULL;
  made->file = file, made->n_bytes = n_bytes, made->n_references = 1, made->device = -1;
  return made;
}

static void release_locked(handle *one) {
  if (--one->n_references > 0) return;
  close(one->file);
  if (one->device >= 0) mock_count_bytes(one->device, -(int64_t)one->n_bytes);
  free(one);
}

static cuda_error create(uint64_t *out, size_t n_bytes, const cu_allocation_properties *properties,
                         unsigned long long flags) {
  (void)flags;
  const int device = properties != NULL ? properties->location_id : -1;
  if (device >= 0 && !mock_has_room(device, n_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = mock_memory_file("zerotune-mock-cuda");
  if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  handle *const made = ftruncate(file, (off_t)n_bytes) == 0 ? new_handle(file, n_bytes) : NULL;
  if (made == NULL) {
    close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (properties != NULL) {
    made->properties = *properties;
    made->device = device;
    mock_count_bytes(device, (int64_t)n_bytes);
  }
  *out = (uint64_t)(uintptr_t)made;
  return CUDA_SUCCESS;
}

static handle *handle_of(uint64_t value) { return (handle *)(uintptr_t)value; }

static cuda_error release(uint64_t value) {
  pthread_mutex_lock(&lock);
  release_locked(handle_of(value));
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

static cuda_error export_handle(void *out, uint64_t value, int type, unsigned long long flags) {
  (void)flags;
  if (type != HANDLE_TYPE_POSIX_FILE) return CUDA_ERROR_NOT_SUPPORTED;
  *(int *)out = fcntl(handle_of(value)->file, F_DUPFD_CLOEXEC, 0);
  return *(int *)out >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static cuda_error import_handle(uint64_t *out, void *os_handle, int type) {
  if (type != HANDLE_TYPE_POSIX_FILE) return CUDA_ERROR_NOT_SUPPORTED;
  const int file = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 0);
  const off_t n_bytes = file >= 0 ? lseek(file, 0, SEEK_END) : -1; /* fstat() would need glibc 2.33 */
  handle *const made = n_bytes >= 0 ? new_handle(file, (size_t)n_bytes) : NULL;
  if (made == NULL) {
    if (file >= 0) close(file);
    return CUDA_ERROR_INVALID_VALUE;
  }
  *out = (uint64_t)(uintptr_t)made;
  return CUDA_SUCCESS;
}

static cuda_error reserve(uint64_t *out, size_t n_bytes, size_t alignment, uint64_t wanted, unsigned long long flags) {
  (void)wanted, (void)flags;
  if (alignment < GRANULARITY) alignment = GRANULARITY;
  char *const base = mmap(NULL, n_bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  char *const aligned = (char *)(((uintptr_t)base + alignment - 1) / alignment * alignment);
  if (aligned > base) munmap(base, (size_t)(aligned - base));
  const size_t behind = (size_t)(base + alignment - aligned);
  if (behind > 0) munmap(aligned + n_bytes, behind);
  *out = (uint64_t)(uintptr_t)aligned;
  return CUDA_SUCCESS;
}

static cuda_error free_address(uint64_t address, size_t n_bytes) {
  return munmap((void *)(uintptr_t)address, n_bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static cuda_error map(uint64_t address, size_t n_bytes, size_t offset, uint64_t value, unsigned long long flags) {
  (void)flags;
  handle *const of = handle_of(value);
  char *const base = (char *)(uintptr_t)address;
  mapping *const made = calloc(1, sizeof *made);
  if (made == NULL ||
      mmap(base, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, of->file, (off_t)offset) == MAP_FAILED) {
    free(made);
    return CUDA_ERROR_INVALID_VALUE;
  }
  made->base = base, made->n_bytes = n_bytes, made->offset = offset, made->of = of;
  pthread_mutex_lock(&lock);
  of->n_references++;
  made->next = mappings;
  mappings = made;
  pthread_mutex_unlock(&lock);
  mock_map_memory(base, n_bytes, of->device);
  return CUDA_SUCCESS;
}

static cuda_error unmap(uint64_t address, size_t n_bytes) {
  char *const base = (char *)(uintptr_t)address;
  mock_unmap_memory(base, n_bytes);
  pthread_mutex_lock(&lock);
  mmap(base, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  for (mapping **at = &mappings; *at != NULL; at = &(*at)->next)
    if ((*at)->base == base) {
      mapping *const gone = *at;
      *at = gone->next;
      release_locked(gone->of);
      free(gone);
      break;
    }
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

bool mock_locate_mapped(const void *pointer, int *file, uint64_t *offset) {
  const char *const at = pointer;
  pthread_mutex_lock(&lock);
  const mapping *one = mappings;
  while (one != NULL && !(at >= one->base && at < one->base + one->n_bytes)) one = one->next;
  if (one != NULL) {
    *file = one->of->file;
    *offset = (uint64_t)(at - one->base) + one->offset;
  }
  pthread_mutex_unlock(&lock);
  return one != NULL;
}

static cuda_error set_access(uint64_t address, size_t n_bytes, const void *access, size_t n_access) {
  (void)address, (void)n_bytes, (void)access, (void)n_access;
  return CUDA_SUCCESS;
}

static cuda_error retain(uint64_t *out, void *pointer) {
  cuda_error error = CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  for (mapping *at = mappings; at != NULL; at = at->next)
    if ((char *)pointer >= at->base && (char *)pointer < at->base + at->n_bytes) {
      at->of->n_references++;
      *out = (uint64_t)(uintptr_t)at->of;
      error = CUDA_SUCCESS;
      break;
    }
  pthread_mutex_unlock(&lock);
  return error;
}

static cuda_error properties_of(cu_allocation_properties *out, uint64_t value) {
  *out = handle_of(value)->properties;
  return CUDA_SUCCESS;
}

static cuda_error granularity(size_t *out, const void *properties, int option) {
  (void)properties, (void)option;
  *out = GRANULARITY;
  return CUDA_SUCCESS;
}

/* ---- multicast: an object that accepts every binding ---- */

static cuda_error multicast_create(uint64_t *out, const cu_multicast_properties *properties) {
  return create(out, properties->n_bytes, NULL, 0);
}

static cuda_error accept(void) { return CUDA_SUCCESS; }

static const mock_function functions[] = {
    {"cuMemCreate", create},
    {"cuMemRelease", release},
    {"cuMemExportToShareableHandle", export_handle},
    {"cuMemImportFromShareableHandle", import_handle},
    {"cuMemAddressReserve", reserve},
    {"cuMemAddressFree", free_address},
    {"cuMemMap", map},
    {"cuMemUnmap", unmap},
    {"cuMemSetAccess", set_access},
    {"cuMemRetainAllocationHandle", retain},
    {"cuMemGetAllocationPropertiesFromHandle", properties_of},
    {"cuMemGetAllocationGranularity", granularity},
    {"cuMulticastCreate", multicast_create},
    {"cuMulticastAddDevice", accept},
    {"cuMulticastBindMem", accept},
    {"cuMulticastBindAddr", accept},
    {"cuMulticastUnbind", accept},
    {"cuMulticastGetGranularity", granularity},
};

/* Older torch looks them up in the driver's library. */
#define EXPORT(name, function) extern __typeof(function) name __attribute__((alias(#function), visibility("default")))
EXPORT(cuMemCreate, create);
EXPORT(cuMemRelease, release);
EXPORT(cuMemExportToShareableHandle, export_handle);
EXPORT(cuMemImportFromShareableHandle, import_handle);
EXPORT(cuMemAddressReserve, reserve);
EXPORT(cuMemAddressFree, free_address);
EXPORT(cuMemMap, map);
EXPORT(cuMemUnmap, unmap);
EXPORT(cuMemSetAccess, set_access);
EXPORT(cuMemGetAllocationGranularity, granularity);
EXPORT(cuMulticastCreate, multicast_create);
EXPORT(cuMulticastAddDevice, accept);
EXPORT(cuMulticastBindMem, accept);
EXPORT(cuMulticastUnbind, accept);

void *mock_memory_function(const char *name) {
  return MOCK_FIND(functions, name);
}
