/* Events: marks that streams reach, and wait for. */
#include <stdlib.h>
#include <string.h>

#include "streams.h"

#define UNUSED __attribute__((unused))

typedef struct event {
  mark *latest; /* NULL = never recorded */
  capture *captured;
  struct event *next; /* of all events: only to forget captures */
} event;

static event *events;

static void let_go(mark *one) {
  if (one != NULL && --one->n_references == 0) free(one);
}

typedef struct {
  operation base;
  mark *at;
} mark_operation;

static bool run_record(operation *self, uint64_t *ready_ns) {
  mark *const at = ((mark_operation *)self)->at;
  at->reached = true;
  at->time_ns = *ready_ns;
  return true;
}

static bool run_wait(operation *self, uint64_t *ready_ns) {
  const mark *const at = ((mark_operation *)self)->at;
  if (at->reached && at->time_ns > *ready_ns) *ready_ns = at->time_ns;
  return at->reached;
}

static void drop_mark(operation *self) { let_go(((mark_operation *)self)->at); }

static operation *copy_mark(const operation *self) {
  mark_operation *const made = malloc(sizeof *made);
  if (made == NULL) return NULL;
  memcpy(made, self, sizeof *made);
  made->at->n_references++;
  return &made->base;
}

static const operation_kind RECORD = {run_record, drop_mark, copy_mark, NULL, false};
static const operation_kind WAIT = {run_wait, drop_mark, copy_mark, NULL, false};

static operation *new_mark_operation(const operation_kind *kind, mark *at) {
  mark_operation *const made = malloc(sizeof *made);
  if (made == NULL) return NULL;
  *made = (mark_operation){.base.kind = kind, .at = at};
  at->n_references++;
  return &made->base;
}

static cuda_error cudaEventCreateWithFlags(void **out, UNUSED unsigned flags) {
  event *const made = calloc(1, sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  mock_streams_lock();
  made->next = events;
  events = made;
  mock_streams_unlock();
  *out = made;
  return CUDA_SUCCESS;
}

static cuda_error cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }

static cuda_error cudaEventDestroy(void *handle) {
  event *const gone = handle;
  mock_streams_lock();
  event **at = &events;
  while (*at != NULL && *at != gone) at = &(*at)->next;
  if (*at != NULL) *at = gone->next;
  let_go(gone->latest);
  mock_streams_unlock();
  free(gone);
  return CUDA_SUCCESS;
}

operation *mock_record_operation(void *handle, void *stream_handle) {
  event *const one = handle;
  mark *const made = calloc(1, sizeof *made);
  if (made == NULL) return NULL;
  made->n_references = 1;
  mock_streams_lock();
  one->captured = stream_handle != NULL ? mock_stream_capture(stream_handle) : NULL;
  let_go(one->latest);
  one->latest = made;
  operation *const recorded = new_mark_operation(&RECORD, made);
  mock_streams_unlock();
  return recorded;
}

static cuda_error cudaEventRecord(void *handle, void *stream_handle) {
  void *const named = stream_handle != NULL ? stream_handle : (void *)MOCK_LEGACY_STREAM;
  return mock_enqueue(stream_handle, mock_record_operation(handle, named));
}

static cuda_error cudaEventRecordWithFlags(void *handle, void *stream_handle, UNUSED unsigned flags) {
  return cudaEventRecord(handle, stream_handle);
}

operation *mock_wait_operation(void *handle) {
  const event *const one = handle;
  mock_streams_lock();
  operation *const waits = one->latest != NULL ? new_mark_operation(&WAIT, one->latest) : NULL;
  mock_streams_unlock();
  return waits;
}

static cuda_error cudaStreamWaitEvent(void *stream_handle, void *handle, UNUSED unsigned flags) {
  event *const one = handle;
  mock_streams_lock();
  if (one->captured != NULL) { /* the stream joins the capture, in which operations are in one order already */
    mock_stream_set_capture(stream_handle, one->captured);
    mock_streams_unlock();
    return CUDA_SUCCESS;
  }
  const bool never_recorded = one->latest == NULL;
  mock_streams_unlock();
  return never_recorded ? CUDA_SUCCESS : mock_enqueue(stream_handle, mock_wait_operation(handle));
}

static cuda_error cudaEventQuery(void *handle) {
  const event *const one = handle;
  mock_streams_lock();
  mock_streams_advance();
  const cuda_error state = one->latest == NULL ? CUDA_SUCCESS : mock_state(one->latest->reached, one->latest->time_ns);
  mock_streams_unlock();
  return state;
}

static cuda_error cudaEventSynchronize(void *handle) {
  const event *const one = handle;
  mock_streams_lock();
  mark *const at = one->latest;
  if (at != NULL) at->n_references++;
  uint64_t end_ns = 0;
  while (at != NULL) {
    mock_streams_advance();
    if (at->reached) break;
    mock_streams_unlock();
    mock_sleep_a_moment();
    mock_streams_lock();
  }
  if (at != NULL) end_ns = at->time_ns;
  let_go(at);
  mock_streams_unlock();
  mock_sleep_until(end_ns);
  return CUDA_SUCCESS;
}

static cuda_error cudaEventElapsedTime(float *elapsed_ms, void *start, void *end) {
  mock_streams_lock();
  mock_streams_advance();
  const mark *const from = ((event *)start)->latest, *const to = ((event *)end)->latest;
  cuda_error state = CUDA_ERROR_INVALID_HANDLE;
  if (from != NULL && to != NULL) {
    state = from->reached ? mock_state(to->reached, to->time_ns) : CUDA_ERROR_NOT_READY;
    if (state == CUDA_SUCCESS) *elapsed_ms = (float)((double)(int64_t)(to->time_ns - from->time_ns) / 1e6);
  }
  mock_streams_unlock();
  return state;
}

void mock_events_forget(const capture *gone) {
  for (event *one = events; one != NULL; one = one->next)
    if (one->captured == gone) one->captured = NULL;
}

static const mock_function functions[] = {
    MOCK_FUNCTION(cudaEventCreateWithFlags),
    MOCK_FUNCTION(cudaEventCreate),
    MOCK_FUNCTION(cudaEventDestroy),
    MOCK_FUNCTION(cudaEventRecord),
    MOCK_FUNCTION(cudaEventRecordWithFlags),
    MOCK_FUNCTION(cudaStreamWaitEvent),
    MOCK_FUNCTION(cudaEventQuery),
    MOCK_FUNCTION(cudaEventSynchronize),
    MOCK_FUNCTION(cudaEventElapsedTime),
};

void *mock_event_function(const char *name) { return MOCK_FIND(functions, name); }
