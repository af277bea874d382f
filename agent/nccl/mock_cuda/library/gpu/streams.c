/* Streams and events of an infinitely fast GPU: work is over when the call that enqueues it returns. */
#include <stdlib.h>
#include <string.h>

#include "../mock_cuda.h"

#define UNUSED __attribute__((unused))

/* ---- streams ---- */

static cuda_error make_token(void **token) {
  *token = calloc(1, 16);
  return *token != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static cuda_error drop_token(void *token) {
  free(token);
  return CUDA_SUCCESS;
}

static cuda_error cudaStreamGetId(void *stream, unsigned long long *id) {
  *id = (unsigned long long)(uintptr_t)stream;
  return CUDA_SUCCESS;
}

static cuda_error return_zero(UNUSED void *stream, int *value) {
  *value = 0;
  return CUDA_SUCCESS;
}

static cuda_error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

/* No stream captures; releases have different arguments after the id. */
static cuda_error capture_info(UNUSED void *stream, int *status, unsigned long long *id) {
  *status = 0;
  if (id != NULL) *id = 0;
  return CUDA_SUCCESS;
}

static cuda_error cudaLaunchHostFunc(UNUSED void *stream, void (*function)(void *), void *argument) {
  function(argument);
  return CUDA_SUCCESS;
}

/* ---- copies ---- */

static cuda_error cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, UNUSED int kind, UNUSED void *stream) {
  memmove(to, from, n_bytes);
  return CUDA_SUCCESS;
}

static cuda_error cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t n_bytes,
                                    size_t n_rows, UNUSED int kind, UNUSED void *stream) {
  for (size_t row = 0; row < n_rows; row++)
    memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, n_bytes);
  return CUDA_SUCCESS;
}

static cuda_error cudaMemsetAsync(void *at, int value, size_t n_bytes, UNUSED void *stream) {
  if (value == 0) mock_clear(at, n_bytes);
  else memset(at, value, n_bytes);
  return CUDA_SUCCESS;
}

static cuda_error succeed(void) { return CUDA_SUCCESS; }

#define SUCCEEDS(name) {#name, (void *)succeed}
static const mock_function functions[] = {
    {"cudaStreamCreate", (void *)make_token},
    {"cudaStreamCreateWithFlags", (void *)make_token},
    {"cudaStreamCreateWithPriority", (void *)make_token},
    {"cudaStreamDestroy", (void *)drop_token},
    MOCK_FUNCTION(cudaStreamGetId),
    {"cudaStreamGetPriority", (void *)return_zero},
    {"cudaStreamGetFlags", (void *)return_zero},
    MOCK_FUNCTION(cudaDeviceGetStreamPriorityRange),
    SUCCEEDS(cudaStreamQuery),
    SUCCEEDS(cudaStreamSynchronize),
    SUCCEEDS(cudaDeviceSynchronize),
    SUCCEEDS(cudaStreamWaitEvent),
    MOCK_FUNCTION(cudaLaunchHostFunc),
    {"cudaStreamIsCapturing", (void *)return_zero},
    {"cudaStreamGetCaptureInfo", (void *)capture_info},
    {"cudaStreamGetCaptureInfo_v2", (void *)capture_info},
    {"cudaStreamGetCaptureInfo_v3", (void *)capture_info},
    SUCCEEDS(cudaThreadExchangeStreamCaptureMode),
    {"cudaEventCreate", (void *)make_token},
    {"cudaEventCreateWithFlags", (void *)make_token},
    {"cudaEventDestroy", (void *)drop_token},
    SUCCEEDS(cudaEventRecord),
    SUCCEEDS(cudaEventQuery),
    SUCCEEDS(cudaEventSynchronize),
    MOCK_FUNCTION(cudaMemcpyAsync),
    {"cudaMemcpy", (void *)cudaMemcpyAsync},
    MOCK_FUNCTION(cudaMemcpy2DAsync),
    MOCK_FUNCTION(cudaMemsetAsync),
    {"cudaMemset", (void *)cudaMemsetAsync},
    {"cudaMemPoolCreate", (void *)make_token},
    {"cudaMemPoolDestroy", (void *)drop_token},
};

void *mock_stream_function(const char *name) { return MOCK_FIND(functions, name); }
