/* A launch of NCCL's in its stream: it begins once all ranks are ready, moves their bytes, and ends after its price. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "nccl/launch.h"

#include "ranks.h"
#include "streams.h"

#define N_PRICES 4096u /* different collectives that a process launches, by far */
#define NO_FUNCTION UINT32_MAX /* messages between two ranks */

typedef struct {
  operation base;
  communicator *of; /* NULL = not known: only its time passes */
  call *calls;
  size_t n_calls;
  kernel launched; /* without steps: there was none */
  uint64_t *durations_ns;
  uint32_t n_works;
  uint64_t setting, start_ns;
} collective_operation;

/* ---- prices ---- */

typedef struct {
  int32_t n_ranks, n_nodes;
  uint32_t function_id;
  int32_t n_channels;
  uint64_t count, element_bytes;
} asked;

static pthread_mutex_t price_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  asked of;
  double us;
} prices[N_PRICES];
static mock_price price;
static double noise;

void mock_cuda_set_prices(mock_price function, double relative_noise, double kernel_us, double flops_per_ns,
                          double host_us) {
  price = function;
  noise = relative_noise;
  mock_flops_per_ns = flops_per_ns;
  mock_kernel_ns = (uint64_t)(kernel_us * 1000.0);
  mock_host_ns = (uint64_t)(host_us * 1000.0);
}

bool mock_is_priced(void) { return price != NULL; }

static uint64_t mixed(uint64_t state) {
  state += UINT64_C(0x9E3779B97F4A7C15);
  state = (state ^ state >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  state = (state ^ state >> 27) * UINT64_C(0x94D049BB133111EB);
  return state ^ state >> 31;
}

/* The function is Python's: it is called once for each price, without any lock that another thread may want. */
static double price_us(const asked *one) {
  uint64_t words[sizeof *one / 8], hash = 0;
  memcpy(words, one, sizeof words);
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) hash = mixed(hash ^ words[i]);
  double us = -1.0;
  size_t at = hash % N_PRICES;
  pthread_mutex_lock(&price_lock);
  for (size_t i = 0; i < N_PRICES && prices[at].of.n_ranks != 0 && us < 0; i++) {
    if (memcmp(&prices[at].of, one, sizeof *one) == 0) us = prices[at].us;
    else at = (at + 1) % N_PRICES;
  }
  pthread_mutex_unlock(&price_lock);
  if (us >= 0) return us;
  us = price(one->n_ranks, one->n_nodes, one->function_id, one->n_channels, one->count, one->element_bytes);
  pthread_mutex_lock(&price_lock);
  for (size_t i = 0; i < N_PRICES; i++, at = (at + 1) % N_PRICES)
    if (prices[at].of.n_ranks == 0) {
      prices[at].of = *one;
      prices[at].us = us;
      break;
    }
  pthread_mutex_unlock(&price_lock);
  return us;
}

/* Alike on all ranks; the sum of four uniform numbers is near enough to a normal one. */
static double disturbance(uint64_t key, uint64_t sequence) {
  double sum = 0;
  for (uint64_t i = 0; i < 4; i++) sum += (double)(mixed(mixed(key ^ i) ^ sequence) >> 11) / 9007199254740992.0;
  const double factor = 1.0 + noise * (sum - 2.0) * 1.7320508;
  return factor > 0.2 ? factor : 0.2;
}

/* ---- the operation ---- */

static bool run(operation *self, uint64_t *ready_ns) {
  collective_operation *const one = (collective_operation *)self;
  const bool gone = one->of != NULL && mock_is_gone(one->of);
  bool done = true;
  for (size_t i = 0; i < one->n_calls && !gone; i++) {
    mock_use_buffers(one->of, &one->calls[i], self->issued_ns, *ready_ns);
    done &= mock_progress(one->of, &one->calls[i], *ready_ns, one->setting, &one->start_ns);
  }
  if (!done) return false;
  if (one->start_ns > *ready_ns) *ready_ns = one->start_ns;
  uint64_t start_ns[one->n_works + 1], end_ns[one->n_works + 1];
  const double factor = one->n_calls > 0 ? disturbance(mock_communicator_key(one->of), one->calls[0].sequence) : 1.0;
  for (uint32_t i = 0; i < one->n_works; i++) {
    start_ns[i] = *ready_ns;
    end_ns[i] = *ready_ns += (uint64_t)((double)one->durations_ns[i] * factor);
  }
  for (size_t i = 0; i < one->n_calls && !gone; i++)
    mock_use_buffers(one->of, &one->calls[i], self->issued_ns, *ready_ns);
  /* An aborted communicator's memory may have gone. */
  if (one->launched.steps != NULL && !gone) mock_kernel_ran(&one->launched, start_ns, end_ns);
  return true;
}

static void issue(operation *self) {
  collective_operation *const one = (collective_operation *)self;
  for (size_t i = 0; i < one->n_calls; i++) mock_number_call(one->of, &one->calls[i]);
}

static void drop(operation *self) {
  collective_operation *const one = (collective_operation *)self;
  for (size_t i = 0; i < one->n_calls; i++) free(one->calls[i].result);
  if (one->of != NULL) mock_let_go(one->of);
  free(one->launched.steps);
  free(one->calls);
  free(one->durations_ns);
}

static operation *copy(const operation *self);
static const operation_kind COLLECTIVE = {run, drop, copy, issue, true};

static void *copy_of(const void *from, size_t n_bytes) {
  void *const made = malloc(n_bytes + 1);
  if (made != NULL && n_bytes > 0) memcpy(made, from, n_bytes);
  return made;
}

static operation *copy(const operation *self) {
  const collective_operation *const from = (const collective_operation *)self;
  collective_operation *const made = copy_of(from, sizeof *from);
  if (made == NULL) return NULL;
  made->calls = copy_of(from->calls, from->n_calls * sizeof *from->calls);
  made->durations_ns = copy_of(from->durations_ns, from->n_works * sizeof *from->durations_ns);
  if (from->launched.steps != NULL)
    made->launched.steps = copy_of(from->launched.steps, from->launched.room * sizeof *from->launched.steps);
  if (made->of != NULL) mock_hold(made->of);
  return &made->base;
}

static cuda_error enqueue(void *stream, collective_operation asked_for) {
  collective_operation *const made = copy_of(&asked_for, sizeof asked_for);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  made->base.kind = &COLLECTIVE;
  if (made->of != NULL) {
    mock_streams_lock();
    mock_hold(made->of);
    mock_streams_unlock();
  }
  return mock_enqueue(stream, &made->base);
}

void mock_move(communicator *of, void *stream, call *calls, size_t n_calls) {
  uint64_t *const none = calloc(1, sizeof *none);
  enqueue(stream, (collective_operation){.of = of, .calls = calls, .n_calls = n_calls, .durations_ns = none});
}

static uint64_t setting_of(const mock_work *works, uint32_t n_works) {
  uint64_t hash = 0;
  for (uint32_t i = 0; i < n_works; i++)
    hash = mixed(mixed(mixed(hash ^ works[i].function_id) ^ works[i].channel_mask) ^ works[i].count);
  return hash;
}

static uint64_t message_bytes(const call *calls, size_t n_calls) {
  uint64_t n_bytes = 0;
  for (size_t i = 0; i < n_calls; i++)
    if (calls[i].collective == CALL_SEND) n_bytes += calls[i].count * mock_element_bytes(calls[i].datatype);
  return n_bytes;
}

cuda_error mock_enqueue_launch(void *stream, const kernel *launched, const mock_work *works) {
  const char *const device = launched->communicator;
  collective_operation made = {.launched = *launched};
  const uint32_t n_collectives = launched->n_works;
  made.n_works = n_collectives > 0 ? n_collectives : 1;
  made.calls = mock_take_calls(device, &made.of, &made.n_calls);
  made.durations_ns = calloc(made.n_works, sizeof *made.durations_ns);
  if (made.durations_ns == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  int n_ranks = 2, n_nodes = 1;
  if (made.of != NULL) mock_size(made.of, &n_ranks, &n_nodes);
  else memcpy(&n_ranks, device + mock_the_layout.n_ranks, sizeof n_ranks);
  for (uint32_t i = 0; i < made.n_works; i++) {
    asked one = {.n_ranks = n_ranks, .n_nodes = n_nodes, .function_id = NO_FUNCTION, .element_bytes = 1,
                 .count = message_bytes(made.calls, made.n_calls)};
    if (n_collectives > 0) {
      one.function_id = works[i].function_id;
      one.n_channels = __builtin_popcountll(works[i].channel_mask);
      one.count = works[i].count;
      for (size_t k = 0; k < made.n_calls; k++)
        if (k == 0 || made.calls[k].count == one.count) one.element_bytes = mock_element_bytes(made.calls[k].datatype);
    }
    made.durations_ns[i] = (uint64_t)(price_us(&one) * 1000.0);
  }
  made.setting = setting_of(works, n_collectives);
  const cuda_error error = enqueue(stream, made);
  mock_keep_within_queue(stream);
  return error;
}
