/* Statistics of calls that the tuner decided, and of calls that bypassed it. */
#ifndef ZEROTUNE_PASSAGES_H
#define ZEROTUNE_PASSAGES_H

#include <stdint.h>

#include "../zerotune_plugin.h"

void zt_passage_add(enum zt_passage passage, uint64_t message_bytes);
void zt_passage_timed(enum zt_passage passage, uint64_t kernel_ns);
void zt_passages_reset(void);

#endif
