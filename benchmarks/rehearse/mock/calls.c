/* NCCL's API in front of NCCL's own: this library is in the global scope before torch is loaded, so torch calls these, and
 * they call the real ones. A call's buffers are known here, its setting at the launch that follows: on this thread, or on one
 * of NCCL's if the communicator does not block. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ranks.h"
#include "streams.h"

#if defined(__x86_64__) && defined(__GLIBC__)
/* Newer glibc has both names; a wheel is for 2.17 and newer. */
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
#endif
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

typedef int nccl_result;
enum { NCCL_SUCCESS = 0, NCCL_SYSTEM_ERROR = 2, NCCL_IN_PROGRESS = 7 };
typedef struct {
  char internal[128];
} unique_id;

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

/* ---- calls that were not launched yet ---- */

typedef struct pending {
  communicator *of;
  void *stream;
  call one;
  uint64_t group;
  bool is_called; /* NCCL has it */
  struct pending *next;
} pending;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pending *oldest, **end = &oldest; /* in the order of the calls */
static uint64_t n_groups;
static _Thread_local uint64_t group; /* a call outside of groups is one by itself */
static _Thread_local int depth;

static void begin_call(void) {
  if (depth > 0) return;
  pthread_mutex_lock(&lock);
  group = ++n_groups;
  pthread_mutex_unlock(&lock);
}

static void note(void *host, void *stream, call one) {
  communicator *const of = mock_communicator(host);
  if (of == NULL || one.count == 0) return;
  pending *const made = malloc(sizeof *made);
  if (made == NULL) return;
  *made = (pending){.of = of, .stream = stream, .one = one, .group = group};
  pthread_mutex_lock(&lock);
  *end = made;
  end = &made->next;
  pthread_mutex_unlock(&lock);
}

/* Forgets pending calls: of a communicator, or (NULL) of this thread's group. */
static void forget(const communicator *of) {
  pthread_mutex_lock(&lock);
  for (pending **at = &oldest; *at != NULL;) {
    pending *const one = *at;
    if (of != NULL ? one->of != of : one->group != group) {
      at = &one->next;
      continue;
    }
    *at = one->next;
    free(one);
  }
  end = &oldest;
  while (*end != NULL) end = &(*end)->next;
  pthread_mutex_unlock(&lock);
}

/* The calls of a communicator's oldest group; with the lock held. */
static call *take(const communicator *of, void **stream, size_t *n_calls) {
  size_t n = 0;
  uint64_t its_group = 0;
  for (const pending *one = oldest; one != NULL; one = one->next)
    if (one->of == of && (its_group == 0 || one->group == its_group)) {
      its_group = one->group;
      n++;
    }
  call *const taken = malloc((n + 1) * sizeof *taken);
  *n_calls = 0;
  if (taken == NULL) return NULL;
  pending **at = &oldest;
  while (*at != NULL) {
    pending *const one = *at;
    if (one->of != of || one->group != its_group) {
      at = &one->next;
      continue;
    }
    taken[(*n_calls)++] = one->one;
    *stream = one->stream;
    *at = one->next;
    free(one);
  }
  end = at;
  return taken;
}

call *mock_take_calls(const char *device, communicator **of, size_t *n_calls) {
  void *stream;
  *n_calls = 0;
  *of = nccl != NULL ? mock_communicator_on_device(device) : NULL;
  if (*of == NULL) return NULL;
  pthread_mutex_lock(&lock);
  call *const taken = take(*of, &stream, n_calls);
  pthread_mutex_unlock(&lock);
  return taken;
}

/* Calls without a kernel of collectives, as those of a single rank: bytes travel all the same. They belong to this thread's
 * group, or to a communicator that is idle. */
static void settle(const communicator *done) {
  for (;;) {
    pthread_mutex_lock(&lock);
    const pending *first = oldest;
    while (first != NULL && !(done != NULL ? first->of == done && first->is_called : first->group == group)) first = first->next;
    communicator *const of = first != NULL ? first->of : NULL;
    void *stream = NULL;
    size_t n_calls = 0;
    call *const calls = of != NULL ? take(of, &stream, &n_calls) : NULL;
    pthread_mutex_unlock(&lock);
    if (calls == NULL) return;
    mock_move(of, stream, calls, n_calls);
  }
}

static void mark_called(void) {
  pthread_mutex_lock(&lock);
  for (pending *one = oldest; one != NULL; one = one->next) one->is_called |= one->group == group;
  pthread_mutex_unlock(&lock);
}

static nccl_result called(nccl_result result) {
  if (depth > 0) return result;
  if (result == NCCL_IN_PROGRESS) mark_called();
  else if (result == NCCL_SUCCESS) settle(NULL);
  else forget(NULL);
  return result;
}

/* ---- communicators ---- */

static uint64_t hash_of(const void *content, size_t n_bytes, uint64_t hash) {
  for (size_t i = 0; i < n_bytes; i++) hash = (hash ^ ((const unsigned char *)content)[i]) * UINT64_C(1099511628211);
  return hash;
}
#define HASH_START UINT64_C(14695981039346656037)

/* A communicator under construction: NCCL writes its address when it is ready. */
typedef struct coming {
  void **made, *host;  /* the target, and the value already written */
  void *tells;         /* the communicator whose state has the completion: itself, or its parent */
  uint64_t key, group;
  struct coming *next;
} coming;

static coming *all_coming;

static nccl_result rank_and_size(void *host, int *rank, int *n_ranks) {
  REAL(nccl_result, ncclCommUserRank, void *, int *);
  REAL(nccl_result, ncclCommCount, void *, int *);
  const nccl_result result = ncclCommUserRank_real(host, rank);
  return result == NCCL_SUCCESS ? ncclCommCount_real(host, n_ranks) : result;
}

static void join(const coming *one) {
  void *const host = one->host != NULL ? one->host : *one->made;
  int rank, n_ranks;
  if (host == NULL || rank_and_size(host, &rank, &n_ranks) != NCCL_SUCCESS) return; /* this rank is in none */
  if (mock_join(host, one->key, rank, n_ranks) == NULL)
    fprintf(stderr, "zerotune: the mock CUDA cannot let the ranks of a communicator meet: no bytes travel in it\n");
}

/* One whose state is this communicator's, or (NULL) that this thread's group made; NULL = none. */
static coming *take_coming(const void *tells) {
  pthread_mutex_lock(&lock);
  coming **at = &all_coming;
  while (*at != NULL && !(tells != NULL ? (*at)->tells == tells : (*at)->group == group)) at = &(*at)->next;
  coming *const found = *at;
  if (found != NULL) *at = found->next;
  pthread_mutex_unlock(&lock);
  return found;
}

static void join_all(const void *tells) {
  for (coming *one; (one = take_coming(tells)) != NULL; free(one)) join(one);
}

/* The split of a communicator that does not block succeeds at once, and is not over. */
static nccl_result state_of(void *host) {
  REAL(nccl_result, ncclCommGetAsyncError, void *, nccl_result *);
  nccl_result state;
  const nccl_result result = ncclCommGetAsyncError_real(host, &state);
  return result == NCCL_SUCCESS ? state : result;
}

static nccl_result comes(nccl_result result, coming described) {
  if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS) return result;
  coming *const made = malloc(sizeof *made);
  if (made == NULL) return result;
  *made = described;
  made->group = group;
  pthread_mutex_lock(&lock);
  made->next = all_coming;
  all_coming = made;
  pthread_mutex_unlock(&lock);
  if (depth == 0 && state_of(described.tells) == NCCL_SUCCESS) join_all(described.tells);
  return result;
}

static nccl_result rank_comes(nccl_result result, void *host, const unique_id *id) {
  return comes(result, (coming){.host = host, .tells = host, .key = hash_of(id, sizeof *id, HASH_START)});
}

MOCK_API nccl_result ncclCommInitRank(void **host, int n_ranks, unique_id id, int rank) {
  REAL(nccl_result, ncclCommInitRank, void **, int, unique_id, int);
  begin_call();
  const nccl_result result = ncclCommInitRank_real(host, n_ranks, id, rank);
  return rank_comes(result, *host, &id);
}

MOCK_API nccl_result ncclCommInitRankConfig(void **host, int n_ranks, unique_id id, int rank, void *config) {
  REAL(nccl_result, ncclCommInitRankConfig, void **, int, unique_id, int, void *);
  begin_call();
  const nccl_result result = ncclCommInitRankConfig_real(host, n_ranks, id, rank, config);
  return rank_comes(result, *host, &id);
}

MOCK_API nccl_result ncclCommInitRankScalable(void **host, int n_ranks, int rank, int n_ids, unique_id *ids, void *config) {
  REAL(nccl_result, ncclCommInitRankScalable, void **, int, int, int, unique_id *, void *);
  begin_call();
  const nccl_result result = ncclCommInitRankScalable_real(host, n_ranks, rank, n_ids, ids, config);
  return rank_comes(result, *host, ids);
}

MOCK_API nccl_result ncclCommSplit(void *host, int color, int order, void **made, void *config) {
  REAL(nccl_result, ncclCommSplit, void *, int, int, void **, void *);
  begin_call();
  communicator *const parent = mock_communicator(host);
  const nccl_result result = ncclCommSplit_real(host, color, order, made, config);
  if (parent == NULL) return result;
  const uint64_t words[] = {mock_communicator_key(parent), mock_count_split(parent), (uint64_t)(int64_t)color};
  return comes(result, (coming){.made = made, .tells = host, .key = hash_of(words, sizeof words, HASH_START)});
}

MOCK_API nccl_result ncclCommGetAsyncError(void *host, nccl_result *state) {
  REAL(nccl_result, ncclCommGetAsyncError, void *, nccl_result *);
  const nccl_result result = ncclCommGetAsyncError_real(host, state);
  if (result != NCCL_SUCCESS || *state != NCCL_SUCCESS) return result;
  join_all(host);
  const communicator *const known = mock_communicator(host);
  if (known != NULL) settle(known);
  return result;
}

static void leave(const void *host, bool aborted) {
  communicator *const known = mock_communicator(host);
  for (coming *one; (one = take_coming(host)) != NULL;) free(one);
  if (known == NULL) return;
  forget(known);
  mock_leave(known, aborted);
}

MOCK_API nccl_result ncclCommDestroy(void *host) {
  REAL(nccl_result, ncclCommDestroy, void *);
  leave(host, false);
  return ncclCommDestroy_real(host);
}

MOCK_API nccl_result ncclCommAbort(void *host) {
  REAL(nccl_result, ncclCommAbort, void *);
  leave(host, true);
  return ncclCommAbort_real(host);
}

/* ---- groups ---- */

MOCK_API nccl_result ncclGroupStart(void) {
  REAL(nccl_result, ncclGroupStart, void);
  begin_call();
  depth++;
  return ncclGroupStart_real();
}

MOCK_API nccl_result ncclGroupEnd(void) {
  REAL(nccl_result, ncclGroupEnd, void);
  const nccl_result result = ncclGroupEnd_real();
  if (--depth == 0 && result == NCCL_SUCCESS) join_all(NULL);
  return called(result);
}

MOCK_API nccl_result ncclGroupSimulateEnd(void *info) {
  REAL(nccl_result, ncclGroupSimulateEnd, void *);
  const nccl_result result = ncclGroupSimulateEnd_real(info);
  if (--depth == 0) forget(NULL);
  return result;
}

/* ---- collectives ---- */

MOCK_API nccl_result ncclAllGather(const void *from, void *to, size_t count, int type, void *host, void *stream) {
  REAL(nccl_result, ncclAllGather, const void *, void *, size_t, int, void *, void *);
  begin_call();
  note(host, stream, (call){.collective = CALL_ALL_GATHER, .from = from, .to = to, .count = count, .datatype = type});
  return called(ncclAllGather_real(from, to, count, type, host, stream));
}

MOCK_API nccl_result ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, void *host,
                                       void *stream) {
  REAL(nccl_result, ncclReduceScatter, const void *, void *, size_t, int, int, void *, void *);
  begin_call();
  note(host, stream, (call){.collective = CALL_REDUCE_SCATTER, .from = from, .to = to, .count = count, .datatype = type,
                            .operation = operation});
  return called(ncclReduceScatter_real(from, to, count, type, operation, host, stream));
}

MOCK_API nccl_result ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *host,
                                   void *stream) {
  REAL(nccl_result, ncclAllReduce, const void *, void *, size_t, int, int, void *, void *);
  begin_call();
  note(host, stream, (call){.collective = CALL_ALL_REDUCE, .from = from, .to = to, .count = count, .datatype = type,
                            .operation = operation});
  return called(ncclAllReduce_real(from, to, count, type, operation, host, stream));
}

MOCK_API nccl_result ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *host,
                                   void *stream) {
  REAL(nccl_result, ncclBroadcast, const void *, void *, size_t, int, int, void *, void *);
  begin_call();
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
  begin_call();
  note(host, stream, (call){.collective = CALL_REDUCE, .from = from, .to = to, .count = count, .datatype = type,
                            .operation = operation, .root = root});
  return called(ncclReduce_real(from, to, count, type, operation, root, host, stream));
}

MOCK_API nccl_result ncclSend(const void *from, size_t count, int type, int peer, void *host, void *stream) {
  REAL(nccl_result, ncclSend, const void *, size_t, int, int, void *, void *);
  begin_call();
  note(host, stream, (call){.collective = CALL_SEND, .from = from, .count = count, .datatype = type, .root = peer});
  return called(ncclSend_real(from, count, type, peer, host, stream));
}

MOCK_API nccl_result ncclRecv(void *to, size_t count, int type, int peer, void *host, void *stream) {
  REAL(nccl_result, ncclRecv, void *, size_t, int, int, void *, void *);
  begin_call();
  note(host, stream, (call){.collective = CALL_RECEIVE, .to = to, .count = count, .datatype = type, .root = peer});
  return called(ncclRecv_real(to, count, type, peer, host, stream));
}

/* ---- collectives that NCCL makes of messages, from 2.28 on ---- */

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
  begin_call();
  note_messages(host, stream, from, to, count, type, -1, -1);
  return called(ncclAlltoAll_real(from, to, count, type, host, stream));
}

MOCK_API nccl_result ncclGather(const void *from, void *to, size_t count, int type, int root, void *host, void *stream) {
  REAL(nccl_result, ncclGather, const void *, void *, size_t, int, int, void *, void *);
  begin_call();
  note_messages(host, stream, from, to, count, type, -1, root);
  return called(ncclGather_real(from, to, count, type, root, host, stream));
}

MOCK_API nccl_result ncclScatter(const void *from, void *to, size_t count, int type, int root, void *host, void *stream) {
  REAL(nccl_result, ncclScatter, const void *, void *, size_t, int, int, void *, void *);
  begin_call();
  note_messages(host, stream, from, to, count, type, root, -1);
  return called(ncclScatter_real(from, to, count, type, root, host, stream));
}
