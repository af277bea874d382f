#include "names.h"

#include <stddef.h>
#include <strings.h>

/* Each list is in the order of NCCL's enum. */
static const char *const collectives[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"};
static const char *const algorithms[] = {"TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
static const char *const protocols[] = {"LL", "LL128", "SIMPLE"};
static const char *const datatypes[] = {"ncclInt8",    "ncclUint8",   "ncclInt32",    "ncclUint32",
                                        "ncclInt64",   "ncclUint64",  "ncclFloat16",  "ncclFloat32",
                                        "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
static const uint8_t datatype_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

static uint8_t find(const char *name, const char *const *names, size_t n_names) {
  if (name == NULL) return ZT_UNKNOWN_NAME;
  for (size_t i = 0; i < n_names; i++)
    if (strcasecmp(name, names[i]) == 0) return (uint8_t)i;
  return ZT_UNKNOWN_NAME;
}

#define FIND(name, names) find(name, names, sizeof names / sizeof names[0])

uint8_t zt_collective_named(const char *name) { return FIND(name, collectives); }

uint8_t zt_algorithm_named(const char *name) { return FIND(name, algorithms); }

uint8_t zt_protocol_named(const char *name) { return FIND(name, protocols); }

uint8_t zt_datatype_named(const char *name) { return FIND(name, datatypes); }

uint32_t zt_datatype_bytes(uint8_t datatype) {
  return datatype < sizeof datatype_bytes ? datatype_bytes[datatype] : 0;
}
