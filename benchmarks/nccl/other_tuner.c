/* A foreign tuner of one version (-DVERSION=2 .. 7), or of all from 3 up to it (-DAND_OLDER). Tests set its answers. */
#include "nccl_abi.h"

#define MAYBE __attribute__((unused)) /* by version */

enum { NOTHING, CELL, CHANNELS, ERROR, STRIKES_ALL, REVIVES, STRIKES_ONE };

/* tests set and read these */
int other_answer, other_algorithm, other_protocol, other_channels, other_init_fails;
size_t other_chunk_bytes;
int other_n_inits, other_n_asks, other_n_ends, other_n_chunks, other_asked_version;
uint64_t other_comm_id;
size_t other_n_ranks, other_n_nodes;
double other_constant_seen, other_constant_set;

static int contexts[256];

static nccl_result made(void **context, size_t n_ranks, size_t n_nodes) {
  *context = &contexts[other_n_inits++ % 256];
  other_n_ranks = n_ranks;
  other_n_nodes = n_nodes;
  return other_init_fails ? 3 : 0;
}

MAYBE static nccl_result answer(void *context, int version, float **costs, int n_protocols, int *n_channels) {
  float *table = (float *)(void *)costs;
  other_n_asks++;
  other_asked_version = version;
  if (context < (void *)contexts || context >= (void *)(contexts + 256)) __builtin_trap();
  const int cell = other_algorithm * n_protocols + other_protocol;
  switch (other_answer) {
  case ERROR:
    table[cell] = 0.0f;
    *n_channels = 7;
    return 3;
  case STRIKES_ALL:
    for (int i = 0; i < 5 * n_protocols; i++) table[i] = -1.0f;
    for (int i = 6 * n_protocols; i < 7 * n_protocols; i++) table[i] = -1.0f;
    return 0;
  case STRIKES_ONE:
    table[cell] = -1.0f;
    return 0;
  case REVIVES:
    table[cell] = 1.0f;
    return 0;
  case CELL:
    table[cell] = 0.0f;
    *n_channels = other_channels;
    return 0;
  case CHANNELS:
    *n_channels = other_channels;
  }
  return 0;
}

static nccl_result end(void *context) {
  (void)context;
  other_n_ends++;
  return 0;
}

#if VERSION == 2
static nccl_result init_v2(size_t n_ranks, size_t n_nodes, nccl_logger log, void **context) {
  (void)log;
  return made(context, n_ranks, n_nodes);
}

static nccl_result ask_v2(void *context, int collective, size_t n_bytes, int collnet, int nvls, int n_pipe_ops,
                          int *algorithm, int *protocol, int *n_channels) {
  (void)context, (void)collective, (void)n_bytes, (void)collnet, (void)nvls, (void)n_pipe_ops;
  other_n_asks++;
  other_asked_version = 2;
  if (other_answer == CELL || other_answer == ERROR || other_answer == REVIVES) {
    *algorithm = other_algorithm;
    *protocol = other_protocol;
  }
  if (other_answer == CELL || other_answer == CHANNELS) *n_channels = other_channels;
  return other_answer == ERROR ? 3 : 0;
}

const nccl_tuner_v2 ncclTunerPlugin_v2 = {"other", init_v2, ask_v2, end};
#endif

#if VERSION == 3 || VERSION == 4 || defined(AND_OLDER)
static nccl_result init_v4(size_t n_ranks, size_t n_nodes, nccl_logger log, void **context) {
  (void)log;
  return made(context, n_ranks, n_nodes);
}
#endif

#if VERSION == 3 || defined(AND_OLDER)
static nccl_result ask_v3(void *context, int collective, size_t n_bytes, int n_pipe_ops, float **costs,
                          int n_algorithms, int n_protocols, int *n_channels) {
  (void)collective, (void)n_bytes, (void)n_pipe_ops, (void)n_algorithms;
  return answer(context, 3, costs, n_protocols, n_channels);
}

const nccl_tuner_v3 ncclTunerPlugin_v3 = {"other", init_v4, ask_v3, end};
#endif

#if VERSION >= 4
#define ASK(version)                                                                                             \
  static nccl_result ask_v##version(void *context, int collective, size_t n_bytes, int n_pipe_ops, float **costs, \
                                    int n_algorithms, int n_protocols, int registered, int *n_channels) {         \
    (void)collective, (void)n_bytes, (void)n_pipe_ops, (void)n_algorithms, (void)registered;                      \
    return answer(context, version, costs, n_protocols, n_channels);                                              \
  }

#if VERSION == 4 || defined(AND_OLDER)
ASK(4)
const nccl_tuner_v4 ncclTunerPlugin_v4 = {"other", init_v4, ask_v4, end};
#endif
#endif

#if VERSION >= 5
MAYBE static nccl_result init_v5(void **context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, nccl_logger log,
                                 nccl_nvl_domain_info *domain, nccl_tuner_constants *constants) {
  (void)log;
  other_comm_id = comm_id;
  if (domain == NULL || domain->n_nvl_domains != (int)n_nodes) __builtin_trap();
  double *last = &constants->per_channel_nvls_tree_gbs[3][2];
#if VERSION == 7
  last = &((nccl_tuner_constants_v7 *)(void *)constants)->per_channel_nvls_tree_gbs[3][2];
#endif
  other_constant_seen = *last;
  *last = other_constant_set;
  return made(context, n_ranks, n_nodes);
}

#if VERSION == 5 || defined(AND_OLDER)
ASK(5)
const nccl_tuner_v5 ncclTunerPlugin_v5 = {"other", init_v5, ask_v5, end};
#endif
#endif

#if VERSION >= 6
static nccl_result chunk(void *context, int collective, size_t n_bytes, int algorithm, int protocol, int n_channels,
                         size_t *chunk_bytes) {
  (void)context, (void)collective, (void)n_bytes, (void)algorithm, (void)protocol, (void)n_channels;
  other_n_chunks++;
  *chunk_bytes = other_chunk_bytes;
  return other_answer == ERROR ? 3 : 0;
}

#if VERSION == 6 || defined(AND_OLDER)
ASK(6)
const nccl_tuner_v6 ncclTunerPlugin_v6 = {"other", init_v5, ask_v6, end, chunk};
#endif
#if VERSION == 7
ASK(7)
const nccl_tuner_v6 ncclTunerPlugin_v7 = {"other", init_v5, ask_v7, end, chunk};
#endif
#endif
