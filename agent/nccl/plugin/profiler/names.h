/* NCCL's spellings in profiler descriptors, to its enum values. */
#ifndef ZEROTUNE_NAMES_H
#define ZEROTUNE_NAMES_H

#include <stdint.h>

#define ZT_UNKNOWN_NAME 255u

/* All return ZT_UNKNOWN_NAME for NULL and for unknown names; case does not matter. */
uint8_t zt_collective_named(const char *name);
uint8_t zt_algorithm_named(const char *name);
uint8_t zt_protocol_named(const char *name);
uint8_t zt_datatype_named(const char *name);
uint32_t zt_datatype_bytes(uint8_t datatype); /* 0 = unknown */

#endif
