/* Collectives being timed: a fixed pool, no allocation, no lock.
 *
 * What NCCL decided on together, a fused run, is timed together: the event of its first member waits for those of the
 * others and reports them all as one collective of their sum of bytes. Kernels that carry several decisions' works
 * give all of them one time, or times that say nothing of one alone: those are reported without.
 *
 * An event is over when the host has stopped it and its kernel part is over; whoever brings about the
 * second of the two reports it. Handles carry the pool index and a generation, so that a late or
 * doubled call for an event that is over finds another generation and does nothing.
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
  zt_record record;          /* what is known at the start: all but times, n_channels where not certain */
  zt_class *its_class;       /* may be NULL */
  uint64_t owner;            /* the communicator */
  uint64_t group;            /* collectives of one group share a kernel */
  zt_handle run;             /* the first member of the fused run that this is a later member of; 0 = it is none */
  uint64_t member_bytes;     /* its own; the record's are those that were decided on */
  bool is_mixed;             /* its kernel carries works of other decisions, too */
  uint32_t n_channels;       /* kernel-channel events to expect; 0 = none will come */
  bool channels_are_certain; /* false: fewer than n_channels may come (profiler v3) */
  enum zt_passage passage;
  const void *judged; /* communicator whose GPU's times may be those of other works: shifts.h; NULL = they are not */
  uint64_t number;    /* of the work, where NCCL's thread may be late; else 0 */
  uint64_t called_us; /* when the call was made, by the CPU's clock; 0 = not known */
} zt_event_start;

/* 0 when the pool is exhausted (counted). `latest` is the communicator's latest event. */
zt_handle zt_event_begin(const zt_event_start *start, _Atomic uint64_t *latest);
void zt_event_stop(zt_handle handle);                  /* an event's or a channel's */

/* A kernel channel of `event` starts. `gpu_ns` is the GPU's time; has_gpu_time false takes the CPU's.
 * Returns the channel's handle, 0 when the event is over or the channel has started before.
 *
 * Kernels of one communicator run one after another. So those of earlier groups are over once all channels that started
 * have stopped: all that can be known where NCCL does not say how many there are. */
zt_handle zt_channel_begin(zt_handle event, uint32_t channel, bool has_gpu_time, uint64_t gpu_ns);
void zt_channel_gpu_stop(zt_handle channel, uint64_t gpu_ns);

/* Its kernel turned out to carry works of other decisions, too. */
void zt_event_mix(zt_handle event);

/* A communicator goes away: what is timed is reported, the rest abandoned and counted. */
void zt_events_end(uint64_t owner);

uint64_t zt_cpu_ns(void); /* the monotonic clock */

void zt_events_count(zt_counters *out);
void zt_events_reset(void);

#endif
