/* Device memory: one anonymous file per process, of which allocations are slices. Another process maps a slice through
 * /proc/<pid>/fd. So no file has a name, and none is left behind when a process is killed. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "memory.h"

#define ARENA_BYTES (UINT64_C(1) << 42) /* address space, not memory */
#define GRANULARITY 4096u
#define POISON 0xBD
#define MOST_POISONED_BYTES (UINT64_C(256) << 20) /* pages of more freed memory are freed, and read as zero */
#define N_UNMAPPED 4096u /* latest unmapped ranges of addresses */
#define N_REPORTED 64u       /* kernels that are reported */

/* Memory at an address: a slice of the arena, another process's slice, or a mapped cuMem handle. */
typedef struct slice {
  char *base;
  size_t n_bytes, poisoned_bytes;
  int device;
  bool imported, counted, host;
  bool is_ordered;     /* allocated by cudaMallocAsync() */
  uint64_t allocated_ns;    /* when it was allocated */
  uint64_t freed_ns;   /* when the GPU reached its free, or that of the previous allocation */
  uint64_t used_ns;    /* the latest end of a known use */
  const char *used_by;
  struct slice *next;
} slice;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int arena_file = -1;
static pid_t arena_owner;
static char *arena;
static uint64_t arena_used;
static slice *in_use, *free_slices;
static uint64_t poisoned_bytes;
/* The latest unmapped ranges: a use of one of them would fault. */
static struct {
  const char *base;
  size_t n_bytes;
} unmapped[N_UNMAPPED];
static uint64_t n_unmapped;
static const char *reported[N_REPORTED];
static _Atomic uint64_t n_freed_uses;
static _Atomic uint64_t allocated_bytes[MOCK_MAX_DEVICES];

static uint64_t round_up(uint64_t n_bytes, uint64_t to) { return (n_bytes + to - 1) / to * to; }

void mock_count_bytes(int device, int64_t n_bytes) {
  if (device >= 0 && device < MOCK_MAX_DEVICES)
    atomic_fetch_add_explicit(&allocated_bytes[device], (uint64_t)n_bytes, memory_order_relaxed);
}

uint64_t mock_allocated_bytes(int device) {
  return device >= 0 && device < MOCK_MAX_DEVICES ? atomic_load(&allocated_bytes[device]) : 0;
}

bool mock_has_room(int device, uint64_t n_bytes) {
  if (device < 0 || device >= (int)mock_the_machine.n_devices) return true;
  return mock_allocated_bytes(device) + n_bytes <= mock_the_machine.devices[device].memory_bytes;
}

/* Not memfd_create(), which needs glibc 2.27: wheels are for 2.17 and newer. */
int mock_memory_file(const char *name) { return (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC); }

/* A forked child shares the file but must not allocate the same slices. */
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

/* Free whole pages, which read as zero from now on. */
static void punch(const char *base, size_t n_bytes) {
  (void)fallocate(arena_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, base - arena, (off_t)n_bytes);
}

/* A slice whose free the GPU has reached. CUDA does not define the content of new memory; here it is zero, since most
 * kernels that would fill it compute nothing. */
static slice *take_free(size_t n_bytes) {
  const uint64_t now_ns = mock_now_ns();
  for (slice **at = &free_slices; *at != NULL; at = &(*at)->next)
    if ((*at)->n_bytes == n_bytes && (*at)->freed_ns <= now_ns) {
      slice *const found = *at;
      *at = found->next;
      punch(found->base, n_bytes);
      poisoned_bytes -= found->poisoned_bytes;
      found->poisoned_bytes = 0;
      return found;
    }
  return NULL;
}

static void add(slice *one) {
  one->allocated_ns = mock_now_ns();
  one->next = in_use;
  in_use = one;
}

static bool lies_in(const void *pointer, const char *base, size_t n_bytes) {
  return (const char *)pointer >= base && (const char *)pointer < base + n_bytes;
}

static slice **place_in(slice **list, const void *pointer) {
  for (slice **at = list; *at != NULL; at = &(*at)->next)
    if (lies_in(pointer, (*at)->base, (*at)->n_bytes)) return at;
  return NULL;
}

static slice **place_of(const void *pointer) { return place_in(&in_use, pointer); }

cuda_error mock_allocate(void **pointer, size_t n_bytes, bool is_ordered) {
  *pointer = NULL;
  if (n_bytes == 0) return CUDA_SUCCESS;
  n_bytes = round_up(n_bytes, GRANULARITY);
  const int device = mock_current_device();
  if (!mock_has_room(device, n_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
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
    made->is_ordered = is_ordered;
    add(made);
    *pointer = made->base;
    mock_count_bytes(device, (int64_t)n_bytes);
  }
  pthread_mutex_unlock(&lock);
  return made != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Before memory is freed or unmapped. Called without `lock`: a launch takes its own lock before this one. */
static void before_free(const void *base, size_t n_bytes) {
  mock_forget_proxies(base, n_bytes);
}

static void report(const char *by, const void *pointer) {
  atomic_fetch_add(&n_freed_uses, 1);
  for (size_t i = 0; i < N_REPORTED; i++) {
    if (reported[i] == by) return;
    if (reported[i] != NULL) continue;
    reported[i] = by;
    fprintf(stderr, "zerotune: the mock CUDA: %.200s uses memory at %p that is freed by the time that it runs\n", by, pointer);
    return;
  }
}

uint64_t mock_cuda_n_freed_uses(void) { return atomic_load(&n_freed_uses); }

/* Overwrites the content, except for pages that were never written and take no memory. */
static void poison(slice *gone) {
  const off_t begin = gone->base - arena, end = begin + (off_t)gone->n_bytes;
  for (off_t at = lseek(arena_file, begin, SEEK_DATA), hole; at >= 0 && at < end; at = lseek(arena_file, hole, SEEK_DATA)) {
    hole = lseek(arena_file, at, SEEK_HOLE);
    if (hole > end) hole = end;
    const size_t n_bytes = (size_t)(hole - at);
    if (poisoned_bytes + n_bytes > MOST_POISONED_BYTES) {
      punch(arena + at, n_bytes);
      continue;
    }
    memset(arena + at, POISON, n_bytes);
    gone->poisoned_bytes += n_bytes;
    poisoned_bytes += n_bytes;
  }
}

static void note_unmapped(const char *base, size_t n_bytes) {
  unmapped[n_unmapped % N_UNMAPPED].base = base;
  unmapped[n_unmapped++ % N_UNMAPPED].n_bytes = n_bytes;
}

static void free_slice(slice *gone, uint64_t freed_ns) {
  if (gone->counted) mock_count_bytes(gone->device, -(int64_t)gone->n_bytes);
  if (gone->used_ns > freed_ns) report(gone->used_by, gone->base);
  if (gone->imported) {
    munmap(gone->base, gone->n_bytes);
    note_unmapped(gone->base, gone->n_bytes);
    free(gone);
    return;
  }
  poison(gone);
  gone->freed_ns = freed_ns;
  gone->used_ns = 0;
  gone->next = free_slices;
  free_slices = gone;
}

cuda_error mock_free(void *pointer, uint64_t freed_ns) {
  if (pointer == NULL) return CUDA_SUCCESS;
  void *base;
  size_t n_bytes;
  if (mock_find(pointer, &base, &n_bytes) && base == pointer) before_free(base, n_bytes);
  pthread_mutex_lock(&lock);
  slice **const at = place_of(pointer);
  const bool known = at != NULL && (*at)->base == (char *)pointer;
  if (known) {
    slice *const gone = *at;
    *at = gone->next;
    free_slice(gone, freed_ns);
  }
  pthread_mutex_unlock(&lock);
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool mock_is_ordered(const void *pointer) {
  pthread_mutex_lock(&lock);
  slice **const at = place_of(pointer);
  const bool is_ordered = at != NULL && (*at)->is_ordered;
  pthread_mutex_unlock(&lock);
  return is_ordered;
}

/* ---- who uses it ---- */

static bool was_unmapped(const void *pointer) {
  for (size_t i = 0; i < N_UNMAPPED && unmapped[i].base != NULL; i++)
    if (lies_in(pointer, unmapped[i].base, unmapped[i].n_bytes)) return true;
  return false;
}

/* False if the use is not of this allocation, but of an earlier one at the same address. */
static bool use_live(slice *one, const char *by, uint64_t issued_ns, uint64_t until_ns) {
  if (issued_ns < one->allocated_ns && until_ns > one->freed_ns && one->freed_ns != 0) return false;
  if (until_ns > one->used_ns) {
    one->used_ns = until_ns;
    one->used_by = by;
  }
  return true;
}

bool mock_use(const char *by, const void *pointer, size_t n_bytes, uint64_t issued_ns, uint64_t until_ns) {
  const char *at = pointer, *const end = at + n_bytes;
  bool is_there = true, is_known = true;
  pthread_mutex_lock(&lock);
  while (at < end && is_there && is_known) { /* a buffer may extend over several mappings */
    slice **const live = place_of(at), **const freed = live == NULL ? place_in(&free_slices, at) : NULL;
    is_known = live != NULL || freed != NULL;
    if (live != NULL) is_there = use_live(*live, by, issued_ns, until_ns);
    else if (freed != NULL) is_there = until_ns <= (*freed)->freed_ns;
    else is_there = !was_unmapped(at);
    if (is_known) at = live != NULL ? (*live)->base + (*live)->n_bytes : (*freed)->base + (*freed)->n_bytes;
  }
  if (!is_there) report(by, at);
  pthread_mutex_unlock(&lock);
  return is_there;
}

bool mock_is_device_memory(const void *pointer) {
  pthread_mutex_lock(&lock);
  const bool is = place_of(pointer) != NULL || place_in(&free_slices, pointer) != NULL || was_unmapped(pointer);
  pthread_mutex_unlock(&lock);
  return is;
}

void mock_map_memory(char *base, size_t n_bytes, int device) {
  slice *const seen = calloc(1, sizeof *seen);
  if (seen == NULL) return;
  seen->base = base, seen->n_bytes = n_bytes, seen->device = device, seen->imported = true;
  pthread_mutex_lock(&lock);
  add(seen);
  pthread_mutex_unlock(&lock);
}

void mock_unmap_memory(char *base, size_t n_bytes) {
  before_free(base, n_bytes);
  pthread_mutex_lock(&lock);
  slice **const at = place_of(base);
  if (at != NULL) {
    slice *const gone = *at;
    *at = gone->next;
    if (gone->used_ns > mock_now_ns()) report(gone->used_by, base);
    free(gone);
  }
  note_unmapped(base, n_bytes);
  pthread_mutex_unlock(&lock);
}

/* Host memory that the GPU can access; it is not shared with other processes. */
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

/* The file of this process, and the offset in it, by which another process can map this memory. */
bool mock_locate(const void *pointer, int *file, uint64_t *offset) {
  bool found = false;
  pthread_mutex_lock(&lock);
  const char *const at = pointer;
  if (arena != NULL && at >= arena && at < arena + ARENA_BYTES) {
    *file = arena_file;
    *offset = (uint64_t)(at - arena);
    found = true;
  }
  pthread_mutex_unlock(&lock);
  return found || mock_locate_mapped(pointer, file, offset);
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

/* Frees whole pages, which then read as zero: NCCL clears all memory that it allocates, and writes to little of it. */
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

int mock_cuda_malloc(void **pointer, size_t n_bytes) { return mock_allocate(pointer, n_bytes, false); }

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

cuda_error mock_ipc_close(void *pointer) { return mock_free(pointer, mock_now_ns()); }

