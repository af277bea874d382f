/* One communicator, shared by its tuner and its profiler.
 *
 * NCCL initialises the two separately, but on one thread. The second attaches to the communicator of the first. So the
 * profiler knows the tuner's decisions, and the tuner of NCCL 2.27 and older gets the id that its ABI lacks. They may
 * be finalized in any order; the last one frees the communicator.
 */
#ifndef ZEROTUNE_COMMUNICATOR_H
#define ZEROTUNE_COMMUNICATOR_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../agree/schedule.h"
#include "../plan/classes.h"
#include "../zerotune_plugin.h"
#include "chunks.h"

#define ZT_N_COLLECTIVE_CODES 5u /* NCCL_N_COLLECTIVES */
#define ZT_N_DECISIONS 64u
#define ZT_RANK_UNKNOWN UINT32_MAX

enum zt_role { ZT_TUNER = 1, ZT_PROFILER = 2 };

/* An answer of getCollInfo, kept for the profiler's events of the same group. */
typedef struct {
  _Atomic uint64_t message_bytes;
  _Atomic uint64_t bytes_left; /* without an event so far */
  _Atomic uint32_t epoch;
  _Atomic uint32_t what; /* collective | phase << 8 | flags << 16 */
} zt_decision;

/* The decision that belongs to an event. */
typedef struct {
  uint32_t number; /* from 1; 0 = there is none */
  uint32_t epoch;
  uint64_t message_bytes;
  uint8_t phase, flags;
} zt_decided;

/* The kernel whose collectives NCCL is reporting: its latest decision, and the first event of that decision. */
typedef struct {
  uint64_t group, event;
  uint32_t decision;
} zt_reported_kernel;

/* NCCL 2.21: a fused run, whose cell is decided once, and for whose channels NCCL asks by call. */
typedef struct {
  uint64_t bytes_left;
  int n_channels; /* 0 = no opinion */
  bool is_row_cell; /* a row named the cell, so that the next tuner's channels do not apply */
} zt_fused_run;

typedef struct zt_next_tuner zt_next_tuner; /* next/tuner.h */

typedef struct zt_communicator {
  struct zt_communicator *next;
  uint64_t creator;   /* the number of its thread */
  unsigned roles;     /* attached now */
  unsigned roles_had; /* ever attached */
  uint64_t owner;     /* unique in this process, never reused */
  bool has_one_rank;
  uint64_t name;      /* its id, if NCCL gave it at the start, so that all ranks know it; else 0 */

  _Atomic uint64_t comm_id;      /* 0 = unknown */
  _Atomic(zt_class *) its_class; /* NULL = unknown (profiler v3 before its tuner), or there are too many classes */
  _Atomic uint32_t rank;
  bool leave_alone; /* tuner v2 under the user's NCCL_ALGO or NCCL_PROTO */

  /* The tuner's. NCCL calls a communicator from one thread at a time: counters need no read-modify-write. */
  const zt_next_tuner *next_tuner; /* asked first; NULL = there is none */
  void *next_context;
  zt_agreed agreed; /* counts the calls */
  _Atomic uint64_t n_matched, n_ignored_cells, n_clamped_channels, n_estimates, n_next_tuner_faults;
  zt_fused_run runs[ZT_N_COLLECTIVE_CODES];
  zt_chunks chunks;
  _Atomic uint32_t sequence[ZT_N_COLLECTIVE_CODES];
  _Atomic uint64_t costs_reported[ZT_N_COLLECTIVE_CODES][4]; /* a bit per size class */

  zt_decision decisions[ZT_N_DECISIONS];
  _Atomic uint32_t n_decisions;
  _Atomic uint32_t group_begin;    /* first decision of the group that is being enqueued */
  _Atomic uint32_t group_consumed; /* the profiler has seen an event of that group */

  int *mask; /* the profiler's: NCCL's event mask */
  _Atomic bool is_uncounted; /* NCCL's host did not count some kernels: it reports times of the wrong kernels */
  zt_reported_kernel enqueued, replayed; /* reported by the training thread, and by the thread for graphs */
  _Atomic uint64_t latest_event;
} zt_communicator;

/* comm_id 0, n_ranks 0 and rank ZT_RANK_UNKNOWN = unknown in this ABI; impossible numbers of ranks or nodes count as
 * unknown. NULL if out of memory. */
zt_communicator *zt_attach(enum zt_role role, uint64_t comm_id, size_t n_ranks, size_t n_nodes, uint32_t rank);
void zt_detach(zt_communicator *communicator, enum zt_role role);

/* The registry of communicators. getCollInfo never takes its lock. */
void zt_registry_lock(void);
void zt_registry_unlock(void);
zt_communicator *zt_find_owner(uint64_t owner); /* NULL = destroyed; under the lock */

/* Includes destroyed communicators. */
void zt_communicators_count(zt_counters *out);
void zt_communicators_reset(void);

/* For a counter that one thread at a time writes and any may read. */
#define ZT_BUMP(counter)                                                                              \
  atomic_store_explicit(&(counter), atomic_load_explicit(&(counter), memory_order_relaxed) + 1,       \
                        memory_order_relaxed)

/* Keep a decision. */
void zt_decision_note(zt_communicator *communicator, uint32_t collective, uint64_t message_bytes,
                      uint32_t epoch, uint8_t phase, uint8_t flags);
/* The decision for a collective of `message_bytes` in the group that is being enqueued: of those with enough bytes left
 * (a fused run's decision is for its sum) the one with the least, and of equal ones the newest. */
zt_decided zt_decision_find(zt_communicator *communicator, uint32_t collective, uint64_t message_bytes);

#endif
