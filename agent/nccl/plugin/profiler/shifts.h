/* What NCCL's thread tells of kernel channels, and when: times that cannot be a collective's own, and works that it has
 * not read yet.
 *
 * From 2.31 on NCCL's host counts only works whose kernel channels are asked for, and its kernels count all: behind one
 * that was not, each of its channels is told the times of an earlier work, for as long as the communicator lives.
 * A start before the call was made proves it. Where the GPU's clock stands is known from what was told, also of kernels
 * that nobody observes: when NCCL tells of a start, the kernel has started.
 */
#ifndef ZEROTUNE_SHIFTS_H
#define ZEROTUNE_SHIFTS_H

#include <stdbool.h>
#include <stdint.h>

/* NCCL's ring of times has 64 entries for each channel, which its thread reads without a look at whose they are by then: one
 * that is late by 64 works takes a later work's times for those that it looks for. While fewer were enqueued behind the work
 * that is told of, that cannot be. Otherwise a thread that did not run for a quarter of the time that 64 works take, or tells
 * of a start so much later than usual, is not believed, until fewer than 64 are enqueued behind again. */

/* One more work is enqueued: its number, from 1; 0 where the communicator is not judged. */
uint64_t zt_shifts_enqueued(const void *communicator);
/* NCCL's thread, which calls this, tells of the first start of this work. */
void zt_shifts_started(const void *communicator, uint64_t number, uint64_t gpu_ns);
/* Whether what is told of this work now may be of a later one. */
bool zt_shifts_are_late(const void *communicator, uint64_t number);
void zt_shifts_took(const void *communicator, uint64_t duration_ns);

/* From now on the times of this communicator are judged. Its address is a name here, and never followed. */
void zt_shifts_watch(const void *communicator);
void zt_shifts_forget(const void *communicator);

/* A work was launched whose channels NCCL will tell of. */
void zt_shifts_launched(const void *communicator, uint32_t n_channels);
/* NCCL tells now that a channel started at `gpu_ns`; 0 = not known. */
void zt_shifts_heard(const void *communicator, uint64_t gpu_ns);

/* Before a communicator ends: until NCCL has told of all its works, or of none for 0.2 s; not once more, on any communicator,
 * until NCCL tells of something: after an abort it never does. 2.31 and 2.32 free the counters that their thread reads before
 * they take the communicator's works from it, and crash where it still has some. */
void zt_shifts_wait(const void *communicator);

/* Whether a start cannot be that of a call made at `called_us` (the CPU's clock; 0 = not known): it is before the call, now
 * or in an earlier call. */
bool zt_shifts_is_anothers(const void *communicator, uint64_t start_ns, uint64_t called_us);

void zt_shifts_reset(void);

#endif
