/* A profiler that asks NCCL for the events ours asks for and does nothing with them: NCCL's own share of observing. */
#include "nccl_abi.h"

#define EVENTS (NCCL_PROFILE_COLL | NCCL_PROFILE_KERNEL_CHANNEL | NCCL_PROFILE_CE_COLL)

static char something; /* a handle that is not NULL has NCCL call again, as it does for ours */

static nccl_result init(void **context, uint64_t comm_id, int *mask, const char *comm_name, int n_nodes, int n_ranks,
                        int rank, nccl_logger log) {
  (void)comm_id, (void)comm_name, (void)n_nodes, (void)n_ranks, (void)rank, (void)log;
  *context = &something;
  __atomic_store_n(mask, EVENTS, __ATOMIC_RELAXED);
  return NCCL_SUCCESS;
}

static nccl_result init_v4(void **context, int *mask, const char *comm_name, uint64_t comm_id, int n_nodes,
                           int n_ranks, int rank, nccl_logger log) {
  return init(context, comm_id, mask, comm_name, n_nodes, n_ranks, rank, log);
}

static nccl_result start_v4(void *context, void **handle, nccl_event_v4 *event) {
  (void)context, (void)event;
  *handle = &something;
  return NCCL_SUCCESS;
}

static nccl_result start(void *context, void **handle, nccl_event_v5 *event) {
  (void)context, (void)event;
  *handle = &something;
  return NCCL_SUCCESS;
}

static nccl_result stop(void *handle) {
  (void)handle;
  return NCCL_SUCCESS;
}

static nccl_result record(void *handle, int state, nccl_event_state_args *args) {
  (void)handle, (void)state, (void)args;
  return NCCL_SUCCESS;
}

static nccl_result finalize(void *context) {
  (void)context;
  return NCCL_SUCCESS;
}

const nccl_profiler_v4 ncclProfiler_v4 = {"null", init_v4, start_v4, stop, record, finalize};
const nccl_profiler_v5 ncclProfiler_v5 = {"null", init, start, stop, record, finalize};
const nccl_profiler_v6 ncclProfiler_v6 = {"null", init, start, stop, record, finalize};
const nccl_profiler_v7 ncclProfiler_v7 = {"null", init, start, stop, record, finalize};
