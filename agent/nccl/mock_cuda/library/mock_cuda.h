/* A machine with GPUs for an unmodified libnccl, on one without: functions for Python, and between the files.
 *
 * Device memory is shared host memory. A kernel is over when it is launched: its times are written to the counters of
 * NCCL's profiler, and nothing is computed.
 */
#ifndef ZEROTUNE_MOCK_CUDA_H
#define ZEROTUNE_MOCK_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

#define MOCK_MAX_DEVICES 64
#define MOCK_MAX_NICS 64
#define MOCK_MAX_CHANNELS 64
#define MOCK_API __attribute__((visibility("default")))

/* ---- for Python ---- */

typedef struct {
  char bus_id[16]; /* "0000:0f:00.0" */
  char name[64];
  int32_t capability; /* 90 = 9.0 */
  int32_t n_multiprocessors;
  uint64_t memory_bytes;
} mock_device;

typedef struct {
  char name[32]; /* in the topology file */
  uint64_t guid;
  int32_t speed_mbps;
  int32_t port;
  int32_t reaches_gpu_memory; /* GPUDirect RDMA */
  int32_t is_sharp;           /* its switches reduce (SHARP) */
  float latency_us;
} mock_nic;

typedef struct {
  uint32_t n_devices, n_nics;
  int32_t cuda_version; /* 12090 = 12.9 */
  int32_t multicast;    /* its NVLink switches multicast, so that NCCL has NVLS */
  mock_device devices[MOCK_MAX_DEVICES];
  mock_nic nics[MOCK_MAX_NICS];
} mock_machine;

/* The layout of structs that NCCL's kernels and its host share; offsets in bytes, -1 = not in this release. */
typedef struct {
  int32_t n_ranks, channels, work_started, work_completed; /* in the device communicator */
  int32_t channel_bytes, work_counter;                     /* of one channel */
  int32_t times;                                           /* counters have times (2.27 and newer) */
  int32_t work_counts;                                     /* first of three counts of a collective's work */
  int32_t work_bytes;                                      /* size of a collective's work */
  int32_t batches;                                         /* launches have batches (2.22 and newer) */
  int32_t function_mask;                                   /* bits of a batch's function id */
  int32_t fifo_slot_bytes, fifo_size;                      /* size of ncclConnFifo, offset of its `size` */
  int32_t counts_watched_only; /* only works whose channels a profiler follows are counted (2.31 and newer) */
} mock_layout;

/* One collective of one kernel launch. */
typedef struct {
  uint64_t launch; /* running number; collectives of one launch share it */
  uint64_t communicator, stream;
  uint64_t count; /* elements over all channels; all_gather: bytes per rank */
  uint64_t channel_mask;
  uint32_t function_id;
  uint32_t device;
  uint32_t number; /* within the launch */
  uint32_t chunk_grains; /* chunk size of its first channel, in grains: 512 bytes of Simple, 1,920 of LL128, 16 of LL */
} mock_work;

MOCK_API void mock_cuda_set_machine(const mock_machine *machine);
MOCK_API void mock_cuda_set_layout(const mock_layout *layout);
MOCK_API void mock_cuda_set_device(int device); /* the calling thread's */
/* Overwrite the beginning of each function with a jump to the mock's. A function that the mock lacks prints that when
 * it is called. Returns 0; -1 = the code cannot be written to. */
enum { MOCK_RUNTIME_OF_NCCL, MOCK_RUNTIME, MOCK_BLAS };
MOCK_API int mock_cuda_patch(const char *const *names, void *const *addresses, const uint64_t *sizes,
                             size_t n_functions, int kind);
/* Let the library that contains this address wait for its sockets without spinning, and share memory by anonymous
 * files. Returns 0; -1 = its calls cannot be found. */
MOCK_API int mock_cuda_redirect_calls(const void *within);
MOCK_API void *mock_cuda_function(const char *name); /* of the CUDA runtime; NULL = the mock does not have it */
MOCK_API int mock_cuda_malloc(void **pointer, size_t n_bytes);
MOCK_API void mock_cuda_set_duration_us(double duration_us); /* reported by kernels; below 0: they never end */
MOCK_API void mock_cuda_set_timer_step_ns(uint64_t step_ns); /* resolution of the GPU's timer */
MOCK_API void mock_cuda_set_away_ms(double away_ms); /* how long NCCL's idle threads are descheduled */
MOCK_API void mock_cuda_set_recording(int on); /* works into a ring for mock_cuda_drain; a full ring drops them */
MOCK_API size_t mock_cuda_drain(mock_work *out, size_t max_works);
MOCK_API uint64_t mock_cuda_n_freed_uses(void); /* kernels and copies whose memory was freed before they ran */

/* ---- between the files ---- */

typedef struct {
  const char *name;
  void *function;
} mock_function;
#define MOCK_FUNCTION(name) {#name, (void *)name}
#define MOCK_FIND(functions, name) mock_find_function(functions, sizeof functions / sizeof *functions, name)
void *mock_find_function(const mock_function *functions, size_t n_functions, const char *name); /* NULL = none */

extern mock_machine mock_the_machine;
extern mock_layout mock_the_layout;
int mock_current_device(void);
uint64_t mock_allocated_bytes(int device);
int mock_memory_file(const char *name); /* -1 = none */
extern char mock_contexts[MOCK_MAX_DEVICES];
uint64_t mock_now_ns(void);
cu_uuid mock_uuid(int device);
void *mock_runtime_function(const char *name, bool of_nccl); /* NULL = the mock does not have it */
void *mock_stream_function(const char *name);
void *mock_driver_function(const char *name);
cuda_error mock_allocate(void **pointer, size_t n_bytes, bool is_ordered); /* is_ordered: as cudaMallocAsync() */
cuda_error mock_allocate_host(void **pointer, size_t n_bytes);
cuda_error mock_free(void *pointer, uint64_t freed_ns); /* freed_ns: when the GPU reaches the free */
bool mock_is_ordered(const void *pointer);
/* A kernel or copy with name `by`, which is never freed, uses memory until `until_ns` of the GPU's time. False: the
 * memory is freed by then, and may not be mapped; this is printed and counted. */
bool mock_use(const char *by, const void *pointer, size_t n_bytes, uint64_t issued_ns, uint64_t until_ns);
bool mock_is_device_memory(const void *pointer); /* also if it was freed */
void mock_clear(void *at, size_t n_bytes);
bool mock_find(const void *pointer, void **base, size_t *n_bytes);
bool mock_locate(const void *pointer, int *file, uint64_t *offset);
void mock_describe_pointer(cuda_pointer_attributes *attributes, const void *pointer);
cuda_error mock_ipc_handle(cuda_ipc_handle *handle, void *pointer);
cuda_error mock_ipc_open(void **pointer, cuda_ipc_handle handle);
cuda_error mock_ipc_close(void *pointer);
void *mock_memory_function(const char *name); /* cuMem and cuMulticast */
cuda_error mock_on_launch(void **parameters, void **extra, void *stream);
void mock_let_proxies_run(const char *communicator, uint64_t channel_mask);
void mock_forget_proxies(const void *base, size_t n_bytes); /* before this memory is freed */

/* ---- additions of mock-GPU runs (benchmarks/rehearse/mock); NULL if they are not linked ---- */

#define MOCK_ADDED __attribute__((weak))
MOCK_ADDED void *mock_rehearsed_function(const char *name, bool of_nccl); /* overrides those of this library */
MOCK_ADDED void *mock_blas_function(const char *name);
MOCK_ADDED bool mock_is_priced(void);

#endif
