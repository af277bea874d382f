/* Turns observation on and off at run time, by NCCL's own event mask.
 *
 * NCCL passes the address of its mask (one int in libnccl) to every init, and reads it atomically at each call. So a
 * store switches all communicators, and observation that is off costs NCCL nothing; but see `attach` in profiler.c for
 * NCCL 2.31 and newer.
 */
#ifndef ZEROTUNE_OBSERVING_H
#define ZEROTUNE_OBSERVING_H

void zt_mask_add(int *mask, int events, int always); /* events while observing, and at any time */
void zt_mask_remove(int *mask);                      /* undoes one zt_mask_add */

/* The next profiler's own mask, an int that it may change at any time. NULL if there is no room. */
int *zt_mask_of_next(const int *mask);
void zt_masks_follow(void); /* update NCCL's masks from the next profiler's */

#endif
