/* A communicator's ranks meet in a file of shared memory, whose name is gone once all have come. Each publishes its calls
 * there: when it was ready, and where its input lies in its own device memory, from which the others take it. */
#include "ranks.h"

#include <fcntl.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "streams.h"

#define N_CALLS 256u   /* that a rank may be ahead of the slowest */
#define N_MESSAGES 32u /* that a sender may be ahead of one receiver */
#define MOST_RANKS 64

typedef struct {
  int32_t file; /* -1 = not in device memory: its bytes do not travel */
  uint32_t reserved;
  uint64_t offset;
} place;

typedef struct {
  _Atomic uint64_t published; /* sequence + 1; written last */
  _Atomic uint64_t read;      /* the same, by this rank of all others' */
  uint64_t arrival_ns, described, setting;
  place input;
} announced_call;

typedef struct {
  _Atomic uint64_t published, taken;
  uint64_t arrival_ns, n_bytes;
  place input;
} message;

typedef struct {
  _Atomic int32_t pid;
  int32_t node;
  announced_call calls[N_CALLS];
} member;

typedef struct {
  _Atomic int32_t n_joined;
  member members[]; /* messages follow: N_MESSAGES by sender and receiver */
} meeting;

struct communicator {
  void *host;
  const char *device; /* learned from its first launch */
  uint64_t key;
  int rank, n_ranks;
  meeting *shared;
  size_t n_bytes;
  uint64_t n_calls, n_splits;
  uint64_t *n_sent, *n_received; /* by peer */
  int n_references;
  bool gone, stuck;
  communicator *next;
};

static communicator *communicators;
static int32_t own_node;
static uint64_t most_bytes = UINT64_MAX;

void mock_cuda_set_most_bytes(uint64_t n_bytes) { most_bytes = n_bytes; }

void mock_cuda_set_node(int node) { own_node = node; }

/* ---- meeting ---- */

static size_t meeting_bytes(int n_ranks) {
  const size_t n = (size_t)n_ranks;
  return sizeof(meeting) + n * sizeof(member) + n * n * N_MESSAGES * sizeof(message);
}

static message *message_at(const communicator *of, int sender, int receiver, uint64_t sequence) {
  message *const first = (message *)(void *)&of->shared->members[of->n_ranks];
  return &first[((size_t)sender * (size_t)of->n_ranks + (size_t)receiver) * N_MESSAGES + sequence % N_MESSAGES];
}

communicator *mock_join(void *host, uint64_t key, int rank, int n_ranks) {
  char name[64];
  snprintf(name, sizeof name, "/dev/shm/zerotune-mock-%016llx", (unsigned long long)key);
  if (n_ranks > MOST_RANKS) return NULL;
  const int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return NULL;
  const size_t n_bytes = meeting_bytes(n_ranks);
  meeting *const shared = ftruncate(file, (off_t)n_bytes) == 0
                              ? mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                              : MAP_FAILED;
  close(file);
  communicator *const made = calloc(1, sizeof *made);
  uint64_t *const counts = calloc(2 * (size_t)n_ranks, sizeof *counts);
  if (shared == MAP_FAILED || made == NULL || counts == NULL) return NULL;
  *made = (communicator){.host = host, .key = key, .rank = rank, .n_ranks = n_ranks, .shared = shared,
                         .n_bytes = n_bytes, .n_sent = counts, .n_received = counts + n_ranks, .n_references = 1};
  shared->members[rank].node = own_node;
  atomic_store(&shared->members[rank].pid, (int32_t)getpid());
  if (atomic_fetch_add(&shared->n_joined, 1) + 1 == n_ranks) unlink(name);
  mock_streams_lock();
  made->next = communicators;
  communicators = made;
  mock_streams_unlock();
  return made;
}

communicator *mock_communicator(const void *host) {
  mock_streams_lock();
  communicator *one = communicators;
  while (one != NULL && one->host != host) one = one->next;
  mock_streams_unlock();
  return one;
}

uint64_t mock_communicator_key(const communicator *one) { return one->key; }

int mock_rank(const communicator *one) { return one->rank; }

int mock_n_ranks(const communicator *one) { return one->n_ranks; }

uint64_t mock_count_split(communicator *one) { return ++one->n_splits; }

/* NCCL's own struct of a communicator holds the address of the one that kernels get; where differs by release. */
static bool holds(const void *host, const char *device) {
  const size_t n_words = malloc_usable_size((void *)(uintptr_t)host) / sizeof(void *);
  for (size_t i = 0; i < n_words; i++)
    if (((const char *const *)host)[i] == device) return true;
  return false;
}

communicator *mock_communicator_on_device(const char *device) {
  mock_streams_lock();
  communicator *found = communicators;
  while (found != NULL && found->device != device) found = found->next;
  for (communicator *one = communicators; found == NULL && one != NULL; one = one->next)
    if (one->device == NULL && holds(one->host, device)) {
      one->device = device;
      found = one;
    }
  mock_streams_unlock();
  return found;
}

void mock_hold(communicator *one) { one->n_references++; }

void mock_let_go(communicator *one) {
  if (--one->n_references > 0) return;
  munmap(one->shared, one->n_bytes);
  free(one->n_sent);
  free(one);
}

void mock_leave(communicator *gone, bool aborted) {
  mock_streams_lock();
  communicator **at = &communicators;
  while (*at != NULL && *at != gone) at = &(*at)->next;
  if (*at != NULL) *at = gone->next;
  gone->gone = gone->gone || aborted;
  mock_streams_advance();
  mock_let_go(gone);
  mock_streams_unlock();
}

bool mock_is_gone(const communicator *one) { return one->gone; }

void mock_size(communicator *one, int *n_ranks, int *n_nodes) {
  while (atomic_load(&one->shared->n_joined) < one->n_ranks && !one->gone) {
    const struct timespec moment = {0, 1000000};
    nanosleep(&moment, NULL);
  }
  *n_ranks = one->n_ranks;
  *n_nodes = 0;
  for (int rank = 0; rank < one->n_ranks; rank++) {
    bool seen = false;
    for (int before = 0; before < rank; before++)
      seen |= one->shared->members[before].node == one->shared->members[rank].node;
    *n_nodes += !seen;
  }
}

/* ---- memory of others ---- */

#define WINDOW_BYTES (UINT64_C(1) << 42) /* as the arena in memory.c */

typedef struct window {
  int32_t pid, file;
  char *base;
  struct window *next;
} window;

static window *windows;

static const char *window_of(int32_t pid, int32_t file) {
  for (const window *one = windows; one != NULL; one = one->next)
    if (one->pid == pid && one->file == file) return one->base;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
  const int opened = open(path, O_RDONLY | O_CLOEXEC);
  if (opened < 0) return NULL;
  const off_t n_bytes = lseek(opened, 0, SEEK_END);
  char *const base = mmap(NULL, (size_t)n_bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, opened, 0);
  close(opened);
  window *const made = base != MAP_FAILED ? malloc(sizeof *made) : NULL;
  if (made == NULL) return NULL;
  *made = (window){pid, file, base, windows};
  windows = made;
  return base;
}

static place place_of(const void *pointer) {
  int file;
  uint64_t offset;
  if (!mock_locate(pointer, &file, &offset)) return (place){.file = -1};
  return (place){.file = file, .offset = offset};
}

/* NULL = it cannot be reached. */
static const char *input_of(const communicator *of, int rank, place where, const void *own) {
  if (rank == of->rank) return own;
  if (where.file < 0) return NULL;
  const char *const base = window_of(atomic_load(&of->shared->members[rank].pid), where.file);
  return base != NULL ? base + where.offset : NULL;
}

/* ---- collectives ---- */

void mock_number_call(communicator *of, call *one) {
  if (one->collective == CALL_SEND) one->sequence = of->n_sent[one->root]++;
  else if (one->collective == CALL_RECEIVE) one->sequence = of->n_received[one->root]++;
  else one->sequence = of->n_calls++;
}

void mock_use_buffers(const communicator *of, call *one, uint64_t issued_ns, uint64_t until_ns) {
  static const char *const NAMES[] = {"ncclAllGather", "ncclReduceScatter", "ncclAllReduce", "ncclBroadcast",
                                      "ncclReduce",    "ncclSend",          "ncclRecv"};
  const uint64_t n_bytes = one->count * mock_element_bytes(one->datatype), n_ranks = (uint64_t)of->n_ranks;
  const bool is_rooted = one->collective == CALL_BROADCAST || one->collective == CALL_REDUCE;
  const bool is_root = !is_rooted || one->root == of->rank;
  const bool reads = one->from != NULL && (one->collective != CALL_BROADCAST || is_root);
  const bool writes = one->to != NULL && (one->collective != CALL_REDUCE || is_root);
  const char *const name = NAMES[one->collective];
  if (one->is_lost) return;
  if (reads)
    one->is_lost |= !mock_use(name, one->from, n_bytes * (one->collective == CALL_REDUCE_SCATTER ? n_ranks : 1),
                              issued_ns, until_ns);
  if (writes && !one->is_lost)
    one->is_lost |= !mock_use(name, one->to, n_bytes * (one->collective == CALL_ALL_GATHER ? n_ranks : 1), issued_ns,
                              until_ns);
}

static announced_call *announced(const communicator *of, int rank, uint64_t sequence) {
  return &of->shared->members[rank].calls[sequence % N_CALLS];
}

static uint64_t described(const call *one) {
  const uint64_t words[] = {(uint64_t)one->collective, one->count, (uint64_t)one->datatype, (uint64_t)one->operation,
                            (uint64_t)one->root};
  uint64_t hash = UINT64_C(14695981039346656037);
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) hash = (hash ^ words[i]) * UINT64_C(1099511628211);
  return hash;
}

static bool all_have(const communicator *of, uint64_t sequence, bool read) {
  for (int rank = 0; rank < of->n_ranks; rank++) {
    announced_call *const its = announced(of, rank, sequence);
    if (atomic_load(read ? &its->read : &its->published) < sequence + 1) return false;
  }
  return true;
}

static bool publish(communicator *of, const call *one, uint64_t arrival_ns, uint64_t setting) {
  if (one->sequence >= N_CALLS && !all_have(of, one->sequence - N_CALLS, true)) return false;
  announced_call *const mine = announced(of, of->rank, one->sequence);
  mine->arrival_ns = arrival_ns;
  mine->described = described(one);
  mine->setting = setting;
  mine->input = place_of(one->is_lost ? NULL : one->from);
  atomic_store(&mine->published, one->sequence + 1);
  return true;
}

/* Real ranks would hang on this. */
static bool agree(communicator *of, const call *one) {
  const announced_call *const mine = announced(of, of->rank, one->sequence);
  for (int rank = 0; rank < of->n_ranks && !of->stuck; rank++) {
    const announced_call *const its = announced(of, rank, one->sequence);
    const bool same_call = its->described == mine->described;
    if (same_call && its->setting == mine->setting) continue;
    of->stuck = true;
    fprintf(stderr, "zerotune: the mock CUDA hangs, as the ranks of a GPU would: ranks %d and %d launched different %s\n",
            of->rank, rank, same_call ? "settings" : "collectives");
  }
  return !of->stuck;
}

static void copy(void *to, const char *from, uint64_t n_bytes) {
  if (from != NULL && from != to) memmove(to, from, n_bytes);
}

static void take_inputs(communicator *of, call *one) {
  const uint64_t n_bytes = one->count * mock_element_bytes(one->datatype);
  if (n_bytes > most_bytes || one->is_lost) return;
  const char *inputs[MOST_RANKS];
  bool all = true;
  for (int rank = 0; rank < of->n_ranks; rank++) {
    inputs[rank] = input_of(of, rank, announced(of, rank, one->sequence)->input, one->from);
    all &= inputs[rank] != NULL;
  }
  const void *shares[MOST_RANKS];
  for (int rank = 0; all && rank < of->n_ranks; rank++)
    shares[rank] = inputs[rank] + (one->collective == CALL_REDUCE_SCATTER ? n_bytes * (uint64_t)of->rank : 0);
  switch (one->collective) {
  case CALL_ALL_GATHER:
    for (int rank = 0; rank < of->n_ranks; rank++) copy((char *)one->to + n_bytes * (uint64_t)rank, inputs[rank], n_bytes);
    break;
  case CALL_BROADCAST:
    copy(one->to, inputs[one->root], n_bytes);
    break;
  case CALL_REDUCE:
    if (of->rank != one->root) break; /* fallthrough */
  default:
    one->result = all ? malloc(n_bytes) : NULL;
    if (one->result != NULL)
      mock_reduce(one->result, shares, of->n_ranks, one->count, one->datatype, one->operation);
  }
}

static bool progress_collective(communicator *of, call *one, uint64_t arrival_ns, uint64_t setting, uint64_t *start_ns) {
  if (one->state == CALL_NEW) {
    if (!publish(of, one, arrival_ns, setting)) return false;
    one->state = CALL_PUBLISHED;
  }
  if (one->state == CALL_PUBLISHED) {
    if (of->stuck || !all_have(of, one->sequence, false) || !agree(of, one)) return false;
    for (int rank = 0; rank < of->n_ranks; rank++) {
      const uint64_t its_ns = announced(of, rank, one->sequence)->arrival_ns;
      if (its_ns > *start_ns) *start_ns = its_ns;
    }
    take_inputs(of, one);
    atomic_store(&announced(of, of->rank, one->sequence)->read, one->sequence + 1);
    one->state = CALL_READ;
  }
  if (!all_have(of, one->sequence, true)) return false;
  if (one->result != NULL) {
    if (!one->is_lost) memcpy(one->to, one->result, one->count * mock_element_bytes(one->datatype));
    free(one->result);
    one->result = NULL;
  }
  one->state = CALL_DONE;
  return true;
}

/* ---- messages ---- */

static bool progress_send(communicator *of, call *one, uint64_t arrival_ns) {
  message *const sent = message_at(of, of->rank, one->root, one->sequence);
  if (one->state == CALL_NEW) {
    if (one->sequence >= N_MESSAGES && atomic_load(&sent->taken) < one->sequence - N_MESSAGES + 1) return false;
    sent->arrival_ns = arrival_ns;
    sent->n_bytes = one->count * mock_element_bytes(one->datatype);
    sent->input = place_of(one->is_lost ? NULL : one->from);
    atomic_store(&sent->published, one->sequence + 1);
    one->state = CALL_PUBLISHED;
  }
  if (atomic_load(&sent->taken) < one->sequence + 1) return false;
  one->state = CALL_DONE;
  return true;
}

static bool progress_receive(communicator *of, call *one, uint64_t *start_ns) {
  message *const got = message_at(of, one->root, of->rank, one->sequence);
  if (atomic_load(&got->published) < one->sequence + 1) return false;
  const uint64_t n_bytes = one->count * mock_element_bytes(one->datatype);
  const char *from = one->root == of->rank && got->input.file >= 0 ? window_of(getpid(), got->input.file) : NULL;
  from = from != NULL ? from + got->input.offset : input_of(of, one->root, got->input, NULL);
  if (!one->is_lost) copy(one->to, from, n_bytes < got->n_bytes ? n_bytes : got->n_bytes);
  if (got->arrival_ns > *start_ns) *start_ns = got->arrival_ns;
  atomic_store(&got->taken, one->sequence + 1);
  one->state = CALL_DONE;
  return true;
}

bool mock_progress(communicator *of, call *one, uint64_t arrival_ns, uint64_t setting, uint64_t *start_ns) {
  if (one->state == CALL_DONE) return true;
  if (one->collective == CALL_SEND) return progress_send(of, one, arrival_ns);
  if (one->collective == CALL_RECEIVE) return progress_receive(of, one, start_ns);
  return progress_collective(of, one, arrival_ns, setting, start_ns);
}
