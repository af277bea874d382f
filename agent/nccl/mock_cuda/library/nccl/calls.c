/* NCCL's API in front of NCCL's own: this library is in the global scope before torch is loaded, so torch calls these, and
 * they call the real ones. A call's buffers are known here, its setting at the launch that follows. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ranks.h"

#if defined(__x86_64__) && defined(__GLIBC__)
/* Newer glibc has both names; a wheel is for 2.17 and newer. */
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
#endif
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#define MOST_CALLS 8192 /* of one group */

typedef int nccl_result;
enum { NCCL_SUCCESS = 0, NCCL_SYSTEM_ERROR = 2 };
typedef struct {
  char internal[128];
} unique_id;
/* The head of ncclConfig_t, the same since 2.14 */
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking;
} config_head;

static void *nccl; /* as dlopen() gave it */

void mock_cuda_set_nccl(void *handle) { nccl = handle; }

static void *real(const char *name) {
  void *const found = nccl != NULL ? dlsym(nccl, name) : NULL;
  if (found == NULL) fprintf(stderr, "zerotune: this release of NCCL has no %s\n", name);
  return found;
}

/* The real function of the same name; a static one per place keeps what was found. */
#define REAL(result, name, ...)                                                \
  static result (*name##_real)(__VA_ARGS__);                                   \
  if (name##_real == NULL) *(void **)&name##_real = real(#name);               \
  if (name##_real == NULL) return NCCL_SYSTEM_ERROR

/* ---- what this thread has called and not launched ---- */

typedef struct {
  communicator *of;
  void *stream;
  call one;
} pending;

static _Thread_local pending *waiting;
static _Thread_local size_t n_waiting;
static _Thread_local int depth;

static void note(void *host, void *stream, call one) {
  communicator *const of = mock_communicator(host);
  if (of == NULL || one.count == 0 || n_waiting == MOST_CALLS) return;
  if (waiting == NULL) waiting = malloc(MOST_CALLS * sizeof *waiting);
  if (waiting != NULL) waiting[n_waiting++] = (pending){of, stream, one};
}

static call *take(const communicator *of, size_t *n_calls) {
  call *const taken = malloc((n_waiting + 1) * sizeof *taken);
  size_t n_taken = 0, n_left = 0;
  if (taken == NULL) return NULL;
  for (size_t i = 0; i < n_waiting; i++)
    if (waiting[i].of == of) taken[n_taken++] = waiting[i].one;
    else waiting[n_left++] = waiting[i];
  n_waiting = n_left;
  *n_calls = n_taken;
  return taken;
}

call *mock_take_calls(const char *device, communicator **of, size_t *n_calls) {
  *n_calls = 0;
  *of = nccl != NULL ? mock_communicator_on_device(device) : NULL;
  return *of != NULL ? take(*of, n_calls) : NULL;
}

/* What was called without a kernel of collectives, as those of a single rank are: bytes travel all the same. */
static void settle(void) {
  if (depth > 0) return;
  while (n_waiting > 0) {
    communicator *const of = waiting[0].of;
    void *const stream = waiting[0].stream;
    size_t n_calls = 0;
    call *const calls = take(of, &n_calls);
    if (calls == NULL) return;
    mock_move(of, stream, calls, n_calls);
  }
}

/* ---- communicators ---- */

static uint64_t hash_of(const void *content, size_t n_bytes, uint64_t hash) {
  for (size_t i = 0; i < n_bytes; i++) hash = (hash ^ ((const unsigned char *)content)[i]) * UINT64_C(1099511628211);
  return hash;
}
#define HASH_START UINT64_C(14695981039346656037)

/* Calls of a communicator that does not block are launched by other threads, where nobody knows their buffers. */
static void make_blocking(config_head *config) {
  if (config != NULL) config->blocking = 1;
}

static nccl_result joined(nccl_result result, void **host, uint64_t key, int rank, int n_ranks) {
  if (result == NCCL_SUCCESS && *host != NULL && mock_join(*host, key, rank, n_ranks) == NULL)
    fprintf(stderr, "zerotune: the mock CUDA cannot let the ranks of a communicator meet: no bytes travel in it\n");
  return result;
}

MOCK_API nccl_result ncclCommInitRank(void **host, int n_ranks, unique_id id, int rank) {
  REAL(nccl_result, ncclCommInitRank, void **, int, unique_id, int);
  const nccl_result result = ncclCommInitRank_real(host, n_ranks, id, rank);
  return joined(result, host, hash_of(&id, sizeof id, HASH_START), rank, n_ranks);
}

MOCK_API nccl_result ncclCommInitRankConfig(void **host, int n_ranks, unique_id id, int rank, config_head *config) {
  REAL(nccl_result, ncclCommInitRankConfig, void **, int, unique_id, int, config_head *);
  make_blocking(config);
  const nccl_result result = ncclCommInitRankConfig_real(host, n_ranks, id, rank, config);
  return joined(result, host, hash_of(&id, sizeof id, HASH_START), rank, n_ranks);
}

MOCK_API nccl_result ncclCommInitRankScalable(void **host, int n_ranks, int rank, int n_ids, unique_id *ids,
                                              config_head *config) {
  REAL(nccl_result, ncclCommInitRankScalable, void **, int, int, int, unique_id *, config_head *);
  make_blocking(config);
  const nccl_result result = ncclCommInitRankScalable_real(host, n_ranks, rank, n_ids, ids, config);
  return joined(result, host, hash_of(ids, sizeof *ids, HASH_START), rank, n_ranks);
}

static nccl_result rank_and_size(void *host, int *rank, int *n_ranks) {
  REAL(nccl_result, ncclCommUserRank, void *, int *);
  REAL(nccl_result, ncclCommCount, void *, int *);
  const nccl_result result = ncclCommUserRank_real(host, rank);
  return result == NCCL_SUCCESS ? ncclCommCount_real(host, n_ranks) : result;
}

MOCK_API nccl_result ncclCommSplit(void *host, int color, int order, void **made, config_head *config) {
  REAL(nccl_result, ncclCommSplit, void *, int, int, void **, config_head *);
  communicator *const parent = mock_communicator(host);
  make_blocking(config);
  const nccl_result result = ncclCommSplit_real(host, color, order, made, config);
  if (parent == NULL) return result;
  const uint64_t words[] = {mock_communicator_key(parent), mock_count_split(parent), (uint64_t)(int64_t)color};
  int rank, n_ranks;
  if (result != NCCL_SUCCESS || *made == NULL || rank_and_size(*made, &rank, &n_ranks) != NCCL_SUCCESS) return result;
  return joined(result, made, hash_of(words, sizeof words, HASH_START), rank, n_ranks);
}

MOCK_API nccl_result ncclCommDestroy(void *host) {
  REAL(nccl_result, ncclCommDestroy, void *);
  communicator *const known = mock_communicator(host);
  if (known != NULL) mock_leave(known, false);
  return ncclCommDestroy_real(host);
}

MOCK_API nccl_result ncclCommAbort(void *host) {
  REAL(nccl_result, ncclCommAbort, void *);
  communicator *const known = mock_communicator(host);
  if (known != NULL) mock_leave(known, true);
  return ncclCommAbort_real(host);
}

/* ---- groups ---- */

MOCK_API nccl_result ncclGroupStart(void) {
  REAL(nccl_result, ncclGroupStart, void);
  depth++;
  return ncclGroupStart_real();
}

MOCK_API nccl_result ncclGroupEnd(void) {
  REAL(nccl_result, ncclGroupEnd, void);
  const nccl_result result = ncclGroupEnd_real();
  depth--;
  settle();
  return result;
}

MOCK_API nccl_result ncclGroupSimulateEnd(void *info) {
  REAL(nccl_result, ncclGroupSimulateEnd, void *);
  const nccl_result result = ncclGroupSimulateEnd_real(info);
  if (--depth == 0) n_waiting = 0;
  return result;
}

/* ---- collectives ---- */

static nccl_result called(nccl_result result) {
  settle();
  return result;
}

MOCK_API nccl_result ncclAllGather(const void *from, void *to, size_t count, int type, void *host, void *stream) {
  REAL(nccl_result, ncclAllGather, const void *, void *, size_t, int, void *, void *);
  note(host, stream, (call){.collective = CALL_ALL_GATHER, .from = from, .to = to, .count = count, .datatype = type});
  return called(ncclAllGather_real(from, to, count, type, host, stream));
}

MOCK_API nccl_result ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, void *host,
                                       void *stream) {
  REAL(nccl_result, ncclReduceScatter, const void *, void *, size_t, int, int, void *, void *);
  note(host, stream, (call){.collective = CALL_REDUCE_SCATTER, .from = from, .to = to, .count = count, .datatype = type,
                            .operation = operation});
  return called(ncclReduceScatter_real(from, to, count, type, operation, host, stream));
}

MOCK_API nccl_result ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *host,
                                   void *stream) {
  REAL(nccl_result, ncclAllReduce, const void *, void *, size_t, int, int, void *, void *);
  note(host, stream, (call){.collective = CALL_ALL_REDUCE, .from = from, .to = to, .count = count, .datatype = type,
                            .operation = operation});
  return called(ncclAllReduce_real(from, to, count, type, operation, host, stream));
}

MOCK_API nccl_result ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *host,
                                   void *stream) {
  REAL(nccl_result, ncclBroadcast, const void *, void *, size_t, int, int, void *, void *);
  note(host, stream, (call){.collective = CALL_BROADCAST, .from = from, .to = to, .count = count, .datatype = type,
                            .root = root});
  return called(ncclBroadcast_real(from, to, count, type, root, host, stream));
}

MOCK_API nccl_result ncclBcast(void *buffer, size_t count, int type, int root, void *host, void *stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, host, stream);
}

MOCK_API nccl_result ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, void *host,
                                void *stream) {
  REAL(nccl_result, ncclReduce, const void *, void *, size_t, int, int, int, void *, void *);
  note(host, stream, (call){.collective = CALL_REDUCE, .from = from, .to = to, .count = count, .datatype = type,
                            .operation = operation, .root = root});
  return called(ncclReduce_real(from, to, count, type, operation, root, host, stream));
}

MOCK_API nccl_result ncclSend(const void *from, size_t count, int type, int peer, void *host, void *stream) {
  REAL(nccl_result, ncclSend, const void *, size_t, int, int, void *, void *);
  note(host, stream, (call){.collective = CALL_SEND, .from = from, .count = count, .datatype = type, .root = peer});
  return called(ncclSend_real(from, count, type, peer, host, stream));
}

MOCK_API nccl_result ncclRecv(void *to, size_t count, int type, int peer, void *host, void *stream) {
  REAL(nccl_result, ncclRecv, void *, size_t, int, int, void *, void *);
  note(host, stream, (call){.collective = CALL_RECEIVE, .to = to, .count = count, .datatype = type, .root = peer});
  return called(ncclRecv_real(to, count, type, peer, host, stream));
}

/* ---- what NCCL makes of messages, from 2.28 on ---- */

static void note_messages(void *host, void *stream, const void *from, void *to, size_t count, int type, int sender,
                          int receiver) {
  communicator *const of = mock_communicator(host);
  if (of == NULL) return;
  const size_t n_bytes = count * mock_element_bytes(type);
  const int rank = mock_rank(of), n_ranks = mock_n_ranks(of);
  for (int peer = 0; peer < n_ranks; peer++) { /* -1 = everybody */
    if ((sender < 0 || sender == rank) && (receiver < 0 || receiver == peer))
      note(host, stream, (call){.collective = CALL_SEND, .from = (const char *)from + (receiver < 0 ? n_bytes * (size_t)peer : 0),
                                .count = count, .datatype = type, .root = peer});
    if ((receiver < 0 || receiver == rank) && (sender < 0 || sender == peer))
      note(host, stream, (call){.collective = CALL_RECEIVE, .to = (char *)to + (sender < 0 ? n_bytes * (size_t)peer : 0),
                                .count = count, .datatype = type, .root = peer});
  }
}

MOCK_API nccl_result ncclAlltoAll(const void *from, void *to, size_t count, int type, void *host, void *stream) {
  REAL(nccl_result, ncclAlltoAll, const void *, void *, size_t, int, void *, void *);
  note_messages(host, stream, from, to, count, type, -1, -1);
  return called(ncclAlltoAll_real(from, to, count, type, host, stream));
}

MOCK_API nccl_result ncclGather(const void *from, void *to, size_t count, int type, int root, void *host, void *stream) {
  REAL(nccl_result, ncclGather, const void *, void *, size_t, int, int, void *, void *);
  note_messages(host, stream, from, to, count, type, -1, root);
  return called(ncclGather_real(from, to, count, type, root, host, stream));
}

MOCK_API nccl_result ncclScatter(const void *from, void *to, size_t count, int type, int root, void *host, void *stream) {
  REAL(nccl_result, ncclScatter, const void *, void *, size_t, int, int, void *, void *);
  note_messages(host, stream, from, to, count, type, root, -1);
  return called(ncclScatter_real(from, to, count, type, root, host, stream));
}
