/* CUDA graphs: the operations of streams that captured, in the order of issue. */
#include <stdlib.h>
#include <string.h>

#include "streams.h"

#define UNUSED __attribute__((unused))
enum { NOT_CAPTURING = 0, CAPTURING = 1 };
enum { NODE_TYPE_KERNEL = 0 };

typedef struct user_object {
  void (*destroy)(void *);
  void *pointer;
  int n_references;
} user_object;

typedef struct kept {
  user_object *object;
  struct kept *next;
} kept;

typedef struct {
  operation *first, *last;
  size_t n_operations;
  kept *objects;
  int n_references; /* the graph and its executables */
} graph;

struct capture {
  graph *into;
  uint64_t id;
};

static uint64_t n_captures;

static graph *new_graph(void) {
  graph *const made = calloc(1, sizeof *made);
  if (made != NULL) made->n_references = 1;
  return made;
}

static void append(graph *to, operation *one) {
  one->next = NULL;
  if (to->last != NULL) to->last->next = one;
  else to->first = one;
  to->last = one;
  to->n_operations++;
}

static void release_object(user_object *one, int n_references) {
  one->n_references -= n_references;
  if (one->n_references > 0) return;
  one->destroy(one->pointer);
  free(one);
}

void mock_capture_add(capture *into, operation *one) { append(into->into, one); }

/* Objects are the program's: their ends run without the lock. */
static void release_graph(graph *one) {
  mock_streams_lock();
  const bool last = --one->n_references == 0;
  while (last && one->first != NULL) {
    operation *const gone = one->first;
    one->first = gone->next;
    if (gone->kind->drop != NULL) gone->kind->drop(gone);
    free(gone);
  }
  mock_streams_unlock();
  if (!last) return;
  while (one->objects != NULL) {
    kept *const gone = one->objects;
    one->objects = gone->next;
    release_object(gone->object, 1);
    free(gone);
  }
  free(one);
}

/* ---- capturing ---- */

static cuda_error cudaStreamBeginCapture(void *stream, UNUSED int mode) {
  capture *const made = calloc(1, sizeof *made);
  if (made == NULL || (made->into = new_graph()) == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  mock_streams_lock();
  made->id = ++n_captures;
  mock_stream_set_capture(stream, made);
  mock_streams_unlock();
  return CUDA_SUCCESS;
}

static cuda_error cudaStreamEndCapture(void *stream, graph **out) {
  mock_streams_lock();
  capture *const over = mock_stream_capture(stream);
  if (over != NULL) mock_capture_ended(over);
  mock_streams_unlock();
  if (over == NULL) return CUDA_ERROR_ILLEGAL_STATE;
  *out = over->into;
  free(over);
  return CUDA_SUCCESS;
}

static cuda_error cudaStreamIsCapturing(void *stream, int *status) {
  mock_streams_lock();
  *status = mock_stream_capture(stream) != NULL ? CAPTURING : NOT_CAPTURING;
  mock_streams_unlock();
  return CUDA_SUCCESS;
}

static cuda_error capture_info(void *stream, int *status, unsigned long long *id, graph **into) {
  mock_streams_lock();
  const capture *const now = mock_stream_capture(stream);
  *status = now != NULL ? CAPTURING : NOT_CAPTURING;
  if (id != NULL) *id = now != NULL ? now->id : 0;
  if (into != NULL) *into = now != NULL ? now->into : NULL;
  mock_streams_unlock();
  return CUDA_SUCCESS;
}

/* Operations of a capture are in one order, so nothing depends on anything else. */
static cuda_error capture_info_v2(void *stream, int *status, unsigned long long *id, graph **into,
                                  const void ***dependencies, size_t *n_dependencies) {
  if (dependencies != NULL) *dependencies = NULL;
  if (n_dependencies != NULL) *n_dependencies = 0;
  return capture_info(stream, status, id, into);
}

static cuda_error capture_info_v3(void *stream, int *status, unsigned long long *id, graph **into,
                                  const void ***dependencies, const void **edges, size_t *n_dependencies) {
  if (edges != NULL) *edges = NULL;
  return capture_info_v2(stream, status, id, into, dependencies, n_dependencies);
}

/* The unversioned name had three arguments up to CUDA 12, and has all of them since. */
static cuda_error cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, graph **into,
                                           const void ***dependencies, const void **edges, size_t *n_dependencies) {
  if (mock_the_machine.cuda_version < 13000) return capture_info(stream, status, id, NULL);
  return capture_info_v3(stream, status, id, into, dependencies, edges, n_dependencies);
}

static cuda_error succeed(void) { return CUDA_SUCCESS; }

/* ---- graphs ---- */

static cuda_error cudaGraphCreate(graph **out, UNUSED unsigned flags) {
  *out = new_graph();
  return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* An executable is its graph once more: operations are copied whenever it is launched. */
static cuda_error cudaGraphInstantiate(graph **executable, graph *of, UNUSED unsigned long long flags) {
  mock_streams_lock();
  of->n_references++;
  mock_streams_unlock();
  *executable = of;
  return CUDA_SUCCESS;
}

static cuda_error cudaGraphLaunch(graph *executable, void *stream) {
  for (const operation *one = executable->first; one != NULL; one = one->next) {
    mock_streams_lock();
    operation *const made = one->kind->copy != NULL ? one->kind->copy(one) : NULL;
    mock_streams_unlock();
    const cuda_error error = made != NULL ? mock_enqueue(stream, made) : CUDA_ERROR_NOT_SUPPORTED;
    if (error != CUDA_SUCCESS) return error;
  }
  mock_keep_within_queue(stream);
  return CUDA_SUCCESS;
}

static cuda_error cudaGraphDestroy(graph *gone) {
  release_graph(gone);
  return CUDA_SUCCESS;
}

/* Nodes are only counted. */
static cuda_error cudaGraphGetNodes(const graph *of, void **nodes, size_t *n_nodes) {
  for (size_t i = 0; nodes != NULL && i < *n_nodes; i++) nodes[i] = NULL;
  *n_nodes = of->n_operations;
  return CUDA_SUCCESS;
}

static cuda_error add_node(void **node) {
  if (node != NULL) *node = NULL;
  return CUDA_SUCCESS;
}

static cuda_error add_operation(graph *to, void **node, operation *one) {
  if (one != NULL) {
    mock_streams_lock();
    append(to, one);
    mock_streams_unlock();
  }
  return add_node(node);
}

static cuda_error cudaGraphAddEventRecordNode(void **node, graph *to, UNUSED const void *dependencies,
                                              UNUSED size_t n_dependencies, void *event) {
  return add_operation(to, node, mock_record_operation(event, NULL));
}

static cuda_error cudaGraphAddEventWaitNode(void **node, graph *to, UNUSED const void *dependencies,
                                            UNUSED size_t n_dependencies, void *event) {
  return add_operation(to, node, mock_wait_operation(event));
}

static cuda_error cudaGraphNodeGetType(UNUSED void *node, int *type) {
  *type = NODE_TYPE_KERNEL;
  return CUDA_SUCCESS;
}

static cuda_error cudaGraphNodeGetDependencies(UNUSED void *node, UNUSED void **dependencies, size_t *n_dependencies) {
  *n_dependencies = 0;
  return CUDA_SUCCESS;
}

/* ---- objects that live as long as a graph ---- */

static cuda_error cudaUserObjectCreate(user_object **out, void *pointer, void (*destroy)(void *), unsigned n_references,
                                       UNUSED unsigned flags) {
  user_object *const made = calloc(1, sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = (user_object){destroy, pointer, (int)n_references};
  *out = made;
  return CUDA_SUCCESS;
}

static cuda_error cudaUserObjectRelease(user_object *one, unsigned n_references) {
  release_object(one, (int)n_references);
  return CUDA_SUCCESS;
}

static cuda_error cudaGraphRetainUserObject(graph *by, user_object *object, UNUSED unsigned n_references, unsigned flags) {
  kept *const made = malloc(sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  const bool moved = flags & 1; /* cudaGraphUserObjectMove */
  if (!moved) object->n_references++;
  *made = (kept){object, by->objects};
  by->objects = made;
  return CUDA_SUCCESS;
}

#define SUCCEEDS(name) {#name, (void *)succeed}
static const mock_function functions[] = {
    MOCK_FUNCTION(cudaStreamBeginCapture),
    MOCK_FUNCTION(cudaStreamEndCapture),
    MOCK_FUNCTION(cudaStreamIsCapturing),
    MOCK_FUNCTION(cudaStreamGetCaptureInfo),
    {"cudaStreamGetCaptureInfo_v2", (void *)capture_info_v2},
    {"cudaStreamGetCaptureInfo_v3", (void *)capture_info_v3},
    SUCCEEDS(cudaStreamUpdateCaptureDependencies),
    SUCCEEDS(cudaStreamUpdateCaptureDependencies_v2),
    SUCCEEDS(cudaThreadExchangeStreamCaptureMode),
    MOCK_FUNCTION(cudaGraphCreate),
    MOCK_FUNCTION(cudaGraphInstantiate),
    {"cudaGraphInstantiateWithFlags", (void *)cudaGraphInstantiate},
    MOCK_FUNCTION(cudaGraphLaunch),
    SUCCEEDS(cudaGraphUpload),
    MOCK_FUNCTION(cudaGraphDestroy),
    {"cudaGraphExecDestroy", (void *)cudaGraphDestroy},
    SUCCEEDS(cudaGraphDebugDotPrint),
    MOCK_FUNCTION(cudaGraphGetNodes),
    {"cudaGraphAddEmptyNode", (void *)add_node},
    {"cudaGraphAddDependencies", (void *)succeed},
    MOCK_FUNCTION(cudaGraphAddEventRecordNode),
    MOCK_FUNCTION(cudaGraphAddEventWaitNode),
    MOCK_FUNCTION(cudaGraphNodeGetType),
    MOCK_FUNCTION(cudaGraphNodeGetDependencies),
    MOCK_FUNCTION(cudaUserObjectCreate),
    MOCK_FUNCTION(cudaUserObjectRelease),
    MOCK_FUNCTION(cudaGraphRetainUserObject),
};

void *mock_graph_function(const char *name) {
  return MOCK_FIND(functions, name);
}
