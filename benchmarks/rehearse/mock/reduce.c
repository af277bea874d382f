/* NCCL's reductions, by the host. */
#include <string.h>

#include "ranks.h"

/* ncclDataType_t */
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
/* ncclRedOp_t; what a program made itself counts as a sum */
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

size_t mock_element_bytes(int datatype) {
  static const size_t n_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return datatype >= 0 && datatype < (int)(sizeof n_bytes / sizeof *n_bytes) ? n_bytes[datatype] : 1;
}

static float of_bfloat16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float of_float16(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  uint32_t wide;
  float value;
  if (exponent == 0) { /* zero, or so small that it has no leading one */
    value = (float)fraction / 16777216.0f;
    return sign ? -value : value;
  }
  wide = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static uint16_t to_float16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00; /* 65536 and more */
  if (bits < 0x38800000) { /* below 2^-14: a multiple of 2^-24 */
    memcpy(&value, &bits, sizeof value);
    const float scaled = value * 16777216.0f;
    uint32_t whole = (uint32_t)scaled;
    const float rest = scaled - (float)whole;
    if (rest > 0.5f || (rest == 0.5f && (whole & 1))) whole++;
    return sign | (uint16_t)whole;
  }
  bits += 0xfff + (bits >> 13 & 1);
  return sign | (uint16_t)((bits - 0x38000000) >> 13);
}

#define COMBINE(name, type)                                              \
  static type name(type a, type b, int operation) {                      \
    switch (operation) {                                                 \
    case PRODUCT:                                                        \
      return (type)(a * b);                                              \
    case MAXIMUM:                                                        \
      return a > b ? a : b;                                              \
    case MINIMUM:                                                        \
      return a < b ? a : b;                                              \
    default:                                                             \
      return (type)(a + b);                                              \
    }                                                                    \
  }
COMBINE(combine_int8, int8_t)
COMBINE(combine_uint8, uint8_t)
COMBINE(combine_int32, int32_t)
COMBINE(combine_uint32, uint32_t)
COMBINE(combine_int64, int64_t)
COMBINE(combine_uint64, uint64_t)
COMBINE(combine_float, float)
COMBINE(combine_double, double)

#define SAME(value) (value)
#define REDUCE(type, wide, load, store, combine)                                       \
  for (uint64_t i = 0; i < count; i++) {                                               \
    wide value = load(((const type *)from[0])[i]);                                     \
    for (int rank = 1; rank < n_ranks; rank++)                                         \
      value = combine(value, load(((const type *)from[rank])[i]), operation);          \
    if (operation == AVERAGE) value = (wide)(value / (wide)n_ranks);                   \
    ((type *)into)[i] = store(value);                                                  \
  }                                                                                    \
  break

void mock_reduce(void *into, const void *const *from, int n_ranks, uint64_t count, int datatype, int operation) {
  switch (datatype) {
  case INT8:
    REDUCE(int8_t, int8_t, SAME, SAME, combine_int8);
  case INT32:
    REDUCE(int32_t, int32_t, SAME, SAME, combine_int32);
  case UINT32:
    REDUCE(uint32_t, uint32_t, SAME, SAME, combine_uint32);
  case INT64:
    REDUCE(int64_t, int64_t, SAME, SAME, combine_int64);
  case UINT64:
    REDUCE(uint64_t, uint64_t, SAME, SAME, combine_uint64);
  case FLOAT16:
    REDUCE(uint16_t, float, of_float16, to_float16, combine_float);
  case BFLOAT16:
    REDUCE(uint16_t, float, of_bfloat16, to_bfloat16, combine_float);
  case FLOAT32:
    REDUCE(float, float, SAME, SAME, combine_float);
  case FLOAT64:
    REDUCE(double, double, SAME, SAME, combine_double);
  default: /* bytes; eight-bit floating point is not added up */
    REDUCE(uint8_t, uint8_t, SAME, SAME, combine_uint8);
  }
}
