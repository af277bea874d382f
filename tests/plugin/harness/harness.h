/* A stand-in for NCCL's side of the plugin ABI: opens the library as NCCL does and calls each version
 * through that version's own symbol. */
#ifndef HARNESS_H
#define HARNESS_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_abi.h"
#include "zerotune_plugin.h"

#define CHECK(condition)                                                                     \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      fprintf(stderr, "%s:%d: %s: failed: %s\n", __FILE__, __LINE__, __func__, #condition);  \
      abort();                                                                               \
    }                                                                                        \
  } while (0)

#define CHECK_EQUAL(found, wanted)                                                                         \
  do {                                                                                                     \
    const long long found_ = (long long)(found), wanted_ = (long long)(wanted);                            \
    if (found_ != wanted_) {                                                                               \
      fprintf(stderr, "%s:%d: %s: %s is %lld, not %lld\n", __FILE__, __LINE__, __func__, #found, found_,   \
              wanted_);                                                                                    \
      abort();                                                                                             \
    }                                                                                                      \
  } while (0)

/* The library, by the names NCCL and Python look up. */
typedef struct {
  const nccl_tuner_v2 *tuner_v2;
  const nccl_tuner_v3 *tuner_v3;
  const nccl_tuner_v4 *tuner_v4;
  const nccl_tuner_v5 *tuner_v5;
  const nccl_tuner_v6 *tuner_v6;
  const nccl_tuner_v6 *tuner_v7; /* of the same layout */
  const nccl_profiler_v3 *profiler_v3;
  const nccl_profiler_v4 *profiler_v4;
  const nccl_profiler_v5 *profiler_v5;
  const nccl_profiler_v6 *profiler_v6;
  const nccl_profiler_v7 *profiler_v7;
  __typeof__(&zerotune_set_phase) set_phase;
  __typeof__(&zerotune_set_step) set_step;
  __typeof__(&zerotune_set_memory_pressure) set_memory_pressure;
  __typeof__(&zerotune_set_recording) set_recording;
  __typeof__(&zerotune_set_observing) set_observing;
  __typeof__(&zerotune_set_timing_source_override) set_timing_source_override;
  __typeof__(&zerotune_channels_seen) channels_seen;
  __typeof__(&zerotune_communicators) communicators;
  __typeof__(&zerotune_cycle) cycle;
  __typeof__(&zerotune_prepare) prepare;
  __typeof__(&zerotune_prepare_end) prepare_end;
  __typeof__(&zerotune_promise) promise;
  __typeof__(&zerotune_commit) commit;
  __typeof__(&zerotune_release) release;
  __typeof__(&zerotune_set_patience) set_patience;
  __typeof__(&zerotune_waits) waits;
  __typeof__(&zerotune_tuner_abi) tuner_abi;
  __typeof__(&zerotune_plan_load) load;
  __typeof__(&zerotune_plan_row_is_legal) row_is_legal;
  __typeof__(&zerotune_ask_chunk_sizes) ask_chunk_sizes;
  __typeof__(&zerotune_plan_flip) flip;
  __typeof__(&zerotune_active_epoch) active_epoch;
  __typeof__(&zerotune_drain) drain;
  __typeof__(&zerotune_drain_costs) drain_costs;
  __typeof__(&zerotune_counters) counters;
  __typeof__(&zerotune_passages) passages;
  __typeof__(&zerotune_one_rank_communicators) one_rank_communicators;
  __typeof__(&zerotune_next_profiler) next_profiler;
  __typeof__(&zerotune_next_tuner) next_tuner;
  __typeof__(&zerotune_reset) reset;
} plugin;

extern plugin the;
extern bool chunks_are_asked; /* ours was told to have NCCL ask */
extern const char *others; /* folder of other plugins */
extern const char *opened; /* path of ours */

/* NCCL's side of one tuner version: a communicator and the answer to one question. */
typedef struct {
  int version;
  void *context;
} tuned;

typedef struct {
  int collective;
  size_t n_bytes;
  int n_algorithms; /* rows of the cost table: 5, 6 or 7 */
  int registered;
  int is_estimate; /* another kind of kernel is weighed: 2.31 and newer */
  float cost[7][3];
  int algorithm, protocol, n_channels; /* v2's answer; channels of all */
} question;

extern _Thread_local double last_constant; /* in NCCL's hands after the latest tuner_init */
tuned tuner_init(int version, uint64_t comm_id, size_t n_ranks, size_t n_nodes);
void tuner_ask(tuned tuner, question *asked);
void tuner_finalize(tuned tuner);

/* A question as NCCL asks it for a fabric with ring x 3 and PAT: everything else is IGNORE. */
question ordinary_question(int collective, size_t n_bytes);
/* The cell NCCL takes: v2's answer, or the cheapest that is not IGNORE. */
void chosen(const question *answered, int *algorithm, int *protocol);

void reopen_plugin(void); /* all references given back, then taken again */

void adopt(const zt_plan_row *rows, uint32_t n_rows, uint32_t epoch, uint32_t gathers_after_step);
zt_counters counted(void);
size_t drained(zt_record *out, size_t max_records);

void test_tuner(void);
void test_costs_and_records(void);
void test_profiler(void);
void test_passages(void);
void test_shifts(void);
void test_lifetimes(void);
void test_groups(void);
void test_kernels(void);
void test_impossible_numbers(void);
void test_next_tuner(void);
void test_next_profiler(void);
void test_threads(void);
void test_agreed(void);

#endif
