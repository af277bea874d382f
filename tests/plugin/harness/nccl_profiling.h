/* NCCL's side of the profiler ABI: one communicator, its events in NCCL's order and spelling. */
#ifndef NCCL_PROFILING_H
#define NCCL_PROFILING_H

#include "harness.h"

typedef struct {
  int version;
  void *context;
  uint64_t comm_id;
  int rank;
} profiled;

typedef struct {
  int collective;
  uint64_t sequence;
  size_t count; /* as NCCL gives it: all_gather bytes per rank, the others elements */
  int n_channels;
  int algorithm, protocol;
  int graph_captured;
  int is_symmetric; /* v7 says so; older ones know no name of its algorithm */
} launched;

uint64_t gpu_now(void); /* by a clock that is behind the CPU's */
void stop_clocks(void);
void pass(uint64_t ns); /* while they stand still */
void let_clocks_go(void);

extern int event_mask; /* NCCL has one for all communicators */

/* Another profiler beside ours, of the version that is tested or the newest below; `newest` 0 = there is none. */
typedef struct {
  int newest;
  int mask; /* what it asks for */
  int fails, init_fails, reuses;
  uint64_t untracked;
} other_profiler;
extern other_profiler beside;
int *of_profiler(int version, const char *name); /* a variable of benchmarks/nccl/other_profiler.c */

profiled profiler_init(int version, uint64_t comm_id, int n_ranks, int n_nodes, int rank);
void profiler_finalize(profiled profiler);

void *start_group(profiled profiler);
/* Starts the API call's event (v5 and newer), then the collective's. */
void *start_coll(profiled profiler, void *group, const launched *coll);
void *start_event(profiled profiler, nccl_event_v5 *event); /* v5 and newer: any event */
void *start_kernel_channel(profiled profiler, void *coll, int channel, uint64_t start_ns);
void stop_kernel_channel(profiled profiler, void *handle, uint64_t stop_ns);
void stop_event(profiled profiler, void *handle);

/* Group, collective, channels [0, n_run) from start_ns to stop_ns, each channel a little inside; v7: from now on. */
void run_collective(profiled profiler, const launched *coll, int n_run, uint64_t start_ns, uint64_t stop_ns);

#endif
