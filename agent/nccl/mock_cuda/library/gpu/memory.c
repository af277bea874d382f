/* Device memory: one anonymous file per process, of which allocations are slices. Another process maps a slice
 * through /proc/<pid>/fd, so that nothing has a name and nothing stays behind when a process is killed. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../mock_cuda.h"

#define ARENA_BYTES (UINT64_C(1) << 42) /* address space, not memory */
#define GRANULARITY 4096u
#define LARGE_BYTES (1u << 20)
#define CUMEM_GRANULARITY (2u << 20)

/* What lies at an address: a slice of the arena, another process's slice, or a mapped cuMem handle. */
typedef struct slice {
  char *base;
  size_t n_bytes;
  int device;
  bool imported, counted, host;
  struct slice *next;
} slice;

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
static int arena_file = -1;
static pid_t arena_owner;
static char *arena;
static uint64_t arena_used;
static slice *in_use, *free_slices;
static mapping *mappings;
static _Atomic uint64_t allocated_bytes[MOCK_MAX_DEVICES];

static uint64_t round_up(uint64_t n_bytes, uint64_t to) { return (n_bytes + to - 1) / to * to; }

static void count(int device, int64_t n_bytes) {
  if (device >= 0 && device < MOCK_MAX_DEVICES)
    atomic_fetch_add_explicit(&allocated_bytes[device], (uint64_t)n_bytes, memory_order_relaxed);
}

uint64_t mock_allocated_bytes(int device) {
  return device >= 0 && device < MOCK_MAX_DEVICES ? atomic_load(&allocated_bytes[device]) : 0;
}

static bool has_room(int device, uint64_t n_bytes) {
  if (device < 0 || device >= (int)mock_the_machine.n_devices) return true;
  return mock_allocated_bytes(device) + n_bytes <= mock_the_machine.devices[device].memory_bytes;
}

/* Not memfd_create(): glibc has it from 2.27 on, a wheel is for 2.17 and newer. */
int mock_memory_file(const char *name) { return (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC); }

/* A forked child shares the file but must not hand out the same slices. */
static bool prepare_arena(void) {
  if (arena != NULL && arena_owner == getpid()) return true;
  const int file = mock_memory_file("zerotune-mock-cuda");
  if (file < 0 || ftruncate(file, (off_t)ARENA_BYTES) != 0) return false;
  char *const base = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (base == MAP_FAILED) {
    close(file);
    return false;
  }
  arena = base, arena_file = file, arena_owner = getpid(), arena_used = 0, free_slices = NULL;
  return true;
}

static slice *take_free(size_t n_bytes) {
  for (slice **at = &free_slices; *at != NULL; at = &(*at)->next)
    if ((*at)->n_bytes == n_bytes) {
      slice *const found = *at;
      *at = found->next;
      return found;
    }
  return NULL;
}

static void add(slice *one) {
  one->next = in_use;
  in_use = one;
}

static slice **place_of(const void *pointer) {
  for (slice **at = &in_use; *at != NULL; at = &(*at)->next)
    if ((const char *)pointer >= (*at)->base && (const char *)pointer < (*at)->base + (*at)->n_bytes) return at;
  return NULL;
}

cuda_error mock_allocate(void **pointer, size_t n_bytes) {
  *pointer = NULL;
  if (n_bytes == 0) return CUDA_SUCCESS;
  n_bytes = round_up(n_bytes, GRANULARITY);
  const int device = mock_current_device();
  if (!has_room(device, n_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  slice *made = prepare_arena() ? take_free(n_bytes) : NULL;
  if (made == NULL && arena != NULL && n_bytes <= ARENA_BYTES - arena_used && (made = calloc(1, sizeof *made))) {
    made->base = arena + arena_used;
    made->n_bytes = n_bytes;
    arena_used += n_bytes;
  }
  if (made != NULL) {
    made->device = device;
    made->counted = true;
    add(made);
    *pointer = made->base;
    count(device, (int64_t)n_bytes);
  }
  pthread_mutex_unlock(&lock);
  return made != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Memory that is about to go; called without our lock, since those who launch hold theirs when they ask us. */
static void forget(const void *base, size_t n_bytes) {
  mock_forget_proxies(base, n_bytes);
  mock_forget_kernels(base, n_bytes);
}

static void give_back(slice *gone) {
  if (gone->counted) count(gone->device, -(int64_t)gone->n_bytes);
  if (gone->imported) {
    munmap(gone->base, gone->n_bytes);
    free(gone);
    return;
  }
  (void)fallocate(arena_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, gone->base - arena, (off_t)gone->n_bytes);
  gone->next = free_slices;
  free_slices = gone;
}

cuda_error mock_free(void *pointer) {
  if (pointer == NULL) return CUDA_SUCCESS;
  void *base;
  size_t n_bytes;
  if (mock_find(pointer, &base, &n_bytes) && base == pointer) forget(base, n_bytes);
  pthread_mutex_lock(&lock);
  slice **const at = place_of(pointer);
  const bool known = at != NULL && (*at)->base == (char *)pointer;
  if (known) {
    slice *const gone = *at;
    *at = gone->next;
    give_back(gone);
  }
  pthread_mutex_unlock(&lock);
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Memory of the host that the GPU reaches: no other process does. */
cuda_error mock_allocate_host(void **pointer, size_t n_bytes) {
  *pointer = NULL;
  if (n_bytes == 0) return CUDA_SUCCESS;
  n_bytes = round_up(n_bytes, GRANULARITY);
  char *const base = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  slice *const made = base != MAP_FAILED ? calloc(1, sizeof *made) : NULL;
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  made->base = base, made->n_bytes = n_bytes, made->device = mock_current_device(), made->imported = made->host = true;
  pthread_mutex_lock(&lock);
  add(made);
  pthread_mutex_unlock(&lock);
  *pointer = base;
  return CUDA_SUCCESS;
}

void mock_describe_pointer(cuda_pointer_attributes *attributes, const void *pointer) {
  pthread_mutex_lock(&lock);
  slice **const at = place_of(pointer);
  const slice *const found = at != NULL ? *at : NULL;
  *attributes = (cuda_pointer_attributes){
      .type = found == NULL ? MEMORY_TYPE_UNREGISTERED : found->host ? MEMORY_TYPE_HOST : MEMORY_TYPE_DEVICE,
      .device = found != NULL && found->device >= 0 ? found->device : mock_current_device(),
      .device_pointer = found != NULL ? (void *)(uintptr_t)pointer : NULL,
      .host_pointer = found != NULL && found->host ? (void *)(uintptr_t)pointer : NULL,
  };
  pthread_mutex_unlock(&lock);
}

/* Where another process finds this memory: a file of ours, and an offset in it. */
bool mock_locate(const void *pointer, int *file, uint64_t *offset) {
  bool found = false;
  pthread_mutex_lock(&lock);
  const char *const at = pointer;
  if (arena != NULL && at >= arena && at < arena + ARENA_BYTES) {
    *file = arena_file;
    *offset = (uint64_t)(at - arena);
    found = true;
  }
  for (const mapping *one = mappings; one != NULL && !found; one = one->next)
    if (at >= one->base && at < one->base + one->n_bytes) {
      *file = one->of->file;
      *offset = (uint64_t)(at - one->base) + one->offset;
      found = true;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

bool mock_find(const void *pointer, void **base, size_t *n_bytes) {
  pthread_mutex_lock(&lock);
  slice **const at = place_of(pointer);
  if (at != NULL) {
    *base = (*at)->base;
    *n_bytes = (*at)->n_bytes;
  }
  pthread_mutex_unlock(&lock);
  return at != NULL;
}

/* Pages that hold nothing are zero and take no memory: NCCL clears all that it allocates and fills little of it. */
void mock_clear(void *from, size_t n_bytes) {
  char *const at = from;
  char *const first = (char *)(uintptr_t)round_up((uintptr_t)at, GRANULARITY);
  if (n_bytes >= 2 * GRANULARITY) {
    const size_t n_whole = (size_t)(at + n_bytes - first) / GRANULARITY * GRANULARITY;
    int file;
    uint64_t offset;
    const bool cleared = mock_locate(first, &file, &offset) &&
                         fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)n_whole) == 0;
    if (cleared) {
      memset(at, 0, (size_t)(first - at));
      memset(first + n_whole, 0, n_bytes - n_whole - (size_t)(first - at));
      return;
    }
  }
  memset(at, 0, n_bytes);
}

int mock_cuda_malloc(void **pointer, size_t n_bytes) { return mock_allocate(pointer, n_bytes); }

/* ---- slices of other processes ---- */

typedef struct {
  int32_t pid, file;
  uint64_t offset, n_bytes;
} slice_name; /* within cudaIpcMemHandle_t */

cuda_error mock_ipc_handle(cuda_ipc_handle *handle, void *pointer) {
  void *base;
  size_t n_bytes;
  if (!mock_find(pointer, &base, &n_bytes) || (char *)base < arena || (char *)base >= arena + ARENA_BYTES)
    return CUDA_ERROR_INVALID_VALUE;
  const slice_name name = {getpid(), arena_file, (uint64_t)((char *)base - arena), n_bytes};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &name, sizeof name);
  return CUDA_SUCCESS;
}

cuda_error mock_ipc_open(void **pointer, cuda_ipc_handle handle) {
  slice_name name;
  memcpy(&name, &handle, sizeof name);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return CUDA_ERROR_INVALID_VALUE;
  char *const base = mmap(NULL, name.n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)name.offset);
  close(file);
  slice *const made = base != MAP_FAILED ? calloc(1, sizeof *made) : NULL;
  if (made == NULL) return CUDA_ERROR_INVALID_VALUE;
  made->base = base, made->n_bytes = name.n_bytes, made->device = mock_current_device(), made->imported = true;
  pthread_mutex_lock(&lock);
  add(made);
  pthread_mutex_unlock(&lock);
  *pointer = base;
  return CUDA_SUCCESS;
}

cuda_error mock_ipc_close(void *pointer) { return mock_free(pointer); }

/* ---- cuMem: a handle is a file of its own, which NCCL passes to other processes as a descriptor ---- */

static handle *new_handle(int file, size_t n_bytes) {
  handle *const made = calloc(1, sizeof *made);
  if (made == NULL) return NULL;
  made->file = file, made->n_bytes = n_bytes, made->n_references = 1, made->device = -1;
  return made;
}

static void release_locked(handle *one) {
  if (--one->n_references > 0) return;
  close(one->file);
  if (one->device >= 0) count(one->device, -(int64_t)one->n_bytes);
  free(one);
}

static cuda_error create(uint64_t *out, size_t n_bytes, const cu_allocation_properties *properties,
                         unsigned long long flags) {
  (void)flags;
  const int device = properties != NULL ? properties->location_id : -1;
  if (device >= 0 && !has_room(device, n_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
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
    count(device, (int64_t)n_bytes);
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
  if (alignment < CUMEM_GRANULARITY) alignment = CUMEM_GRANULARITY;
  char *const base = mmap(NULL, n_bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  char *const aligned = (char *)(uintptr_t)round_up((uintptr_t)base, alignment);
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
  slice *const seen = calloc(1, sizeof *seen);
  if (made == NULL || seen == NULL ||
      mmap(base, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, of->file, (off_t)offset) == MAP_FAILED) {
    free(made), free(seen);
    return CUDA_ERROR_INVALID_VALUE;
  }
  seen->base = base, seen->n_bytes = n_bytes, seen->device = of->device, seen->imported = true;
  made->base = base, made->n_bytes = n_bytes, made->offset = offset, made->of = of;
  pthread_mutex_lock(&lock);
  of->n_references++;
  made->next = mappings;
  mappings = made;
  add(seen);
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

static cuda_error unmap(uint64_t address, size_t n_bytes) {
  char *const base = (char *)(uintptr_t)address;
  forget(base, n_bytes);
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
  slice **const at = place_of(base);
  if (at != NULL) {
    slice *const gone = *at;
    *at = gone->next;
    free(gone);
  }
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
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
  *out = CUMEM_GRANULARITY;
  return CUDA_SUCCESS;
}

/* ---- multicast: an object that takes every binding ---- */

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

/* Older torch asks the driver's library for them. */
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
