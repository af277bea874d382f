/* cuBLAS: products of matrices take their time and compute nothing; all else is in order. */
#include <stdlib.h>
#include <string.h>

#include "streams.h"

#define UNUSED __attribute__((unused))

typedef struct {
  void *stream;
} blas_handle;

/* cublasLtMatrixLayout_t */
typedef struct {
  uint64_t n_rows, n_columns;
} matrix_layout;

/* cublasLtMatmulHeuristicResult_t: an algorithm of 64 bytes, then its workspace, its state and more */
enum { HEURISTIC_BYTES = 96 };

double mock_flops_per_ns;

static int multiply(void *stream, double m, double n, double k) {
  const double ns = mock_flops_per_ns > 0 ? 2.0 * m * n * k / mock_flops_per_ns : 0;
  return mock_enqueue_kernel(stream, mock_kernel_ns + (uint64_t)ns);
}

static int cublasCreate(blas_handle **out) {
  *out = calloc(1, sizeof **out);
  return *out != NULL ? 0 : 3; /* CUBLAS_STATUS_ALLOC_FAILED */
}

static int free_it(void *gone) {
  free(gone);
  return 0;
}

static int cublasSetStream(blas_handle *handle, void *stream) {
  handle->stream = stream;
  return 0;
}

/* GemmEx, Sgemm and their like: what follows k does not matter here. */
static int gemm(blas_handle *handle, UNUSED int turn_a, UNUSED int turn_b, int m, int n, int k) {
  return multiply(handle->stream, m, n, k);
}

static int layout_create(matrix_layout **out, UNUSED int type, uint64_t n_rows, uint64_t n_columns, UNUSED int64_t ld) {
  *out = malloc(sizeof **out);
  if (*out == NULL) return 3;
  **out = (matrix_layout){n_rows, n_columns};
  return 0;
}

static int matmul(UNUSED void *handle, UNUSED void *description, UNUSED const void *alpha, UNUSED const void *a,
                  const matrix_layout *layout_a, UNUSED const void *b, UNUSED void *layout_b, UNUSED const void *beta,
                  UNUSED const void *c, UNUSED void *layout_c, UNUSED void *d, const matrix_layout *layout_d,
                  UNUSED const void *algorithm, UNUSED void *workspace, UNUSED size_t workspace_bytes, void *stream) {
  const double m = (double)layout_d->n_rows, n = (double)layout_d->n_columns;
  return multiply(stream, m, n, m > 0 ? (double)layout_a->n_rows * (double)layout_a->n_columns / m : 0);
}

static int heuristic(UNUSED void *handle, UNUSED void *description, UNUSED void *a, UNUSED void *b, UNUSED void *c,
                     UNUSED void *d, UNUSED void *preference, int n_asked, void *results, int *n_results) {
  memset(results, 0, (size_t)n_asked * HEURISTIC_BYTES);
  *n_results = n_asked > 0 ? 1 : 0;
  return 0;
}

static int create(void **out) {
  static char anything[64];
  *out = anything;
  return 0;
}

static int succeed(void) { return 0; }

static const mock_function functions[] = {
    {"cublasCreate_v2", (void *)cublasCreate},
    {"cublasDestroy_v2", (void *)free_it},
    {"cublasSetStream_v2", (void *)cublasSetStream},
    {"cublasSgemm_v2", (void *)gemm},
    {"cublasDgemm_v2", (void *)gemm},
    {"cublasGemmEx", (void *)gemm},
    {"cublasSgemmEx", (void *)gemm},
    {"cublasGemmStridedBatchedEx", (void *)gemm},
    {"cublasSgemmStridedBatched", (void *)gemm},
    {"cublasGemmBatchedEx", (void *)gemm},
    {"cublasLtMatrixLayoutCreate", (void *)layout_create},
    {"cublasLtMatrixLayoutDestroy", (void *)free_it},
    {"cublasLtMatmul", (void *)matmul},
    {"cublasLtMatmulAlgoGetHeuristic", (void *)heuristic},
};

void *mock_blas_function(const char *name) {
  void *const found = MOCK_FIND(functions, name);
  if (found != NULL) return found;
  const size_t length = strlen(name);
  const bool creates = length > 6 && strcmp(name + length - 6, "Create") == 0;
  return creates ? (void *)create : (void *)succeed;
}
