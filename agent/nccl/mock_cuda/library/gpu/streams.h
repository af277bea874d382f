/* Streams: operations in order, each of which takes its time or waits for something.
 *
 * An operation is carried out as soon as all before it in its stream are; when it *ends* is reckoned: streams keep the
 * time at which their work is over, and who synchronises waits for that. So the host runs ahead of the mock GPU as it
 * does of a real one. By default nothing takes any time. */
#ifndef ZEROTUNE_MOCK_STREAMS_H
#define ZEROTUNE_MOCK_STREAMS_H

#include "../mock_cuda.h"

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
  void (*drop)(operation *self);                   /* what it holds, not itself; NULL = nothing */
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
/* What is known of the memory that a kernel uses; NULL = less. */
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
uint64_t mock_now_ns(void);
void mock_sleep_until(uint64_t time_ns);
void mock_sleep_a_moment(void); /* between looks of a thread of the program that waits */
cuda_error mock_state(bool carried_out, uint64_t end_ns); /* whether it is over now */
/* Something that operations wait for may have changed; with the lock held. */
void mock_streams_advance(void);

/* ---- kernels.c ---- */

/* Carries out the kernels that are known; of others it tells in `uses` what is known of their memory. */
cuda_error mock_compute(const void *function, cuda_dim3 grid, void **parameters, void *stream, mock_uses *uses);

/* ---- graphs.c ---- */

typedef struct capture capture;
void mock_capture_add(capture *into, operation *one); /* with the lock held */

/* What graphs take of events, which the program hands to them: a new operation, or NULL; without the lock held. */
operation *mock_record_operation(void *event_handle, void *stream_handle);
operation *mock_wait_operation(void *event_handle);

/* ---- the stream as graphs.c needs it; with the lock held ---- */

capture *mock_stream_capture(void *stream_handle);
void mock_stream_set_capture(void *stream_handle, capture *now);
void mock_capture_ended(capture *gone); /* streams and events that belong to it no longer do */
void mock_events_forget(const capture *gone);

#endif
