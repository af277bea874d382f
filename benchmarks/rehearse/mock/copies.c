/* Copies and clears, in their streams. */
#include <stdlib.h>
#include <string.h>

#include "streams.h"

#define UNUSED __attribute__((unused))

/* Copies take the place in their stream that they have on a GPU. Memory of the program itself may change as soon as the
 * call returns: a copy from it keeps the bytes aside, and a copy to it waits for its turn. */
typedef struct {
  operation base;
  void *to;
  const void *from; /* NULL = set */
  uint32_t value;
  bool words; /* set 32 bits at a time */
  size_t n_bytes, n_rows, to_pitch, from_pitch;
  void *aside; /* `from`, where it was the program's */
} copy_operation;

static size_t spanned_bytes(const copy_operation *one, size_t pitch) { return pitch * (one->n_rows - 1) + one->n_bytes; }

static bool is_there(const copy_operation *one, const void *pointer, size_t pitch, uint64_t now_ns) {
  const char *const name = one->from != NULL ? "cudaMemcpyAsync" : "cudaMemsetAsync";
  return pointer == NULL || mock_use(name, pointer, spanned_bytes(one, pitch), one->base.issued_ns, now_ns);
}

static bool run_copy(operation *self, uint64_t *ready_ns) {
  const copy_operation *const copy = (copy_operation *)self;
  if (!is_there(copy, copy->to, copy->to_pitch, *ready_ns)) return true;
  if (copy->aside == NULL && !is_there(copy, copy->from, copy->from_pitch, *ready_ns)) return true;
  for (size_t row = 0; row < copy->n_rows; row++) {
    char *const to = (char *)copy->to + row * copy->to_pitch;
    if (copy->from != NULL) memmove(to, (const char *)copy->from + row * copy->from_pitch, copy->n_bytes);
    else if (copy->value == 0) mock_clear(to, copy->n_bytes);
    else if (!copy->words) memset(to, (int)copy->value, copy->n_bytes);
    else
      for (size_t i = 0; i < copy->n_bytes; i += sizeof copy->value) memcpy(to + i, &copy->value, sizeof copy->value);
  }
  return true;
}

static bool put_aside(copy_operation *one) {
  const size_t n_bytes = spanned_bytes(one, one->from_pitch);
  one->aside = malloc(n_bytes);
  if (one->aside == NULL) return false;
  one->from = memcpy(one->aside, one->from, n_bytes);
  return true;
}

static void drop_copy(operation *self) { free(((copy_operation *)self)->aside); }

static operation *copy_copy(const operation *self) {
  copy_operation *const made = malloc(sizeof *made);
  if (made == NULL) return NULL;
  memcpy(made, self, sizeof *made);
  if (made->aside != NULL && !put_aside(made)) {
    free(made);
    return NULL;
  }
  return &made->base;
}

static const operation_kind COPY = {run_copy, drop_copy, copy_copy, NULL, false};

static cuda_error enqueue_copy(copy_operation asked, void *stream, bool wait) {
  if (asked.n_bytes == 0 || asked.n_rows == 0) return CUDA_SUCCESS;
  copy_operation *const made = malloc(sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = asked;
  made->base.kind = &COPY;
  if (asked.from != NULL && !mock_is_device_memory(asked.from) && !put_aside(made)) {
    free(made);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const cuda_error error = mock_enqueue(stream, &made->base);
  if (wait || !mock_is_device_memory(asked.to)) mock_wait_for_stream(stream, false, true);
  return error;
}

static cuda_error cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, UNUSED int kind, void *stream) {
  return enqueue_copy((copy_operation){.to = to, .from = from, .n_bytes = n_bytes, .n_rows = 1}, stream, false);
}

static cuda_error cudaMemcpy(void *to, const void *from, size_t n_bytes, UNUSED int kind) {
  return enqueue_copy((copy_operation){.to = to, .from = from, .n_bytes = n_bytes, .n_rows = 1}, NULL, true);
}

static cuda_error cudaMemcpyPeerAsync(void *to, UNUSED int to_device, const void *from, UNUSED int from_device,
                                      size_t n_bytes, void *stream) {
  return cudaMemcpyAsync(to, from, n_bytes, 0, stream);
}

static cuda_error cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t n_bytes,
                                    size_t n_rows, UNUSED int kind, void *stream) {
  const copy_operation asked = {.to = to, .from = from, .n_bytes = n_bytes, .n_rows = n_rows, .to_pitch = to_pitch,
                                .from_pitch = from_pitch};
  return enqueue_copy(asked, stream, false);
}

static cuda_error cudaMemsetAsync(void *at, int value, size_t n_bytes, void *stream) {
  return enqueue_copy((copy_operation){.to = at, .value = (uint32_t)value, .n_bytes = n_bytes, .n_rows = 1}, stream, false);
}

cuda_error mock_set_words(void *at, uint32_t word, size_t n_words, void *stream) {
  const copy_operation asked = {.to = at, .value = word, .words = true, .n_bytes = n_words * sizeof word, .n_rows = 1};
  return enqueue_copy(asked, stream, false);
}

static cuda_error cudaMemset(void *at, int value, size_t n_bytes) {
  return enqueue_copy((copy_operation){.to = at, .value = (uint32_t)value, .n_bytes = n_bytes, .n_rows = 1}, NULL, true);
}

static const mock_function functions[] = {
    MOCK_FUNCTION(cudaMemcpyAsync),
    MOCK_FUNCTION(cudaMemcpy),
    MOCK_FUNCTION(cudaMemcpyPeerAsync),
    MOCK_FUNCTION(cudaMemcpy2DAsync),
    MOCK_FUNCTION(cudaMemsetAsync),
    MOCK_FUNCTION(cudaMemset),
};

void *mock_copy_function(const char *name) { return MOCK_FIND(functions, name); }
