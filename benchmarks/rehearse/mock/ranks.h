/* Ranks of one communicator, and the bytes that go between them. */
#ifndef ZEROTUNE_MOCK_RANKS_H
#define ZEROTUNE_MOCK_RANKS_H

#include "mock_cuda.h"

enum { CALL_ALL_GATHER, CALL_REDUCE_SCATTER, CALL_ALL_REDUCE, CALL_BROADCAST, CALL_REDUCE, CALL_SEND, CALL_RECEIVE };

typedef struct communicator communicator;

/* One call of NCCL's API, and its progress. */
typedef struct {
  int collective;
  const void *from;
  void *to;
  uint64_t count;
  int datatype, operation;
  int root; /* or the peer of a message */
  enum { CALL_NEW, CALL_PUBLISHED, CALL_READ, CALL_DONE } state;
  uint64_t sequence; /* within the communicator, or between the two peers */
  void *result;      /* of a reduction whose inputs others may still read */
  bool is_lost;      /* its memory was freed: nothing is read nor written */
} call;

/* Meet the others; every rank calls it with the same key. NULL = no memory. */
communicator *mock_join(void *host, uint64_t key, int rank, int n_ranks);
communicator *mock_communicator(const void *host); /* NULL = not known */
uint64_t mock_communicator_key(const communicator *one);
int mock_rank(const communicator *one);
int mock_n_ranks(const communicator *one);
uint64_t mock_count_split(communicator *one); /* alike on all ranks, as they split together */
/* The communicator, among those known, whose kernels are given this device struct. */
communicator *mock_communicator_on_device(const char *device);
void mock_leave(communicator *one, bool aborted);
void mock_size(communicator *one, int *n_ranks, int *n_nodes); /* waits until all ranks have joined */

/* The following: with the lock of the streams held. */
void mock_number_call(communicator *of, call *one); /* in the order of the program */
/* Go on with a call as far as it gets; true = done. `arrival_ns` is when this rank is ready, `start_ns` the latest time
 * at which any rank was. `setting` must be the same on all ranks. */
bool mock_progress(communicator *of, call *one, uint64_t arrival_ns, uint64_t setting, uint64_t *start_ns);
/* Its buffers are used until a time of the GPU; a call whose buffers are freed by then is lost. */
void mock_use_buffers(const communicator *of, call *one, uint64_t issued_ns, uint64_t until_ns);
bool mock_is_gone(const communicator *one);
void mock_hold(communicator *one);    /* one more who refers to it */
void mock_let_go(communicator *one);  /* one fewer; the last frees it */

size_t mock_element_bytes(int datatype);
/* into[i] = operation over ranks of from[rank][i], in their order; `average` divides by their number. */
void mock_reduce(void *into, const void *const *from, int n_ranks, uint64_t count, int datatype, int operation);

/* ---- collectives.c ---- */

void mock_move(communicator *of, void *stream, call *calls, size_t n_calls); /* takes the calls, made with malloc() */

/* ---- calls.c ---- */

/* The oldest group of calls that waits for a launch of this communicator's; a copy to free(), or NULL. */
call *mock_take_calls(const char *device, communicator **of, size_t *n_calls);

#endif
