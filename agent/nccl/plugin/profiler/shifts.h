/* Detects kernel times that NCCL's thread reports for the wrong work, and waits for works that it has not read yet. A
 * work is a collective or message of a kernel.
 *
 * From 2.31 on NCCL's host counts only works whose kernel channels are asked for, but its kernels count all works.
 * After one that was not asked for, NCCL reports for each channel the times of an earlier work, for the rest of the
 * communicator's life. A start before the call proves it. The GPU's clock is known from reports, also of kernels that
 * are not observed: when NCCL reports a start, the kernel has started.
 */
#ifndef ZEROTUNE_SHIFTS_H
#define ZEROTUNE_SHIFTS_H

#include <stdbool.h>
#include <stdint.h>

/* NCCL's ring of times has 64 entries per channel, and its thread does not check whose time an entry is. A thread that
 * is late by 64 works reads a later work's times. That is impossible while fewer works are enqueued after the reported
 * one. Otherwise the thread counts as late if it did not run, or reports a start later than usual, by a quarter of the
 * duration of 64 works. It counts as late until fewer than 64 works are enqueued after the reported one again. */

/* Counts a new work and returns its number, from 1; 0 = the communicator is not checked. */
uint64_t zt_shifts_enqueued(const void *communicator);
/* Called by NCCL's thread when it reports the first start of this work. */
void zt_shifts_started(const void *communicator, uint64_t number, uint64_t gpu_ns);
/* Whether times reported for this work now may be those of a later work. */
bool zt_shifts_are_late(const void *communicator, uint64_t number);
void zt_shifts_add_duration(const void *communicator, uint64_t duration_ns);

/* Check this communicator's times from now on. Its address is only a key, and never dereferenced. */
void zt_shifts_add(const void *communicator);
void zt_shifts_remove(const void *communicator);

/* A work was launched whose channels NCCL will report. */
void zt_shifts_launched(const void *communicator, uint32_t n_channels);
/* NCCL reports now that a channel started at `gpu_ns`; 0 = unknown. */
void zt_shifts_reported(const void *communicator, uint64_t gpu_ns);

/* Before a communicator is destroyed: waits until NCCL has reported all its works, or nothing for 0.2 s. After such a
 * timeout it does not wait again, for any communicator, until NCCL reports something: after an abort it never does.
 * NCCL 2.31 and 2.32 free counters that their thread still reads while it has works of the communicator, and would
 * crash. */
void zt_shifts_wait(const void *communicator);

/* Whether a start cannot be that of a call made at `called_us` (the CPU's clock; 0 = unknown), since this start or an
 * earlier one was before its call. */
bool zt_shifts_is_foreign(const void *communicator, uint64_t start_ns, uint64_t called_us);

void zt_shifts_reset(void);

#endif
