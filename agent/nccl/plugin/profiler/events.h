/* Collectives being timed: a fixed pool of events, no allocation, no lock.
 *
 * A fused run, collectives of one decision, is timed as a whole: the event of its first member waits for the other
 * members' and reports one collective with the sum of their bytes. If a kernel contains works of several decisions, its
 * times cannot be assigned to one of them: they are reported without times.
 *
 * An event is over when the host has stopped it and its kernel part is over; the second of the two calls reports it.
 * Handles contain the pool index and a generation. So a late or repeated call for an event that is over finds another
 * generation and does nothing.
 */
#ifndef ZEROTUNE_EVENTS_H
#define ZEROTUNE_EVENTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../plan/classes.h"
#include "../zerotune_plugin.h"

/* 0 = none. Handles whose low 16 bits are ZT_FOREIGN or more are never an event's. */
typedef uint64_t zt_handle;
#define ZT_FOREIGN 0xFF00u

typedef struct {
  zt_record record;          /* without times, and without n_channels if not certain */
  zt_class *its_class;       /* may be NULL */
  uint64_t owner;            /* the communicator */
  uint64_t group;            /* collectives of one group share a kernel */
  zt_handle run;             /* for a later member of a fused run: its first member; else 0 */
  uint64_t member_bytes;     /* its own; the record has those of the decision */
  bool is_mixed;             /* its kernel contains works of other decisions, too */
  uint32_t n_channels;       /* kernel-channel events to expect; 0 = none */
  bool channels_are_certain; /* false: fewer than n_channels may come (profiler v3) */
  enum zt_passage passage;
  const void *checked; /* the communicator, if NCCL may report times of other works (shifts.h); else NULL */
  uint64_t number;    /* the work's number in shifts.h, if NCCL's thread may be late; else 0 */
  uint64_t called_us; /* when the call was made, by the CPU's clock; 0 = unknown */
} zt_event_start;

/* 0 if the pool is exhausted (counted). `latest` is the communicator's latest event. */
zt_handle zt_event_begin(const zt_event_start *start, _Atomic uint64_t *latest);
void zt_event_stop(zt_handle handle);                  /* an event's or a channel's */

/* A kernel channel of `event` starts. `gpu_ns` is the GPU's time; has_gpu_time false takes the CPU's.
 * Returns the channel's handle, 0 if the event is over or the channel has started before.
 *
 * Kernels of one communicator run one after another. So a kernel of an earlier group is over once all its started
 * channels have stopped, even if NCCL does not report their number. */
zt_handle zt_channel_begin(zt_handle event, uint32_t channel, bool has_gpu_time, uint64_t gpu_ns);
void zt_channel_gpu_stop(zt_handle channel, uint64_t gpu_ns);

/* Its kernel contains works of other decisions, too. */
void zt_event_mix(zt_handle event);

/* Before a communicator is destroyed: timed collectives are reported, the other ones abandoned and counted. */
void zt_events_end(uint64_t owner);

uint64_t zt_cpu_ns(void); /* the monotonic clock */

void zt_events_count(zt_counters *out);
void zt_events_reset(void);

#endif
