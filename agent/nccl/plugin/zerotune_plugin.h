/* The plugin's interface for Python and the tests: shared state, plan table, rings, entry points.
 *
 * The plugin lives in the training process, and Python calls the same library with ctypes; no shared-memory object is
 * needed that could be left behind. store/wire.py mirrors the record layouts, agent/nccl/library.py the rest.
 */
#ifndef ZEROTUNE_PLUGIN_H
#define ZEROTUNE_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default) /* the rest of the library is hidden */

#define ZT_LAYOUT_VERSION 5u
#define ZT_MAX_PLAN_ROWS 4096u
#define ZT_RING_RECORDS 65536u /* power of two */
#define ZT_COST_RING_RECORDS 512u
#define ZT_NO_OPINION 255u /* algorithm or protocol of a row that leaves NCCL's cell alone */
#define ZT_ANY_PHASE 255u  /* phase of a row that applies in all phases */
#define ZT_MIN_CHUNK_KIB 4u /* above the size below which NCCL would round down to 0 for some protocol */
#define ZT_MAX_CHUNK_KIB 32768u
#define ZT_UNKNOWN_CHUNK 1u /* `chunk_bytes` of a graph's replay, if NCCL asks for chunk sizes */
#define ZT_MAX_STAGES 16u
#define ZT_N_CHECKPOINTS 16u
#define ZT_MIXED_EPOCHS (UINT64_C(1) << 32)

/* phase or region: 0 = other; 1..4 = Phase set by the runtime; 16 and more = region from torch's hooks */
enum zt_region_code {
  ZT_REGION_FORWARD = 16,
  ZT_REGION_BACKWARD = 17,
  ZT_REGION_STEP = 18,
  ZT_REGION_AFTER_BACKWARD = 19 /* until the step: gradients reduced late (DeepSpeed 1), or the next forward */
};

/* flags of an observation */
enum zt_record_flags {
  ZT_FLAG_MATCHED = 1,   /* a plan row applied */
  ZT_FLAG_TIMED = 2,     /* a timed record of the profiler; else a decision record */
  ZT_FLAG_REGISTERED = 4, /* NCCL reported registered buffers (also under CUDA-graph capture) */
  ZT_FLAG_CAPTURED = 8,   /* ran in a CUDA graph: its setting is that of the capture, not of this epoch */
  ZT_FLAG_FUSED = 16,     /* a fused run: collectives decided and timed together; the bytes are their sum */
  ZT_FLAG_PASSED_BY = 32, /* ran without a decision: no tuner was asked, or the kernel is not in its table */
  ZT_FLAG_OFF_CYCLE = 64  /* the plan has rows by phase, and this call's phase is unknown */
};

/* Why a call ran as it did; all kinds but the first bypassed the tuner */
enum zt_passage {
  ZT_DECIDED = 0,
  ZT_UNKNOWN_PASSAGE = 1, /* no decision; the ABI does not give the reason */
  ZT_SYMMETRIC = 2,       /* symmetric kernels: v7 and newer */
  ZT_COPY_ENGINE = 3,     /* v6 and newer */
  ZT_POINT_TO_POINT = 4,  /* sends, also those of all_to_all */
  ZT_N_PASSAGES = 5
};

typedef struct {
  uint64_t n_calls;
  uint64_t message_bytes;
  uint64_t n_timed; /* calls with kernel times, whose sum is `kernel_ns` */
  uint64_t kernel_ns;
} zt_passage_sum;

typedef struct {
  uint64_t comm_id;
  uint64_t message_bytes; /* total, NCCL's nBytes */
  int64_t start_ns;
  float duration_us; /* negative = unknown */
  uint32_t sequence; /* per communicator and collective */
  uint32_t epoch;
  uint32_t n_ranks;
  uint32_t n_nodes;
  uint32_t rank; /* UINT32_MAX = unknown in this ABI */
  uint8_t collective;
  uint8_t algorithm;
  uint8_t protocol;
  uint8_t n_channels;
  uint8_t phase;
  uint8_t datatype; /* NCCL's ncclDataType_t, 255 = unknown */
  uint8_t timing_source;
  uint8_t flags;
  float memory_pressure;
  uint32_t step;
  uint32_t chunk_bytes; /* the plan's; 0 = none, or NCCL does not ask */
  uint32_t reserved;
} zt_record; /* 72 bytes */

typedef struct {
  uint64_t comm_id;
  uint64_t message_bytes;
  uint32_t n_ranks;
  uint32_t n_nodes;
  uint8_t collective;
  uint8_t n_algorithms;
  uint8_t n_protocols;
  uint8_t reserved;
  uint32_t n_pipe_ops;
  float cost_us[7][3]; /* negative = IGNORE */
  uint32_t padding;
} zt_cost_record; /* 120 bytes */

typedef struct {
  uint64_t min_bytes;
  uint64_t max_bytes; /* inclusive */
  uint32_t n_ranks;
  uint32_t n_nodes;
  uint8_t collective;
  uint8_t phase;
  uint8_t algorithm; /* ZT_NO_OPINION, together with protocol = NCCL's own cell */
  uint8_t protocol;
  uint8_t n_channels; /* 0 = no opinion */
  uint8_t reserved;
  uint16_t chunk_kib; /* 0 = no opinion; for ring, tree, PAT, and rows with NCCL's own cell */
} zt_plan_row; /* 32 bytes */

/* One call of a communicator's cycle: the calls of a step of its lowest rank. */
typedef struct {
  uint64_t message_bytes;
  uint32_t collective;
  uint32_t phase; /* enum Phase */
} zt_cycle_call; /* 16 bytes */

/* A communicator of this process that has a tuner. Calls are numbered from 1. */
typedef struct {
  uint64_t owner;   /* its number in this process */
  uint64_t comm_id; /* 0 = unknown at the start in this ABI; an id learned later could differ between ranks */
  uint32_t n_ranks;
  uint32_t n_nodes;
  uint32_t epoch; /* of the latest call */
  uint32_t n_steady;
  uint32_t n_steps;     /* of this rank, with calls */
  uint32_t n_off_cycle; /* calls in a row that do not fit the cycle in force */
  uint64_t n_calls;
  uint64_t step_began;     /* number of the first call in this rank's latest step */
  uint64_t calls_per_step; /* in `n_steady` whole steps in a row; 0 = there was no whole step */
  uint64_t checkpoint_calls[ZT_N_CHECKPOINTS]; /* 0 = none */
  uint64_t checkpoint_hash[ZT_N_CHECKPOINTS];  /* over all calls up to the checkpoint's */
} zt_communicator_state;

typedef struct {
  uint64_t n_waits;   /* calls that had to wait for an outcome */
  uint64_t longest_ns;
  uint64_t n_waiting; /* now */
} zt_waits;

typedef struct {
  uint64_t n_calls;            /* decisions: getCollInfo calls that settle what runs */
  uint64_t n_matched;          /* a row applied */
  uint64_t n_ignored_cells;    /* a row named a cell that NCCL marked IGNORE: left untouched */
  uint64_t n_clamped_channels;
  uint64_t n_dropped_records;
  uint64_t n_dropped_costs;
  uint64_t n_communicators;    /* created so far */
  uint64_t n_timed;            /* timed collectives */
  uint64_t n_lost_events;      /* collectives not timed: event pool exhausted */
  uint64_t n_abandoned_events; /* collectives not ended when their communicator was destroyed */
  uint64_t n_estimates;        /* getCollInfo calls that do not settle what runs: left untouched */
  uint64_t n_next_tuner_faults; /* errors and unusable answers of the next tuner */
  uint64_t n_next_profiler_faults; /* errors of the next profiler */
  uint64_t n_impossible_times; /* GPU times that cannot be the collective's own: profiler/events.h, shifts.h */
  uint64_t n_inseparable; /* decisions that shared a kernel with others, or some of whose collectives were not seen */
} zt_counters;

/* A decision record (recording on) describes an answer of getCollInfo. `sequence` counts decisions of its communicator
 * and collective. `algorithm` and `protocol` are the cell that NCCL will take (255 = unknown in tuner v2). `n_channels`
 * and `chunk_bytes` are the plan's (0 = no opinion). `start_ns` is 0. A timed record (observing on) describes a
 * collective that ran. `sequence` is NCCL's own number by collective, equal on all ranks. `chunk_bytes` is the size
 * given to NCCL, which caps it to its buffers. `start_ns` is the GPU's globaltimer for TimingSource.gpu_kernel, else
 * the CPU's monotonic clock. `comm_id` 0 = unknown (NCCL 2.27 and older without the profiler).
 *
 * The emulated NCCL (agent/nccl/emulated) calls the v5 symbols exactly as NCCL does, with its own nanoseconds as
 * pTimer: the kernel channel's start in startEvent's descriptor, its stop by recordEventState(22), then stopEvent. It
 * initialises a communicator's tuner and profiler on one thread. The activation mask's int outlives finalize. */

/* Setters for the shared state, which getCollInfo reads atomically; none ever blocks. */
uint32_t zerotune_layout_version(void);
const char *zerotune_source_hash(void);
void zerotune_set_phase(uint32_t phase_or_region);
/* Begin step `step`. Returns the epoch under which the last step's calls ran, | ZT_MIXED_EPOCHS if there were several;
 * UINT64_MAX if it had no calls. */
uint64_t zerotune_set_step(uint32_t step);
void zerotune_set_memory_pressure(float pressure); /* 0..1, negative = unknown */
/* Have NCCL ask for chunk sizes (2.30 and newer); without this, rows' chunk sizes have no effect. To be called on all
 * ranks alike, and before the first communicator: later it has no effect. */
void zerotune_ask_chunk_sizes(uint32_t on);
uint32_t zerotune_asks_chunk_sizes(void); /* fixed by the first communicator */
void zerotune_set_recording(uint32_t decisions_on); /* decision records into the ring */
void zerotune_set_observing(uint32_t on);           /* profiler event mask on or off */
/* While a graph is captured, NCCL is asked for no events: events of a graph's kernels would cost at each replay. From
 * 2.31 on, a communicator with calls in a graph has no kernel times from then on. */
void zerotune_set_capturing(uint32_t on);
/* Timing source in records with kernel-channel times (TimingSource.emulated); 0 = the real one. With an override a
 * pTimer of 0 is a valid time. */
void zerotune_set_timing_source_override(uint32_t timing_source);

/* ---- plans by agreement: agree/schedule.h ---- */

size_t zerotune_communicators(zt_communicator_state *out, size_t max_communicators); /* returns their number */
/* The calls of the communicator's last whole step, if the step before it had the same calls; returns their number,
 * else 0. */
uint32_t zerotune_cycle(uint64_t owner, uint32_t gathers_after_step, zt_cycle_call *out, uint32_t max_calls);
/* Build the next stage of a change: zerotune_plan_load's codes, or -5: there are ZT_MAX_STAGES, -6: out of memory. */
int zerotune_prepare(const zt_plan_row *rows, uint32_t n_rows, uint32_t epoch, uint32_t gathers_after_step);
void zerotune_prepare_end(void); /* after the outcome was carried out on all communicators: free the stages */
/* From the returned call on, calls wait until the outcome is known; 0 = the communicator is destroyed, or has a promise
 * already. `lead_calls`: calls that may still pass. */
uint64_t zerotune_promise(uint64_t owner, uint64_t lead_calls);
/* Stage i is in force from call from_calls[i] on. Without stages, NCCL's own choice is in force from from_calls[0] on.
 * Returns 0, or a negative code: -1 another number of stages was prepared, or a call is below the promise,
 * -2 out of memory, -3 a call gave up waiting. */
int zerotune_commit(uint64_t owner, const uint64_t *from_calls, uint32_t n_stages, const zt_cycle_call *cycle,
                    uint32_t n_cycle);
void zerotune_release(uint64_t owner); /* end the promise without a change: calls pass */
void zerotune_set_patience(double seconds); /* after this time a waiting call passes, and the rank cannot follow */
void zerotune_waits(zt_waits *out);

/* ---- the plan of the whole process: for tools whose ranks change it at a barrier of their own ---- */

/* Build the inactive table. Returns 0, or a negative code and leaves everything as it was:
 * -1 too many rows, -2 overlapping ranges, -3 illegal value, -4 too many communicator classes.
 * Lookups go on meanwhile. It replaces a table that was loaded and not flipped to. */
int zerotune_plan_load(const zt_plan_row *rows, uint32_t n_rows, uint32_t epoch, uint32_t gathers_after_step);
int zerotune_plan_row_is_legal(const zt_plan_row *row); /* 0 = code -3 */
/* Make the loaded table active; -1 if the loaded epoch is not `epoch`. One atomic store. */
int zerotune_plan_flip(uint32_t epoch);
uint32_t zerotune_active_epoch(void); /* the highest in force on any communicator */

/* Most channels of a timed collective of the class; 0 = none yet. */
uint32_t zerotune_channels_seen(uint32_t n_ranks, uint32_t n_nodes);
uint32_t zerotune_tuner_abi(void); /* version with which NCCL initialised a tuner; 0 = none yet */
uint32_t zerotune_profiler_abi(void);
const char *zerotune_next_profiler(void);
const char *zerotune_next_tuner(void); /* its name; "" = there is none */
uint32_t zerotune_size_class(uint64_t message_bytes); /* zerotune.store.records.size_class */

size_t zerotune_drain(zt_record *out, size_t max_records);
size_t zerotune_drain_costs(zt_cost_record *out, size_t max_records);
void zerotune_counters(zt_counters *out);
void zerotune_passages(zt_passage_sum out[ZT_N_PASSAGES]); /* while observing, since the library was loaded */
uint64_t zerotune_one_rank_communicators(void); /* so far; NCCL does not report their calls to plugins */
void zerotune_reset(void); /* for tests: clear plans, records, counters, communicators, but not the timing source */

#pragma GCC visibility pop

#endif
