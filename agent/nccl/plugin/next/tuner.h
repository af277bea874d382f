/* The next tuner: another one in the same process, which is asked first.
 *
 * NCCL loads only one tuner. If the user has named another tuner, zerotune's asks it first: its answer applies unless a
 * row of the plan does. Its errors, and answers that NCCL could not use, change nothing and are counted.
 */
#ifndef ZEROTUNE_NEXT_TUNER_H
#define ZEROTUNE_NEXT_TUNER_H

#include <stdbool.h>

#include "../nccl_abi.h"
#include "../tuner/communicator.h"
#include "../tuner/costs.h"

/* Members of its version are set. */
struct zt_next_tuner {
  int abi;
  const char *name;
  const nccl_tuner_v2 *v2;
  const nccl_tuner_v3 *v3;
  const nccl_tuner_v4 *v4;
  const nccl_tuner_v6 *v5; /* and newer, which begin with the same members */
  __typeof__(((nccl_tuner_v4 *)0)->get_coll_info) ask; /* v4 and newer */
  __typeof__(((nccl_tuner_v6 *)0)->get_chunk_size) get_chunk_size; /* v6 and newer; may be NULL */
  nccl_result (*end)(void *context);
};

/* NCCL's arguments for a new communicator; 0 = not in this version. */
typedef struct {
  int abi;
  uint64_t comm_id;
  size_t n_ranks, n_nodes;
  nccl_logger log;
  nccl_nvl_domain_info *domain;
  void *constants; /* nccl_tuner_constants up to v6 */
} zt_tuner_start;

/* The newest version that both the next tuner and NCCL have; NULL = none. The first call opens the library and calls
 * `has_found`, while later calls wait. */
const zt_next_tuner *zt_next_tuner_find(int newest_abi, void (*has_found)(const zt_next_tuner *));
void zt_next_tuner_forget(void);

/* Initialise it for a communicator; if that fails it is not asked for this communicator. */
void zt_next_tuner_init(const zt_next_tuner *next, zt_communicator *communicator, const zt_tuner_start *start);
void zt_next_tuner_end(zt_communicator *communicator);

typedef struct {
  int collective;
  size_t n_bytes;
  int n_pipe_ops;
  int registered_buffers;
} zt_question;

/* Let it edit table and channels. Returns whether they may have changed: then `offered`, with room for ZT_MAX_CELLS,
 * has NCCL's table. */
bool zt_next_tuner_ask(zt_communicator *communicator, const zt_question *question, const zt_cost_table *table,
                       float *offered, int *n_channels);
/* NCCL 2.21 */
void zt_next_tuner_ask_v2(zt_communicator *communicator, const zt_question *question, int collnet_support,
                          int nvls_support, int *algorithm, int *protocol, int *n_channels);
void zt_next_tuner_chunk(zt_communicator *communicator, const zt_question *question, int algorithm, int protocol,
                         int n_channels, size_t *chunk_bytes);

#endif
