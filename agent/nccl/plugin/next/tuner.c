#include "tuner.h"

#include <string.h>

#define FAULT(communicator) ZT_BUMP((communicator)->n_next_tuner_faults)

/* ---- init and finalize ---- */

#define CAPABILITY_ROWS (sizeof(double[4][3]))

/* v7 has one more row in each table by compute capability. */
static void narrow(nccl_tuner_constants *to, const nccl_tuner_constants_v7 *from) {
  memcpy(to, from, offsetof(nccl_tuner_constants, ll_max_gbs));
  memcpy(to->ll_max_gbs, from->ll_max_gbs, CAPABILITY_ROWS);
  memcpy(to->per_channel_ring_ll128_gbs, from->per_channel_ring_ll128_gbs, CAPABILITY_ROWS);
  memcpy(to->per_channel_tree_ll128_gbs, from->per_channel_tree_ll128_gbs, CAPABILITY_ROWS);
  memcpy(to->per_channel_tree_gbs, from->per_channel_tree_gbs, CAPABILITY_ROWS);
  memcpy(to->per_channel_nvls_tree_gbs, from->per_channel_nvls_tree_gbs, CAPABILITY_ROWS);
}

static void widen(nccl_tuner_constants_v7 *to, const nccl_tuner_constants *from) {
  memcpy(to, from, offsetof(nccl_tuner_constants, ll_max_gbs));
  memcpy(to->ll_max_gbs, from->ll_max_gbs, CAPABILITY_ROWS);
  memcpy(to->per_channel_ring_ll128_gbs, from->per_channel_ring_ll128_gbs, CAPABILITY_ROWS);
  memcpy(to->per_channel_tree_ll128_gbs, from->per_channel_tree_ll128_gbs, CAPABILITY_ROWS);
  memcpy(to->per_channel_tree_gbs, from->per_channel_tree_gbs, CAPABILITY_ROWS);
  memcpy(to->per_channel_nvls_tree_gbs, from->per_channel_nvls_tree_gbs, CAPABILITY_ROWS);
}

static nccl_result init_v5(const zt_next_tuner *next, void **context, const zt_tuner_start *start) {
  if (start->abi < 7 || next->abi >= 7 || start->constants == NULL)
    return next->v5->init(context, start->comm_id, start->n_ranks, start->n_nodes, start->log, start->domain,
                          start->constants);
  nccl_tuner_constants constants;
  narrow(&constants, start->constants);
  const nccl_result result = next->v5->init(context, start->comm_id, start->n_ranks, start->n_nodes, start->log,
                                            start->domain, &constants);
  if (result == NCCL_SUCCESS) widen(start->constants, &constants);
  return result;
}

static nccl_result init(const zt_next_tuner *next, void **context, const zt_tuner_start *start) {
  switch (next->abi) {
  case 2:
    return next->v2->init(start->n_ranks, start->n_nodes, start->log, context);
  case 3:
    return next->v3->init(start->n_ranks, start->n_nodes, start->log, context);
  case 4:
    return next->v4->init(start->n_ranks, start->n_nodes, start->log, context);
  default:
    return init_v5(next, context, start);
  }
}

void zt_next_tuner_init(const zt_next_tuner *next, zt_communicator *communicator, const zt_tuner_start *start) {
  if (init(next, &communicator->next_context, start) == NCCL_SUCCESS)
    communicator->next_tuner = next;
  else
    FAULT(communicator);
}

void zt_next_tuner_end(zt_communicator *communicator) {
  const zt_next_tuner *next = communicator->next_tuner;
  if (next != NULL && next->end(communicator->next_context) != NCCL_SUCCESS) FAULT(communicator);
}

/* ---- getCollInfo ---- */

static bool are_channels(int n_channels) { return n_channels >= 0 && n_channels <= NCCL_MAX_CHANNELS; }

static bool has_legal_cell(const float *cells, int n_cells) {
  for (int i = 0; i < n_cells; i++)
    if (zt_is_legal(&cells[i])) return true;
  return false;
}

static bool is_offered(const zt_cost_table *table, uint32_t algorithm) {
  return zt_is_legal(zt_cell_of(table, algorithm, NCCL_SIMPLE));
}

/* As newer NCCLs ask a plugin of v2: its cell becomes the cheapest. */
static nccl_result ask_v2(zt_communicator *communicator, const zt_question *question, const zt_cost_table *table,
                          int *n_channels) {
  int algorithm = -1, protocol = -1;
  const int nvls = is_offered(table, NCCL_NVLS) || is_offered(table, NCCL_NVLS_TREE);
  const int collnet = is_offered(table, NCCL_COLLNET_CHAIN);
  const nccl_result result = communicator->next_tuner->v2->get_coll_info(
      communicator->next_context, question->collective, question->n_bytes, collnet, nvls, question->n_pipe_ops,
      &algorithm, &protocol, n_channels);
  float *cell = algorithm < 0 || protocol < 0 ? NULL : zt_cell_of(table, (uint32_t)algorithm, (uint32_t)protocol);
  if (result == NCCL_SUCCESS && zt_is_legal(cell)) *cell = 0.0f;
  return result;
}

static nccl_result ask(zt_communicator *communicator, const zt_question *question, const zt_cost_table *table,
                       int *n_channels) {
  const zt_next_tuner *next = communicator->next_tuner;
  float **costs = (float **)(void *)table->cost_us;
  if (next->ask != NULL)
    return next->ask(communicator->next_context, question->collective, question->n_bytes, question->n_pipe_ops, costs,
                     table->n_algorithms, table->n_protocols, question->registered_buffers, n_channels);
  if (next->abi == 3)
    return next->v3->get_coll_info(communicator->next_context, question->collective, question->n_bytes,
                                   question->n_pipe_ops, costs, table->n_algorithms, table->n_protocols, n_channels);
  return ask_v2(communicator, question, table, n_channels);
}

bool zt_next_tuner_ask(zt_communicator *communicator, const zt_question *question, const zt_cost_table *table,
                       float *offered, int *n_channels) {
  if (!zt_has_table_size(table)) return false;
  const int n_cells = table->n_algorithms * table->n_protocols, offered_channels = *n_channels;
  const size_t size = (size_t)n_cells * sizeof *offered;
  memcpy(offered, table->cost_us, size);
  const bool is_answer = ask(communicator, question, table, n_channels) == NCCL_SUCCESS && are_channels(*n_channels) &&
                         (has_legal_cell(table->cost_us, n_cells) || !has_legal_cell(offered, n_cells));
  if (is_answer) return true;
  memcpy(table->cost_us, offered, size);
  *n_channels = offered_channels;
  FAULT(communicator);
  return false;
}

void zt_next_tuner_ask_v2(zt_communicator *communicator, const zt_question *question, int collnet_support,
                          int nvls_support, int *algorithm, int *protocol, int *n_channels) {
  const int offered[] = {*algorithm, *protocol, *n_channels};
  const nccl_result result = communicator->next_tuner->v2->get_coll_info(
      communicator->next_context, question->collective, question->n_bytes, collnet_support, nvls_support,
      question->n_pipe_ops, algorithm, protocol, n_channels);
  if (result == NCCL_SUCCESS && are_channels(*n_channels) && *algorithm >= -1 && *algorithm < NCCL_PAT &&
      *protocol >= -1 && *protocol < NCCL_N_PROTOCOLS)
    return;
  *algorithm = offered[0];
  *protocol = offered[1];
  *n_channels = offered[2];
  FAULT(communicator);
}

/* ---- getChunkSize ---- */

void zt_next_tuner_chunk(zt_communicator *communicator, const zt_question *question, int algorithm, int protocol,
                         int n_channels, size_t *chunk_bytes) {
  const size_t offered = *chunk_bytes;
  if (communicator->next_tuner->get_chunk_size(communicator->next_context, question->collective, question->n_bytes,
                                               algorithm, protocol, n_channels, chunk_bytes) == NCCL_SUCCESS &&
      *chunk_bytes > 0)
    return;
  *chunk_bytes = offered;
  FAULT(communicator);
}
