/* One communicator as both plugins see it.
 *
 * NCCL initialises a communicator's tuner and profiler apart, but on one thread. Whichever comes
 * second joins what the first made, so that the profiler knows what the tuner decided, and the tuner
 * of NCCL 2.27 and older gets the identity that its ABI does not give it. The two may be finalized in
 * any order; the last one frees.
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

/* What getCollInfo answered, kept for the profiler's events of the same group. */
typedef struct {
  _Atomic uint64_t message_bytes;
  _Atomic uint64_t bytes_left; /* of which no event was seen yet */
  _Atomic uint32_t epoch;
  _Atomic uint32_t what; /* collective | phase << 8 | flags << 16 */
} zt_decision;

/* A decision as an event of the same group finds it. */
typedef struct {
  uint32_t number; /* from 1; 0 = none fits */
  uint32_t epoch;
  uint64_t message_bytes;
  uint8_t phase, flags;
} zt_decided;

/* The kernel whose collectives are being told of: the latest decision in it, and the first event under that. */
typedef struct {
  uint64_t group, event;
  uint32_t decision;
} zt_told_kernel;

/* NCCL 2.21: calls decided together, whose channels it asks for one by one. */
typedef struct {
  uint64_t bytes_left;
  int n_channels; /* 0 = no opinion */
  bool is_ours;   /* a row named the cell: another tuner's channels were for another */
} zt_run;

typedef struct zt_next_tuner zt_next_tuner; /* next/tuner.h */

typedef struct zt_communicator {
  struct zt_communicator *next;
  uint64_t creator;   /* the number of its thread */
  unsigned roles;     /* attached now */
  unsigned roles_had; /* ever attached */
  uint64_t owner;     /* unique in this process, never used again */
  bool has_one_rank;
  uint64_t name;      /* its id, if NCCL told it at the start: then all ranks know it from then on; 0 = it did not */

  _Atomic uint64_t comm_id;      /* 0 = not known */
  _Atomic(zt_class *) its_class; /* NULL = not known (profiler v1-v3 before its tuner) or too many */
  _Atomic uint32_t rank;
  bool leave_alone; /* tuner v2 under the user's NCCL_ALGO or NCCL_PROTO */

  /* The tuner's: NCCL calls a communicator from one thread at a time, so that a load and a store do. */
  const zt_next_tuner *next_tuner; /* asked first; NULL = there is none */
  void *next_context;
  zt_agreed agreed; /* counts the calls */
  _Atomic uint64_t n_matched, n_ignored_cells, n_clamped_channels, n_estimates, n_next_tuner_faults;
  zt_run runs[ZT_N_COLLECTIVE_CODES];
  zt_chunks chunks;
  _Atomic uint32_t sequence[ZT_N_COLLECTIVE_CODES];
  _Atomic uint64_t costs_reported[ZT_N_COLLECTIVE_CODES][4]; /* a bit per size class */

  zt_decision decisions[ZT_N_DECISIONS];
  _Atomic uint32_t n_decisions;
  _Atomic uint32_t group_begin;    /* first decision of the group now being enqueued */
  _Atomic uint32_t group_consumed; /* the profiler has seen an event of it */

  int *mask; /* the profiler's: NCCL's event mask */
  _Atomic bool is_uncounted; /* kernels ran that NCCL's host has not counted: times would be those of others */
  zt_told_kernel enqueued, replayed; /* by the training thread, and by the one that tells of graphs */
  _Atomic uint64_t latest_event;
} zt_communicator;

/* comm_id 0, n_ranks 0 and rank ZT_RANK_UNKNOWN = this ABI does not say; impossible ranks or nodes count as that.
 * NULL when out of memory. */
zt_communicator *zt_attach(enum zt_role role, uint64_t comm_id, size_t n_ranks, size_t n_nodes, uint32_t rank);
void zt_detach(zt_communicator *communicator, enum zt_role role);

/* The registry: its lock is taken where communicators come and go, and never in getCollInfo. */
void zt_registry_lock(void);
void zt_registry_unlock(void);
zt_communicator *zt_find_owner(uint64_t owner); /* NULL = gone; under the lock */

/* Includes communicators that are gone. */
void zt_communicators_count(zt_counters *out);
void zt_communicators_reset(void);

/* A counter that one thread at a time writes and any may read. */
#define ZT_BUMP(counter)                                                                              \
  atomic_store_explicit(&(counter), atomic_load_explicit(&(counter), memory_order_relaxed) + 1,       \
                        memory_order_relaxed)

/* Remember a decision; and, for a collective of `message_bytes`, find the one it came under: of the group now being
 * enqueued the one that has the least left that holds it (a fused run is decided on for its sum), the newest of like
 * ones. */
void zt_decision_note(zt_communicator *communicator, uint32_t collective, uint64_t message_bytes,
                      uint32_t epoch, uint8_t phase, uint8_t flags);
zt_decided zt_decision_find(zt_communicator *communicator, uint32_t collective, uint64_t message_bytes);

#endif
