/* The parts of NCCL's plugin ABI that this plugin uses, declared from its documented layout.
 *
 * NCCL looks up each version by its own symbol and passes that version's structs, so every version has its own types
 * here. Static assertions fix the layouts (LP64, as on every platform that NCCL supports), and tests/plugin checks them
 * against released libraries.
 *
 *   tuner     v2 2.21 | v3 2.22-2.23 | v4 2.24-2.27 | v5 2.28-2.29 | v6 2.30-2.32 | v7 announced
 *   profiler  v3 2.26 (v1 and v2 report no times of kernels) | v4 2.27 | v5 2.28 | v6 2.29-2.30 | v7 2.31 and newer
 */
#ifndef ZEROTUNE_NCCL_ABI_H
#define ZEROTUNE_NCCL_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int nccl_result; /* ncclResult_t */
#define NCCL_SUCCESS 0

/* ncclFunc_t: a tuner is asked for these five only */
enum { NCCL_BROADCAST = 0, NCCL_REDUCE, NCCL_ALL_GATHER, NCCL_REDUCE_SCATTER, NCCL_ALL_REDUCE };
#define NCCL_N_COLLECTIVES 5
enum { NCCL_TREE = 0, NCCL_RING, NCCL_COLLNET_DIRECT, NCCL_COLLNET_CHAIN, NCCL_NVLS, NCCL_NVLS_TREE, NCCL_PAT };
#define NCCL_MAX_ALGORITHMS 7 /* 6 up to NCCL 2.22, whose table has no PAT row */
enum { NCCL_LL = 0, NCCL_LL128, NCCL_SIMPLE };
#define NCCL_N_PROTOCOLS 3
#define NCCL_MAX_CHANNELS 64
#define NCCL_TABLE_ALGORITHMS 16 /* cost tables have at most 7 x 3 cells so far; a larger table than this is not read */
#define NCCL_TABLE_PROTOCOLS 8
#define NCCL_MAX_RANKS 65536 /* as of store/wire.py */

typedef void (*nccl_logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

/* ---- tuner ---- */

typedef struct {
  int n_nvl_domains;
  int min_ranks_per_domain;
  int max_ranks_per_domain;
} nccl_nvl_domain_info;
_Static_assert(sizeof(nccl_nvl_domain_info) == 12, "NVL domain info");

typedef struct {
  double base_latencies[7][3];
  double hw_latencies[3][7][3]; /* NVLINK, PCI, NET */
  double ll_max_gbs[4][3];      /* compute capability: Volta .. Blackwell; scale: 1, 2, 4+ nodes */
  double per_channel_ring_ll128_gbs[4][3];
  double per_channel_tree_ll128_gbs[4][3];
  double per_channel_tree_gbs[4][3];
  double per_channel_nvls_tree_gbs[4][3];
} nccl_tuner_constants; /* v5 and v6 */
_Static_assert(sizeof(nccl_tuner_constants) == 1152, "tuner constants");

typedef struct { /* one more compute capability */
  double base_latencies[7][3];
  double hw_latencies[3][7][3];
  double ll_max_gbs[5][3];
  double per_channel_ring_ll128_gbs[5][3];
  double per_channel_tree_ll128_gbs[5][3];
  double per_channel_tree_gbs[5][3];
  double per_channel_nvls_tree_gbs[5][3];
} nccl_tuner_constants_v7;
_Static_assert(sizeof(nccl_tuner_constants_v7) == 1272, "tuner constants v7");

typedef struct {
  const char *name;
  nccl_result (*init)(size_t n_ranks, size_t n_nodes, nccl_logger log, void **context);
  nccl_result (*get_coll_info)(void *context, int collective, size_t n_bytes, int collnet_support,
                               int nvls_support, int n_pipe_ops, int *algorithm, int *protocol,
                               int *n_channels);
  nccl_result (*destroy)(void *context);
} nccl_tuner_v2;

typedef struct {
  const char *name;
  nccl_result (*init)(size_t n_ranks, size_t n_nodes, nccl_logger log, void **context);
  nccl_result (*get_coll_info)(void *context, int collective, size_t n_bytes, int n_pipe_ops,
                               float **cost_table, int n_algorithms, int n_protocols, int *n_channels);
  nccl_result (*destroy)(void *context);
} nccl_tuner_v3;

typedef struct {
  const char *name;
  nccl_result (*init)(size_t n_ranks, size_t n_nodes, nccl_logger log, void **context);
  nccl_result (*get_coll_info)(void *context, int collective, size_t n_bytes, int n_pipe_ops,
                               float **cost_table, int n_algorithms, int n_protocols,
                               int registered_buffers, int *n_channels);
  nccl_result (*destroy)(void *context);
} nccl_tuner_v4;

typedef struct {
  const char *name;
  nccl_result (*init)(void **context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, nccl_logger log,
                      nccl_nvl_domain_info *domain, nccl_tuner_constants *constants);
  nccl_result (*get_coll_info)(void *context, int collective, size_t n_bytes, int n_pipe_ops,
                               float **cost_table, int n_algorithms, int n_protocols,
                               int registered_buffers, int *n_channels);
  nccl_result (*finalize)(void *context);
} nccl_tuner_v5;

typedef struct {
  const char *name;
  nccl_result (*init)(void **context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, nccl_logger log,
                      nccl_nvl_domain_info *domain, nccl_tuner_constants *constants);
  nccl_result (*get_coll_info)(void *context, int collective, size_t n_bytes, int n_pipe_ops,
                               float **cost_table, int n_algorithms, int n_protocols,
                               int registered_buffers, int *n_channels);
  nccl_result (*finalize)(void *context);
  nccl_result (*get_chunk_size)(void *context, int collective, size_t n_bytes, int algorithm, int protocol,
                                int n_channels, size_t *chunk_bytes); /* NULL: NCCL's own */
} nccl_tuner_v6;

/* ---- profiler ---- */

enum nccl_profile_event {
  NCCL_PROFILE_GROUP = 1,
  NCCL_PROFILE_COLL = 2,
  NCCL_PROFILE_P2P = 4,
  NCCL_PROFILE_KERNEL_CHANNEL = 64,
  NCCL_PROFILE_GROUP_API = 256,
  NCCL_PROFILE_COLL_API = 512,
  NCCL_PROFILE_CE_COLL = 4096 /* v6 and newer */
};
enum { NCCL_STATE_KERNEL_CHANNEL_STOP = 22 };
enum { NCCL_COUNTS_REQUESTED_ONLY = 7 }; /* NCCL 2.31: the host counts only kernels whose events are asked for */

/* The part after the common head of a descriptor, by version. The unions of the real descriptors are
 * wider, but a plugin reads only the member that `type` names. */
typedef struct {
  const char *name;
  uint64_t comm_hash;
  uint64_t sequence;
  const char *collective;
  const void *send_buffer;
  void *receive_buffer;
  size_t count;
  int root;
  const char *datatype;
  uint8_t n_max_channels;
  uint8_t n_warps;
  const char *algorithm;
  const char *protocol;
} nccl_coll_v3;

typedef struct {
  uint64_t sequence;
  const char *collective;
  const void *send_buffer;
  void *receive_buffer;
  size_t count; /* all_gather: bytes per rank; reduce_scatter: elements per rank */
  int root;
  const char *datatype;
  uint8_t n_channels;
  uint8_t n_warps;
  const char *algorithm;
  const char *protocol;
} nccl_coll_v4;

typedef struct {
  nccl_coll_v4 coll;
  void *parent_group;
} nccl_coll_v5;

typedef struct {
  nccl_coll_v5 coll;
  const char *kernel_variant; /* NULL: a kernel of the tuner's table */
  bool is_symmetric;
  uint64_t user_tag;
} nccl_coll_v7;

typedef struct {
  const char *collective;
  size_t count;
  const char *datatype;
  int root;
  void *stream;
  bool graph_captured; /* followed by the user's tag in v7 */
} nccl_coll_api_v5;

typedef struct {
  const char *function; /* "Send", "Recv" */
  void *buffer;
  const char *datatype;
  size_t count;
  int peer;
  uint8_t n_channels;
} nccl_p2p_v4;

typedef struct {
  nccl_p2p_v4 p2p;
  void *parent_group;
} nccl_p2p_v5;

typedef struct {
  uint64_t sequence;
  const char *collective; /* also "AlltoAll", "Gather", "Scatter" */
  const void *send_buffer;
  void *receive_buffer;
  size_t count; /* of one rank; all_gather: bytes */
  int root;
  const char *datatype;
  const char *sync_strategy;
  bool intra_batch_sync;
  uint32_t batch_size;
  uint32_t n_batches;
  uint32_t ce_sequence;
  void *stream; /* followed by the user's tag in v7 */
} nccl_ce_coll_v6;

typedef struct {
  uint8_t channel;
  uint64_t start_ns; /* GPU globaltimer */
} nccl_kernel_channel_v4;

/* Heads: v3 and v4 have an 8-bit type, v5 and newer a 64-bit type; parent, rank and union have the same offsets. */
#define NCCL_DESCRIPTOR_HEAD(type_t) \
  type_t type;                       \
  void *parent;                      \
  int rank

typedef struct {
  NCCL_DESCRIPTOR_HEAD(uint8_t);
  union {
    nccl_coll_v3 coll;
    uint8_t kernel_channel;
  };
} nccl_event_v3;

typedef struct {
  NCCL_DESCRIPTOR_HEAD(uint8_t);
  union {
    nccl_coll_v4 coll;
    nccl_p2p_v4 p2p;
    nccl_kernel_channel_v4 kernel_channel;
  };
} nccl_event_v4;

typedef struct {
  NCCL_DESCRIPTOR_HEAD(uint64_t);
  union {
    nccl_coll_v5 coll;
    nccl_coll_v7 coll_v7; /* v7 only */
    nccl_coll_api_v5 coll_api;
    nccl_p2p_v4 p2p;
    nccl_p2p_v5 p2p_v5;
    nccl_kernel_channel_v4 kernel_channel;
    nccl_ce_coll_v6 ce_coll; /* v6 and newer */
  };
} nccl_event_v5;

typedef nccl_event_v5 nccl_event_v6, nccl_event_v7; /* common members have the same offsets */

typedef union {
  uint64_t kernel_channel_stop_ns; /* of NCCL_STATE_KERNEL_CHANNEL_STOP, v4 and newer */
  size_t transferred_bytes;
} nccl_event_state_args;

_Static_assert(offsetof(nccl_event_v3, coll) == 24 && offsetof(nccl_event_v5, coll) == 24, "descriptor head");
_Static_assert(sizeof(nccl_coll_v3) == 96, "coll");
_Static_assert(sizeof(nccl_coll_v4) == 80 && sizeof(nccl_coll_v5) == 88, "coll");
_Static_assert(offsetof(nccl_coll_v4, n_channels) == 56 && offsetof(nccl_coll_v4, algorithm) == 64, "coll v4");
_Static_assert(sizeof(nccl_coll_v7) == 112 && offsetof(nccl_coll_v7, is_symmetric) == 96, "coll v7");
_Static_assert(offsetof(nccl_p2p_v4, count) == 24 && offsetof(nccl_p2p_v4, n_channels) == 36, "p2p");
_Static_assert(sizeof(nccl_p2p_v5) == 48 && offsetof(nccl_event_v3, parent) == offsetof(nccl_event_v5, parent), "p2p");
_Static_assert(sizeof(nccl_ce_coll_v6) == 88 && offsetof(nccl_ce_coll_v6, datatype) == 48, "copy engine");
_Static_assert(sizeof(nccl_event_v7) == 136, "v7");
_Static_assert(sizeof(nccl_kernel_channel_v4) == 16 && sizeof(nccl_coll_api_v5) == 48, "kernel channel");

#define NCCL_PROFILER_TAIL(version)                                                                \
  nccl_result (*start_event)(void *context, void **handle, nccl_event_##version *descriptor);      \
  nccl_result (*stop_event)(void *handle);                                                         \
  nccl_result (*record_event_state)(void *handle, int state, nccl_event_state_args *args);         \
  nccl_result (*finalize)(void *context)

typedef struct {
  const char *name;
  nccl_result (*init)(void **context, int *activation_mask);
  NCCL_PROFILER_TAIL(v3);
} nccl_profiler_v3;

typedef struct {
  const char *name;
  nccl_result (*init)(void **context, int *activation_mask, const char *comm_name, uint64_t comm_id,
                      int n_nodes, int n_ranks, int rank, nccl_logger log);
  NCCL_PROFILER_TAIL(v4);
} nccl_profiler_v4;

#define NCCL_PROFILER_NAMED(version)                                                               \
  typedef struct {                                                                                 \
    const char *name;                                                                              \
    nccl_result (*init)(void **context, uint64_t comm_id, int *activation_mask, const char *comm_name, \
                        int n_nodes, int n_ranks, int rank, nccl_logger log);                      \
    NCCL_PROFILER_TAIL(version);                                                                   \
  } nccl_profiler_##version

NCCL_PROFILER_NAMED(v5);
NCCL_PROFILER_NAMED(v6);
NCCL_PROFILER_NAMED(v7);

#endif
