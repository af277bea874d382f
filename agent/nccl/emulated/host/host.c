/* The caller's side of NCCL's plugin ABI: calls tuners v2-v6 and profilers v3-v7 as each NCCL release does. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../plugin/nccl_abi.h"

#define HOST_NO_SUCH_CELL (-2)
#define HOST_MAX_CHANNELS 128 /* RCCL's; NCCL has 64 */

typedef struct {
  const char *collective;
  const char *datatype;
  const char *algorithm;
  const char *protocol;
  uint64_t sequence;
  uint64_t count;
  uint64_t traffic_bytes;
  uint64_t comm_id;
  int32_t root;
  int32_t rank;
  uint8_t function;
  uint8_t datatype_code;
  uint8_t algorithm_code;
  uint8_t protocol_code;
  uint8_t n_channels;
  uint8_t n_warps;
  uint8_t is_symmetric;
  uint8_t reserved;
} host_coll; /* mirrored in plugin_host.py */

/* The constants of the cost model, which NCCL 2.28 passes to init for reading. */
static nccl_tuner_constants constants;

__attribute__((format(printf, 5, 6)))
static void host_log(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
  (void)flags;
  (void)file;
  (void)line;
  const char *debug = getenv("NCCL_DEBUG");
  int wanted = debug == NULL ? 0 : strcmp(debug, "INFO") == 0 || strcmp(debug, "TRACE") == 0 ? 3
                                : strcmp(debug, "WARN") == 0 ? 2 : 0;
  if (level == 0 || level > wanted) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "emulated NCCL %s %s\n", level <= 2 ? "WARN" : "INFO", text);
}

int host_tuner_init(const void *tuner, int version, void **context, uint64_t comm_id, uint64_t n_ranks,
                    uint64_t n_nodes) {
  int per_node = (int)(n_ranks / (n_nodes ? n_nodes : 1));
  nccl_nvl_domain_info domain = {(int)n_nodes, per_node, per_node};
  switch (version) {
    case 2: return ((const nccl_tuner_v2 *)tuner)->init(n_ranks, n_nodes, host_log, context);
    case 3: return ((const nccl_tuner_v3 *)tuner)->init(n_ranks, n_nodes, host_log, context);
    case 4: return ((const nccl_tuner_v4 *)tuner)->init(n_ranks, n_nodes, host_log, context);
    case 5:
      return ((const nccl_tuner_v5 *)tuner)->init(context, comm_id, n_ranks, n_nodes, host_log, &domain, &constants);
    case 6:
      return ((const nccl_tuner_v6 *)tuner)->init(context, comm_id, n_ranks, n_nodes, host_log, &domain, &constants);
    default: return -1;
  }
}

/* `table` is float[n_algorithms][3] and is edited in place. A v2 plugin names a cell instead: NCCL's adapter gives that
 * cell a cost of 0 unless it is IGNORE, and 2.21, which has no adapter, runs any cell. */
int host_tuner_ask(const void *tuner, int version, void *context, int collective, uint64_t n_bytes, int n_pipe_ops,
                   float *table, int n_algorithms, int registered, int nvls_support, int *n_channels) {
  size_t bytes = n_bytes;
  float **cells = (float **)(void *)table;
  switch (version) {
    case 2: {
      int algorithm = -1, protocol = -1;
      nccl_result result = ((const nccl_tuner_v2 *)tuner)
                               ->get_coll_info(context, collective, bytes, 0, nvls_support, n_pipe_ops, &algorithm,
                                               &protocol, n_channels);
      int its_algorithm = -1, its_protocol = -1; /* 2.21 asks once more, for the channels of each member of the run */
      if (result == NCCL_SUCCESS)
        result = ((const nccl_tuner_v2 *)tuner)
                     ->get_coll_info(context, collective, bytes, 0, nvls_support, n_pipe_ops, &its_algorithm,
                                     &its_protocol, n_channels);
      if (result != NCCL_SUCCESS || (algorithm < 0 && protocol < 0)) return result;
      if (algorithm < 0 || algorithm >= n_algorithms || protocol < 0 || protocol >= NCCL_N_PROTOCOLS ||
          table[algorithm * NCCL_N_PROTOCOLS + protocol] < 0)
        return HOST_NO_SUCH_CELL;
      table[algorithm * NCCL_N_PROTOCOLS + protocol] = 0;
      return NCCL_SUCCESS;
    }
    case 3:
      return ((const nccl_tuner_v3 *)tuner)
          ->get_coll_info(context, collective, bytes, n_pipe_ops, cells, n_algorithms, NCCL_N_PROTOCOLS, n_channels);
    case 4:
      return ((const nccl_tuner_v4 *)tuner)
          ->get_coll_info(context, collective, bytes, n_pipe_ops, cells, n_algorithms, NCCL_N_PROTOCOLS, registered,
                          n_channels);
    case 5:
      return ((const nccl_tuner_v5 *)tuner)
          ->get_coll_info(context, collective, bytes, n_pipe_ops, cells, n_algorithms, NCCL_N_PROTOCOLS, registered,
                          n_channels);
    case 6:
      return ((const nccl_tuner_v6 *)tuner)
          ->get_coll_info(context, collective, bytes, n_pipe_ops, cells, n_algorithms, NCCL_N_PROTOCOLS, registered,
                          n_channels);
    default: return -1;
  }
}

/* The tuner's chunk size for a part of a collective, capped to `buffer_bytes`; 0 = NCCL's own. */
uint64_t host_tuner_chunk(const void *tuner, int version, void *context, int collective, uint64_t n_bytes, int algorithm,
                          int protocol, uint64_t buffer_bytes) {
  const nccl_tuner_v6 *its = tuner;
  size_t chunk_bytes = buffer_bytes;
  if (version < 6 || its->get_chunk_size == NULL) return 0;
  if (its->get_chunk_size(context, collective, n_bytes, algorithm, protocol, 1, &chunk_bytes) != NCCL_SUCCESS) return 0;
  return chunk_bytes >= buffer_bytes ? 0 : chunk_bytes;
}

/* The cell that NCCL takes: the smallest cost that is not IGNORE and below `limit`, the first on ties; -1 = none. */
int host_cheapest(const float *costs, int n_cells, double limit) {
  int winner = -1;
  for (int cell = 0; cell < n_cells; cell++)
    if (costs[cell] >= 0 && costs[cell] < limit) {
      limit = costs[cell];
      winner = cell;
    }
  return winner;
}

int host_tuner_finalize(const void *tuner, int version, void *context) {
  switch (version) {
    case 2: return ((const nccl_tuner_v2 *)tuner)->destroy(context);
    case 3: return ((const nccl_tuner_v3 *)tuner)->destroy(context);
    case 4: return ((const nccl_tuner_v4 *)tuner)->destroy(context);
    case 5: return ((const nccl_tuner_v5 *)tuner)->finalize(context);
    case 6: return ((const nccl_tuner_v6 *)tuner)->finalize(context);
    default: return -1;
  }
}

int host_profiler_init(const void *profiler, int version, void **context, int *mask, const char *name,
                       uint64_t comm_id, int n_nodes, int n_ranks, int rank) {
  switch (version) {
    case 3: return ((const nccl_profiler_v3 *)profiler)->init(context, mask);
    case 4:
      return ((const nccl_profiler_v4 *)profiler)->init(context, mask, name, comm_id, n_nodes, n_ranks, rank, host_log);
    case 5:
    case 6:
    case 7: /* the same */
      return ((const nccl_profiler_v5 *)profiler)->init(context, comm_id, mask, name, n_nodes, n_ranks, rank, host_log);
    default: return -1;
  }
}

#define HOST_TAIL(version, call)                                  \
  switch (version) {                                              \
    case 3: return ((const nccl_profiler_v3 *)profiler)->call;    \
    case 4: return ((const nccl_profiler_v4 *)profiler)->call;    \
    case 5: return ((const nccl_profiler_v5 *)profiler)->call;    \
    case 6: return ((const nccl_profiler_v6 *)profiler)->call;    \
    case 7: return ((const nccl_profiler_v7 *)profiler)->call;    \
    default: return -1;                                           \
  }

int host_profiler_finalize(const void *profiler, int version, void *context) { HOST_TAIL(version, finalize(context)) }

static int host_stop(const void *profiler, int version, void *handle) { HOST_TAIL(version, stop_event(handle)) }

static int host_record(const void *profiler, int version, void *handle, int state, nccl_event_state_args *args) {
  HOST_TAIL(version, record_event_state(handle, state, args))
}

static int host_start(const void *profiler, int version, void *context, void **handle, void *event) {
  switch (version) {
    case 3: return ((const nccl_profiler_v3 *)profiler)->start_event(context, handle, event);
    case 4: return ((const nccl_profiler_v4 *)profiler)->start_event(context, handle, event);
    case 5: return ((const nccl_profiler_v5 *)profiler)->start_event(context, handle, event);
    case 6: return ((const nccl_profiler_v6 *)profiler)->start_event(context, handle, event);
    case 7: return ((const nccl_profiler_v7 *)profiler)->start_event(context, handle, event);
    default: return -1;
  }
}

/* `parent` is the group's event up to v4, the API call's from v5 on. */
static int host_start_coll(const void *profiler, int version, void *context, void **handle, const host_coll *coll,
                           void *parent, void *group) {
  nccl_coll_v4 body = {.sequence = coll->sequence, .collective = coll->collective, .count = coll->count,
      .root = coll->root, .datatype = coll->datatype, .n_channels = coll->n_channels, .n_warps = coll->n_warps,
      .algorithm = coll->algorithm, .protocol = coll->protocol};
  switch (version) {
    case 3: {
      nccl_event_v3 event = {.type = NCCL_PROFILE_COLL, .parent = parent, .rank = coll->rank};
      event.coll = (nccl_coll_v3){.name = "", .comm_hash = coll->comm_id, .sequence = coll->sequence,
          .collective = coll->collective, .count = coll->count, .root = coll->root, .datatype = coll->datatype,
          .n_max_channels = coll->n_channels, .n_warps = coll->n_warps, .algorithm = coll->algorithm,
          .protocol = coll->protocol};
      return host_start(profiler, version, context, handle, &event);
    }
    case 4: {
      nccl_event_v4 event = {.type = NCCL_PROFILE_COLL, .parent = parent, .rank = coll->rank};
      event.coll = body;
      return host_start(profiler, version, context, handle, &event);
    }
    default: {
      nccl_event_v5 event = {.type = NCCL_PROFILE_COLL, .parent = parent, .rank = coll->rank};
      if (version >= 7)
        event.coll_v7 = (nccl_coll_v7){.coll = {.coll = body, .parent_group = group},
            .kernel_variant = coll->is_symmetric ? "ST" : NULL, .is_symmetric = coll->is_symmetric != 0};
      else
        event.coll = (nccl_coll_v5){.coll = body, .parent_group = group};
      return host_start(profiler, version, context, handle, &event);
    }
  }
}

static void *host_start_group(const void *profiler, int version, void *context) {
  void *handle = NULL;
  if (version <= 4) {
    nccl_event_v4 event = {.type = NCCL_PROFILE_GROUP}; /* v3 and v4 have the same head */
    host_start(profiler, version, context, &handle, &event);
  } else {
    nccl_event_v5 event = {.type = NCCL_PROFILE_GROUP};
    host_start(profiler, version, context, &handle, &event);
  }
  return handle;
}

/* The user's calls of one group, which v5 and newer report, and whether a graph captures them. A handle for each goes
 * to `calls`, that of the group is returned. */
static void *host_announce(const void *profiler, int version, void *context, const host_coll *colls, int n_colls,
                    int captured, void **calls) {
  void *group = NULL;
  for (int i = 0; i < n_colls; i++) calls[i] = NULL;
  if (version < 5) return NULL;
  nccl_event_v5 outer = {.type = NCCL_PROFILE_GROUP_API, .rank = n_colls ? colls[0].rank : 0};
  host_start(profiler, version, context, &group, &outer);
  for (int i = 0; i < n_colls; i++) {
    nccl_event_v5 event = {.type = NCCL_PROFILE_COLL_API, .parent = group, .rank = colls[i].rank};
    event.coll_api = (nccl_coll_api_v5){.collective = colls[i].collective, .count = colls[i].count,
        .datatype = colls[i].datatype, .root = colls[i].root, .graph_captured = captured != 0};
    host_start(profiler, version, context, &calls[i], &event);
    if (calls[i] != NULL) host_stop(profiler, version, calls[i]);
  }
  return group;
}

static void host_close_group(const void *profiler, int version, void *group) {
  if (group != NULL) host_stop(profiler, version, group);
}

/* One kernel for a group's collectives: starts events for the group and its collectives, and stops them, since the host
 * has done its part. `calls` are handles of API calls, and may be the same array as `handles`, for the collectives'
 * handles, which are the parents of kernel-channel events. Up to 2.27 a group whose handle is NULL has no events. */
void host_launch(const void *profiler, int version, void *context, const host_coll *colls, void *const *calls,
                 int n_colls, void **handles) {
  void *group = host_start_group(profiler, version, context);
  for (int i = 0; i < n_colls; i++) {
    void *parent = version > 4 ? calls[i] : group;
    handles[i] = NULL;
    if (version > 4 || group != NULL)
      host_start_coll(profiler, version, context, &handles[i], &colls[i], parent, group);
  }
  for (int i = 0; i < n_colls; i++)
    if (handles[i] != NULL) host_stop(profiler, version, handles[i]);
  if (group != NULL) host_stop(profiler, version, group);
}

/* A group that runs at once. */
void host_enqueue(const void *profiler, int version, void *context, const host_coll *colls, int n_colls,
                  void **handles) {
  void *group = host_announce(profiler, version, context, colls, n_colls, 0, handles);
  host_launch(profiler, version, context, colls, handles, n_colls, handles);
  host_close_group(profiler, version, group);
}

/* A group that a graph captures: it is reported now, and runs whenever the graph is replayed. */
void host_capture(const void *profiler, int version, void *context, const host_coll *colls, int n_colls,
                  void **calls) {
  host_close_group(profiler, version, host_announce(profiler, version, context, colls, n_colls, 1, calls));
}

/* The rank is not set, as in NCCL. */
static int host_start_channel(const void *profiler, int version, void *context, void **handle, void *parent,
                              uint8_t channel, uint64_t start_ns) {
  if (version == 3) {
    nccl_event_v3 event = {.type = NCCL_PROFILE_KERNEL_CHANNEL, .parent = parent};
    event.kernel_channel = channel;
    return host_start(profiler, version, context, handle, &event);
  }
  if (version == 4) {
    nccl_event_v4 event = {.type = NCCL_PROFILE_KERNEL_CHANNEL, .parent = parent};
    event.kernel_channel = (nccl_kernel_channel_v4){.channel = channel, .start_ns = start_ns};
    return host_start(profiler, version, context, handle, &event);
  }
  nccl_event_v5 event = {.type = NCCL_PROFILE_KERNEL_CHANNEL, .parent = parent};
  event.kernel_channel = (nccl_kernel_channel_v4){.channel = channel, .start_ns = start_ns};
  return host_start(profiler, version, context, handle, &event);
}

/* Reports, as NCCL's proxy thread, that the kernel's channels ran from start_ns to stop_ns of the emulated GPU's timer.
 * */
void host_run_channels(const void *profiler, int version, void *context, void *parent, int n_channels,
                       uint64_t start_ns, uint64_t stop_ns) {
  if (version < 3) return; /* these versions have no kernel events */
  void *handles[HOST_MAX_CHANNELS] = {NULL};
  if (n_channels > HOST_MAX_CHANNELS) n_channels = HOST_MAX_CHANNELS;
  for (int channel = 0; channel < n_channels; channel++)
    host_start_channel(profiler, version, context, &handles[channel], parent, (uint8_t)channel, start_ns);
  for (int channel = 0; channel < n_channels; channel++) {
    if (handles[channel] == NULL) continue;
    if (version > 3) {
      nccl_event_state_args args = {.kernel_channel_stop_ns = stop_ns};
      host_record(profiler, version, handles[channel], NCCL_STATE_KERNEL_CHANNEL_STOP, &args);
    }
    host_stop(profiler, version, handles[channel]);
  }
}
