/* Streams: operations in order, each of which takes its time or waits for something.
 *
 * An operation is carried out as soon as all before it in its stream are; when it *ends* is reckoned: streams keep the
 * time at which their work is over, and who synchronises waits for that. So the host runs ahead of the mock GPU as it
 * does of a real one. By default nothing takes any time. */
#ifndef ZEROTUNE_MOCK_STREAMS_H
#define ZEROTUNE_MOCK_STREAMS_H

#include "mock_cuda.h"

/* ---- settings from Python ---- */

MOCK_API void mock_cuda_set_queue(uint32_t n_kernels); /* that a stream takes before its host waits; at most 1024 */
/* Microseconds of a collective; `function_id` UINT32_MAX: of messages between ranks. */
typedef double (*mock_price)(int n_ranks, int n_nodes, uint32_t function_id, int n_channels, uint64_t count,
                             uint64_t element_bytes);
/* Kernels run in their streams from now on: collectives for their price, each disturbed by this standard deviation, others
 * for `kernel_us`, and products of matrices for their arithmetic. The GPU waits `host_us` for a function of the host, and for
 * as long as that runs. */
MOCK_API void mock_cuda_set_prices(mock_price price, double relative_noise, double kernel_us, double flops_per_ns,
                                   double host_us);
MOCK_API void mock_cuda_set_nccl(void *handle); /* whose API this library stands in front of, from dlopen() */
/* Larger inputs of a rank are not copied: for hosts too slow for it. */
MOCK_API void mock_cuda_set_most_bytes(uint64_t n_bytes);
MOCK_API void mock_cuda_set_node(int node);     /* which node of the cluster this process is on */

/* ---- between the files ---- */

extern uint64_t mock_kernel_ns; /* duration of a kernel that is no collective */
extern uint64_t mock_host_ns;   /* until a function of the host begins, and its end is known */
extern double mock_flops_per_ns;

/* Functions by their names; NULL = the mock has none. */
void *mock_kernel_function(const char *name);
void *mock_copy_function(const char *name);
void *mock_timed_stream_function(const char *name);
void *mock_event_function(const char *name);
void *mock_graph_function(const char *name);
void *mock_torch_driver_function(const char *name);
cuda_error mock_write_word(void *stream, uint64_t at, uint32_t word, unsigned flags); /* as cuStreamWriteValue32 */
cuda_error mock_set_words(void *at, uint32_t word, size_t n_words, void *stream);

/* The moment at which an event is reached, shared by the event, its record and those who wait for it. */
typedef struct {
  uint32_t n_references;
  bool reached;
  uint64_t time_ns;
} mark;

typedef struct operation operation;
typedef struct {
  /* Whether it could be carried out; false: ask again. Called with the lock held; `ready_ns` is when all before it
   * ends, and becomes when it ends. */
  bool (*run)(operation *self, uint64_t *ready_ns);
  void (*drop)(operation *self);                   /* its contents, not itself; NULL = nothing */
  operation *(*copy)(const operation *self);       /* for one more launch of a graph; NULL = cannot be captured */
  void (*issue)(operation *self);                  /* it is now in a stream; NULL = nothing to do */
  bool is_kernel;                                  /* takes a place in the launch queue */
} operation_kind;

struct operation {
  const operation_kind *kind;
  uint64_t issued_ns;
  uint64_t number; /* of all that were issued */
  operation *next;
};

typedef struct stream stream;
enum { MOCK_LEGACY_STREAM = 1, MOCK_THREAD_STREAM = 2 }; /* cudaStreamLegacy, cudaStreamPerThread: as NULL */

void mock_streams_lock(void);
void mock_streams_unlock(void);
/* Put an operation, made with malloc(), at a stream's end, or into the graph that it captures; takes the lock. */
cuda_error mock_enqueue(void *stream_handle, operation *one);
#define MOCK_MAX_USES 8
/* The known memory that a kernel uses; NULL = unknown. */
typedef struct {
  const char *by; /* its name, which lives as long as the process */
  const void *at[MOCK_MAX_USES];
} mock_uses;
/* A kernel of this duration; `uses` NULL = nothing is known. */
cuda_error mock_enqueue_kernel(void *stream_handle, uint64_t duration_ns, const mock_uses *uses);
/* A full launch queue makes the host wait, behind a launch. */
void mock_keep_within_queue(void *stream_handle);
/* Until all that is in the stream (NULL and `all`: in every stream) is carried out, and, with `ended`, over. */
void mock_wait_for_stream(void *stream_handle, bool all, bool ended);
bool mock_is_capturing(void *stream_handle);
void mock_sleep_until(uint64_t time_ns);
void mock_sleep_a_moment(void); /* between looks of a thread of the program that waits */
cuda_error mock_state(bool carried_out, uint64_t end_ns); /* whether it is over now */
/* Something that operations wait for may have changed; with the lock held. */
void mock_streams_advance(void);

/* ---- kernels.c ---- */

/* Carries out the known kernels; `uses` gets the known memory of the others. */
cuda_error mock_compute(const void *function, cuda_dim3 grid, void **parameters, void *stream, mock_uses *uses);

/* ---- graphs.c ---- */

typedef struct capture capture;
void mock_capture_add(capture *into, operation *one); /* with the lock held */

/* A new operation of a graph for an event of the program, or NULL; without the lock held. */
operation *mock_record_operation(void *event_handle, void *stream_handle);
operation *mock_wait_operation(void *event_handle);

/* ---- the stream as graphs.c needs it; with the lock held ---- */

capture *mock_stream_capture(void *stream_handle);
void mock_stream_set_capture(void *stream_handle, capture *now);
void mock_capture_ended(capture *gone); /* streams and events that belong to it no longer do */
void mock_events_forget(const capture *gone);

#endif
