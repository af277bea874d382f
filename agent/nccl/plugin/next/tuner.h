/* Another tuner in the same process, asked before ours.
 *
 * NCCL has one place for a tuner. Where another's is named as well, ours takes the place and asks the other first:
 * what it answers is what runs unless a row of the plan says otherwise. Its errors, and answers that NCCL could not
 * carry out, change nothing and are counted.
 */
#ifndef ZEROTUNE_NEXT_TUNER_H
#define ZEROTUNE_NEXT_TUNER_H

#include <stdbool.h>

#include "../nccl_abi.h"
#include "../tuner/communicator.h"
#include "../tuner/costs.h"

/* What its version has is there. */
struct zt_next_tuner {
  int abi;
  const char *name;
  const nccl_tuner_v2 *v2;
  const nccl_tuner_v3 *v3;
  const nccl_tuner_v4 *v4;
  const nccl_tuner_v6 *v5; /* and newer, whose members begin alike */
  __typeof__(((nccl_tuner_v4 *)0)->get_coll_info) ask; /* v4 and newer */
  __typeof__(((nccl_tuner_v6 *)0)->get_chunk_size) get_chunk_size; /* v6 and newer; may be NULL */
  nccl_result (*end)(void *context);
};

/* What NCCL says when it makes a communicator; what its version does not say is 0. */
typedef struct {
  int abi;
  uint64_t comm_id;
  size_t n_ranks, n_nodes;
  nccl_logger log;
  nccl_nvl_domain_info *domain;
  void *constants; /* nccl_tuner_constants up to v6 */
} zt_tuner_start;

/* The newest version that the other library has and NCCL would look for; NULL = none. The first call opens it and tells
 * `has_found`, while later ones wait. */
const zt_next_tuner *zt_next_tuner_find(int newest_abi, void (*has_found)(const zt_next_tuner *));
void zt_next_tuner_forget(void);

/* Tell the other of a communicator; where that fails it is not asked there. */
void zt_next_tuner_init(const zt_next_tuner *next, zt_communicator *communicator, const zt_tuner_start *start);
void zt_next_tuner_end(zt_communicator *communicator);

typedef struct {
  int collective;
  size_t n_bytes;
  int n_pipe_ops;
  int registered_buffers;
} zt_question;

/* Let the other edit table and channels. Returns whether they may have changed: then `offered`, with room for
 * ZT_MAX_CELLS, has the table as NCCL handed it in. */
bool zt_next_tuner_ask(zt_communicator *communicator, const zt_question *question, const zt_cost_table *table,
                       float *offered, int *n_channels);
/* NCCL 2.21 */
void zt_next_tuner_ask_v2(zt_communicator *communicator, const zt_question *question, int collnet_support,
                          int nvls_support, int *algorithm, int *protocol, int *n_channels);
void zt_next_tuner_chunk(zt_communicator *communicator, const zt_question *question, int algorithm, int protocol,
                         int n_channels, size_t *chunk_bytes);

#endif
