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

static int multiply(void *stream, double m, double n, double k, mock_uses uses) {
  const double ns = mock_flops_per_ns > 0 ? 2.0 * m * n * k / mock_flops_per_ns : 0;
  return mock_enqueue_kernel(stream, mock_kernel_ns + (uint64_t)ns, &uses);
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

/* The arguments between the addresses differ, and do not matter. */
#define GEMM(name, a_to_b, b_to_c)                                                                                     \
  static int name(blas_handle *handle, UNUSED int turn_a, UNUSED int turn_b, int m, int n, int k,                      \
                  UNUSED const void *alpha, const void *a, a_to_b const void *b, b_to_c const void *c) {               \
    return multiply(handle->stream, m, n, k, (mock_uses){#name, {a, b, c}});                                           \
  }
#define _ UNUSED uint64_t
#define A_TO_B(...) __VA_ARGS__,
#define B_TO_C(...) __VA_ARGS__,
GEMM(cublasSgemm, A_TO_B(_ lda), B_TO_C(_ ldb, _ beta))
GEMM(cublasGemmEx, A_TO_B(_ type_a, _ lda), B_TO_C(_ type_b, _ ldb, _ beta))
GEMM(cublasGemmStridedBatchedEx, A_TO_B(_ type_a, _ lda, _ step_a), B_TO_C(_ type_b, _ ldb, _ step_b, _ beta))
#undef _

static int layout_create(matrix_layout **out, UNUSED int type, uint64_t n_rows, uint64_t n_columns, UNUSED int64_t ld) {
  *out = malloc(sizeof **out);
  if (*out == NULL) return 3;
  **out = (matrix_layout){n_rows, n_columns};
  return 0;
}

static int matmul(UNUSED void *handle, UNUSED void *description, UNUSED const void *alpha, const void *a,
                  const matrix_layout *layout_a, const void *b, UNUSED void *layout_b, UNUSED const void *beta,
                  UNUSED const void *c, UNUSED void *layout_c, const void *d, const matrix_layout *layout_d,
                  UNUSED const void *algorithm, UNUSED void *workspace, UNUSED size_t workspace_bytes, void *stream) {
  const double m = (double)layout_d->n_rows, n = (double)layout_d->n_columns;
  const double k = m > 0 ? (double)layout_a->n_rows * (double)layout_a->n_columns / m : 0;
  return multiply(stream, m, n, k, (mock_uses){"cublasLtMatmul", {a, b, d}});
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
    {"cublasSgemm_v2", (void *)cublasSgemm},
    {"cublasDgemm_v2", (void *)cublasSgemm},
    {"cublasGemmEx", (void *)cublasGemmEx},
    {"cublasSgemmEx", (void *)cublasGemmEx},
    {"cublasGemmStridedBatchedEx", (void *)cublasGemmStridedBatchedEx},
    {"cublasSgemmStridedBatched", (void *)cublasGemmEx},
    {"cublasGemmBatchedEx", (void *)cublasGemmEx}, /* its addresses are those of arrays of addresses */
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
