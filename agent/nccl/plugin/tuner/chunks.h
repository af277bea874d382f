/* Keeps the plan's chunk sizes between getCollInfo and getChunkSize (tuner v6 and newer).
 *
 * NCCL first asks for settings of all fused runs of a group. It asks for chunk sizes later, when it distributes
 * collectives over channels: by collective, algorithm, protocol, and the bytes of a part, of which a collective has up
 * to three. These do not identify the run. So a group's decisions are kept by cell. If two decisions of one cell
 * differ, NCCL's own size stays. All of this follows from the order of calls alone, so that all ranks answer alike. */
#ifndef ZEROTUNE_CHUNKS_H
#define ZEROTUNE_CHUNKS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../nccl_abi.h"

#define ZT_OWN_CHUNK 1u /* NCCL's own size; below any size of a plan */

typedef struct {
  bool is_enabled;  /* NCCL asks for chunk sizes on this communicator */
  bool has_begun; /* NCCL has asked since the latest decision: the next decision belongs to another group */
  uint16_t kib[NCCL_N_COLLECTIVES][NCCL_MAX_ALGORITHMS][NCCL_N_PROTOCOLS]; /* 0 = no decision in this group */
} zt_chunks;

/* NCCL caps a tuner's size to the buffers of these algorithms only. */
static inline bool zt_takes_chunk_size(uint32_t algorithm) {
  return algorithm == NCCL_RING || algorithm == NCCL_TREE || algorithm == NCCL_PAT;
}

/* `kib` 0: the decision leaves the size to NCCL. */
static inline void zt_chunk_note(zt_chunks *chunks, uint32_t collective, uint32_t algorithm, uint32_t protocol,
                                 uint16_t kib) {
  if (chunks->has_begun) memset(chunks->kib, 0, sizeof chunks->kib);
  chunks->has_begun = false;
  if (algorithm >= NCCL_MAX_ALGORITHMS || protocol >= NCCL_N_PROTOCOLS) return;
  uint16_t *kept = &chunks->kib[collective][algorithm][protocol];
  const uint16_t wanted = kib == 0 ? ZT_OWN_CHUNK : kib;
  *kept = *kept == 0 || *kept == wanted ? wanted : ZT_OWN_CHUNK;
}

/* The size for the answer; 0 = NCCL's own. */
static inline uint32_t zt_chunk_decided(const zt_chunks *chunks, uint32_t collective, uint32_t algorithm,
                                     uint32_t protocol) {
  if (collective >= NCCL_N_COLLECTIVES || protocol >= NCCL_N_PROTOCOLS || !zt_takes_chunk_size(algorithm)) return 0;
  const uint16_t kib = chunks->kib[collective][algorithm][protocol];
  return kib <= ZT_OWN_CHUNK ? 0 : (uint32_t)kib << 10;
}

static inline size_t zt_chunk_bytes(zt_chunks *chunks, uint32_t collective, uint32_t algorithm, uint32_t protocol) {
  chunks->has_begun = true;
  return zt_chunk_decided(chunks, collective, algorithm, protocol);
}

#endif
