/* Communicator classes: communicators of one shape share plan rows and channel limits.
 *
 * A fixed open-addressing table without a lock: an entry is added by compare-and-swap and never removed. */
#ifndef ZEROTUNE_CLASSES_H
#define ZEROTUNE_CLASSES_H

#include <stdatomic.h>
#include <stdint.h>

#define ZT_MAX_CLASSES 256u

typedef struct {
  _Atomic uint64_t shape;         /* n_ranks << 32 | n_nodes; 0 = free entry */
  _Atomic uint32_t channels_seen;
} zt_class;

/* The entry of a shape, made if need be; NULL if the table is full or a number is 0. */
zt_class *zt_class_of(uint32_t n_ranks, uint32_t n_nodes);
uint32_t zt_class_index(const zt_class *entry);
uint32_t zt_class_n_ranks(const zt_class *entry);
uint32_t zt_class_n_nodes(const zt_class *entry);
void zt_class_saw_channels(zt_class *entry, uint32_t n_channels);
/* For tests: clear the limits, and also the entries, to which nothing may refer then. */
void zt_classes_reset(int forget_entries);

#endif
