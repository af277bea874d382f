/* zerotune.store.records.size_class: quarter octaves, exact at powers of two. */
#ifndef ZEROTUNE_SIZE_CLASS_H
#define ZEROTUNE_SIZE_CLASS_H

#include <stdint.h>

/* message_bytes > 0. The constants are the doubles 2^(1/4), 2^(1/2), 2^(3/4) times 2^63, which are
 * integers: comparing the normalised message with them equals comparing with ceil(2^octave * 2^(q/4)). */
static inline uint32_t zt_size_class(uint64_t message_bytes) {
  const uint32_t shift = (uint32_t)__builtin_clzll(message_bytes);
  const uint64_t normalised = message_bytes << shift;
  const uint32_t quarter = (normalised >= UINT64_C(10968499650544838656)) + (normalised >= UINT64_C(13043817825332783104)) +
                           (normalised >= UINT64_C(15511800964685064192));
  return (63u - shift) * 4u + quarter;
}

#endif
