#include "nccl_profiling.h"

#include <dlfcn.h>
#include <time.h>

int event_mask;
other_profiler beside;

#define BEHIND_NS UINT64_C(5000000000)

uint64_t gpu_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec - BEHIND_NS;
}

static const char *const collectives[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"};
static const char *const algorithms[] = {"TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
static const char *const protocols[] = {"LL", "LL128", "SIMPLE"};

int *of_profiler(int version, const char *name) {
  char path[4096], symbol[64];
  snprintf(path, sizeof path, "%s/libnccl-profiler-other%d.so", others, version);
  snprintf(symbol, sizeof symbol, "other_%s", name);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != NULL);
  int *variable = dlsym(library, symbol);
  CHECK(variable != NULL);
  return variable;
}

static void put_beside(int version) {
  if (beside.newest == 0) return;
  if (version > beside.newest) version = beside.newest;
  char name[32];
  snprintf(name, sizeof name, "other%d", version);
  setenv("ZEROTUNE_NEXT_PROFILER", name, 1);
  *of_profiler(version, "mask") = beside.mask;
  *of_profiler(version, "fails") = beside.fails;
  *of_profiler(version, "init_fails") = beside.init_fails;
  *of_profiler(version, "reuses") = beside.reuses;
  *(uint64_t *)(void *)of_profiler(version, "untracked") = beside.untracked;
}

profiled profiler_init(int version, uint64_t comm_id, int n_ranks, int n_nodes, int rank) {
  put_beside(version);
  profiled made = {.version = version, .comm_id = comm_id, .rank = rank};
  int result = -1;
  switch (version) {
  case 3: result = the.profiler_v3->init(&made.context, &event_mask); break;
  case 4:
    result = the.profiler_v4->init(&made.context, &event_mask, "dp", comm_id, n_nodes, n_ranks, rank, NULL);
    break;
  case 5:
    result = the.profiler_v5->init(&made.context, comm_id, &event_mask, "dp", n_nodes, n_ranks, rank, NULL);
    break;
  case 6:
    result = the.profiler_v6->init(&made.context, comm_id, &event_mask, "dp", n_nodes, n_ranks, rank, NULL);
    break;
  case 7:
    result = the.profiler_v7->init(&made.context, comm_id, &event_mask, "dp", n_nodes, n_ranks, rank, NULL);
  }
  CHECK_EQUAL(result, NCCL_SUCCESS);
  return made;
}

#define EACH_VERSION(statement) \
  switch (profiler.version) {   \
  case 3: statement(3); break;  \
  case 4: statement(4); break;  \
  case 5: statement(5); break;  \
  case 6: statement(6); break;  \
  case 7: statement(7); break;  \
  }

void profiler_finalize(profiled profiler) {
#define FINALIZE(v) CHECK_EQUAL(the.profiler_v##v->finalize(profiler.context), NCCL_SUCCESS)
  EACH_VERSION(FINALIZE)
}

void stop_event(profiled profiler, void *handle) {
#define STOP(v) CHECK_EQUAL(the.profiler_v##v->stop_event(handle), NCCL_SUCCESS)
  EACH_VERSION(STOP)
}

/* The real descriptors are wider than what the plugin declares of them: filled with rubbish behind. */
#define DESCRIPTOR(v)                                          \
  union {                                                      \
    nccl_event_v##v event;                                     \
    unsigned char bytes[256];                                  \
  } descriptor;                                                \
  memset(descriptor.bytes, 0xEE, sizeof descriptor.bytes);     \
  nccl_event_v##v *event = &descriptor.event;                  \
  void *handle = (void *)0xBAD

#define START(v, kind)                                                                                     \
  event->type = kind;                                                                                      \
  event->rank = profiler.rank;                                                                             \
  CHECK_EQUAL(the.profiler_v##v->start_event(profiler.context, &handle, event), NCCL_SUCCESS)

void *start_group(profiled profiler) {
#define GROUP(v)                        \
  {                                     \
    DESCRIPTOR(v);                      \
    event->parent = NULL;               \
    START(v, NCCL_PROFILE_GROUP);       \
    return handle;                      \
  }
  EACH_VERSION(GROUP)
  return NULL;
}

static void fill_v4(nccl_coll_v4 *to, const launched *coll) {
  to->sequence = coll->sequence;
  to->collective = collectives[coll->collective];
  to->count = coll->count;
  to->root = 0;
  to->datatype = coll->collective == NCCL_ALL_GATHER ? "ncclInt8" : "ncclBfloat16";
  to->n_channels = (uint8_t)coll->n_channels;
  to->n_warps = 16;
  to->algorithm = coll->is_symmetric ? "Unknown" : algorithms[coll->algorithm];
  to->protocol = protocols[coll->protocol];
}

static void *start_coll_v5(profiled profiler, void *group, const launched *coll) {
  void *api = NULL;
  {
    DESCRIPTOR(5);
    event->parent = group;
    event->coll_api = (nccl_coll_api_v5){.collective = collectives[coll->collective],
                                         .count = coll->count,
                                         .datatype = "ncclBfloat16",
                                         .graph_captured = coll->graph_captured != 0};
    event->type = NCCL_PROFILE_COLL_API;
    api = start_event(profiler, event);
    (void)handle;
    stop_event(profiler, api);
  }
  DESCRIPTOR(5);
  (void)handle;
  event->parent = api;
  fill_v4(&event->coll.coll, coll);
  event->coll.parent_group = group;
  event->type = NCCL_PROFILE_COLL;
  if (profiler.version >= 7) {
    event->coll_v7.kernel_variant = coll->is_symmetric ? "LL" : NULL;
    event->coll_v7.is_symmetric = coll->is_symmetric != 0;
    event->coll_v7.user_tag = 0;
    if (coll->is_symmetric) event->coll.coll.algorithm = "SYMK";
  }
  return start_event(profiler, event);
}

void *start_event(profiled profiler, nccl_event_v5 *event) {
  void *handle = (void *)0xBAD;
  event->rank = profiler.rank;
  nccl_result result = -1;
  switch (profiler.version) {
  case 5: result = the.profiler_v5->start_event(profiler.context, &handle, event); break;
  case 6: result = the.profiler_v6->start_event(profiler.context, &handle, event); break;
  case 7: result = the.profiler_v7->start_event(profiler.context, &handle, event);
  }
  CHECK_EQUAL(result, NCCL_SUCCESS);
  return handle;
}

void *start_coll(profiled profiler, void *group, const launched *coll) {
  switch (profiler.version) {
  case 3: {
    DESCRIPTOR(3);
    event->parent = group;
    event->coll.comm_hash = profiler.comm_id;
    event->coll.sequence = coll->sequence;
    event->coll.collective = collectives[coll->collective];
    event->coll.count = coll->count;
    event->coll.datatype = coll->collective == NCCL_ALL_GATHER ? "ncclInt8" : "ncclBfloat16";
    event->coll.n_max_channels = (uint8_t)coll->n_channels;
    event->coll.algorithm = algorithms[coll->algorithm];
    event->coll.protocol = protocols[coll->protocol];
    START(3, NCCL_PROFILE_COLL);
    return handle;
  }
  case 4: {
    DESCRIPTOR(4);
    event->parent = group;
    fill_v4(&event->coll, coll);
    START(4, NCCL_PROFILE_COLL);
    return handle;
  }
  default:
    return start_coll_v5(profiler, group, coll);
  }
}

void *start_kernel_channel(profiled profiler, void *coll, int channel, uint64_t start_ns) {
  if (profiler.version == 3) {
    DESCRIPTOR(3);
    event->parent = coll;
    event->kernel_channel = (uint8_t)channel;
    START(3, NCCL_PROFILE_KERNEL_CHANNEL);
    return handle;
  }
#define KERNEL_CHANNEL(v)                                                              \
  {                                                                                    \
    DESCRIPTOR(v);                                                                     \
    event->parent = coll;                                                              \
    event->kernel_channel = (nccl_kernel_channel_v4){(uint8_t)channel, start_ns};      \
    START(v, NCCL_PROFILE_KERNEL_CHANNEL);                                             \
    return handle;                                                                     \
  }
  switch (profiler.version) {
  case 4: KERNEL_CHANNEL(4)
  case 5: KERNEL_CHANNEL(5)
  case 6: KERNEL_CHANNEL(6)
  case 7: KERNEL_CHANNEL(7)
  }
  return NULL;
}

void stop_kernel_channel(profiled profiler, void *handle, uint64_t stop_ns) {
  nccl_event_state_args args = {.kernel_channel_stop_ns = stop_ns};
  switch (profiler.version) {
#define RECORD(v)                                                                                            \
  case v:                                                                                                    \
    CHECK_EQUAL(the.profiler_v##v->record_event_state(handle, NCCL_STATE_KERNEL_CHANNEL_STOP, &args),        \
                NCCL_SUCCESS);                                                                               \
    break
    RECORD(4);
    RECORD(5);
    RECORD(6);
    RECORD(7);
  }
  stop_event(profiler, handle);
}

void run_collective(profiled profiler, const launched *coll, int n_run, uint64_t start_ns, uint64_t stop_ns) {
  void *channels[128];
  void *group = start_group(profiler), *handle = start_coll(profiler, group, coll);
  stop_event(profiler, handle);
  stop_event(profiler, group);
  if (profiler.version >= 7 && start_ns != 0) { /* no kernel starts before its call */
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const uint64_t now_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    start_ns += now_ns;
    stop_ns += now_ns;
  }
  for (int i = 0; i < n_run; i++) channels[i] = start_kernel_channel(profiler, handle, i, start_ns + (uint64_t)i * 10);
  for (int i = 0; i < n_run; i++) stop_kernel_channel(profiler, channels[i], stop_ns - (uint64_t)i * 10);
}
