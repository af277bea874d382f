/* Observation on and off at run time, through NCCL's own event mask.
 *
 * Every init hands in the address of NCCL's mask (one int in libnccl, the same each time); NCCL reads
 * it atomically at each call, so a store switches all communicators and costs NCCL nothing while off;
 * but see `attach` in profiler.c for NCCL 2.31 and newer.
 */
#ifndef ZEROTUNE_OBSERVING_H
#define ZEROTUNE_OBSERVING_H

void zt_mask_add(int *mask, int events, int always); /* what to ask for while observing, and at any time */
void zt_mask_remove(int *mask);          /* undoes one zt_mask_add */

/* What another profiler asks for behind NCCL's mask: an int that is kept for it. NULL where there is no room. */
int *zt_mask_of_next(const int *mask);
void zt_masks_follow(void); /* the other may change its int at any time */

#endif
