#include "streams.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__GLIBC__)
/* Newer glibc has both names; a wheel is for 2.17 and newer. */
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_detach,pthread_detach@GLIBC_2.2.5");
#endif

#define UNUSED __attribute__((unused))
#define N_AHEAD 1024u /* kernels that a stream takes before the host has to wait, as on a real GPU */
#define MOMENT_NS 100000 /* between looks of a thread of the program that waits */
#define SELDOM_NS 400000 /* of the worker: late work gets correct times all the same */
#define N_DEFAULTS MOCK_MAX_DEVICES
#define NON_BLOCKING 1u /* cudaStreamNonBlocking */

struct stream {
  operation *first, *last;
  uint64_t ready_ns; /* when all that was carried out ends */
  uint64_t ends_ns[N_AHEAD];  /* of the kernels carried out last */
  uint64_t n_kernels, n_ended; /* that the program launched, and that were carried out */
  uint64_t id;
  int priority, device;
  unsigned flags;
  bool is_legacy; /* the default stream, which orders those that do not say that they are apart */
  bool is_gone;   /* destroyed: its operations are carried out all the same */
  bool running; /* its first operation is a host function that runs */
  capture *captures;
  stream *next; /* of all streams */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t something_to_do = PTHREAD_COND_INITIALIZER;
static stream defaults[N_DEFAULTS];
static stream *streams;
static uint64_t n_streams, n_issued;
static uint32_t n_ahead = N_AHEAD;
static uint32_t n_waiting; /* streams with operations that could not be carried out yet */
static pid_t worker_of;
uint64_t mock_kernel_ns, mock_host_ns;

void mock_streams_lock(void) { pthread_mutex_lock(&lock); }
void mock_streams_unlock(void) { pthread_mutex_unlock(&lock); }

void mock_sleep_until(uint64_t time_ns) {
  if (time_ns <= mock_now_ns()) return;
  const struct timespec until = {(time_t)(time_ns / 1000000000u), (long)(time_ns % 1000000000u)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0) continue;
}

static void sleep_for(long n_ns) {
  const struct timespec pause = {0, n_ns};
  nanosleep(&pause, NULL);
}

void mock_sleep_a_moment(void) { sleep_for(MOMENT_NS); }

static stream *stream_of(void *handle) {
  if ((uintptr_t)handle > MOCK_THREAD_STREAM) return handle;
  stream *const one = &defaults[mock_current_device() % N_DEFAULTS];
  if (one->id == 0) {
    one->id = ++n_streams;
    one->device = mock_current_device();
    one->is_legacy = true;
    one->next = streams;
    streams = one;
  }
  return one;
}

/* ---- carrying out ---- */

static void remove_first(stream *one) {
  operation *const gone = one->first;
  one->first = gone->next;
  if (one->first == NULL) {
    one->last = NULL;
    n_waiting--;
  }
  if (gone->kind->drop != NULL) gone->kind->drop(gone);
  free(gone);
}

/* An operation of the legacy default stream begins when all that other streams of the device were given before is over, and
 * theirs when it is; streams that were made as non-blocking are apart. */
static bool is_its_turn(const stream *one, const operation *next, uint64_t *ready_ns) {
  if (one->flags & NON_BLOCKING) return true;
  for (const stream *other = streams; other != NULL; other = other->next) {
    if (other->is_legacy == one->is_legacy || other->flags & NON_BLOCKING || other->device != one->device) continue;
    if (other->first != NULL && other->first->number < next->number) return false;
    if (other->ready_ns > *ready_ns) *ready_ns = other->ready_ns;
  }
  return true;
}

static bool run_one(stream *one, operation *next) {
  uint64_t ready_ns = one->ready_ns > next->issued_ns ? one->ready_ns : next->issued_ns;
  if (!is_its_turn(one, next, &ready_ns)) return false;
  if (!next->kind->run(next, &ready_ns)) return false;
  one->ready_ns = ready_ns;
  if (next->kind->is_kernel) one->ends_ns[one->n_ended++ % N_AHEAD] = ready_ns;
  return true;
}

void mock_streams_advance(void) {
  for (bool any = n_waiting > 0; any;) {
    any = false;
    for (stream *one = streams; one != NULL && n_waiting > 0; one = one->next)
      while (one->first != NULL && !one->running && run_one(one, one->first)) {
        remove_first(one);
        any = true;
      }
  }
}

/* ---- host functions ---- */

typedef struct {
  operation base;
  void (*function)(void *);
  void *argument;
} host_operation;

/* Functions of the program run without the lock: run() leaves them to call_host_functions(), where mock_enqueue() cannot
 * call them at once. */
static bool run_host(UNUSED operation *self, UNUSED uint64_t *ready_ns) { return false; }

static operation *copy_host(const operation *self) {
  host_operation *const made = malloc(sizeof *made);
  if (made != NULL) memcpy(made, self, sizeof *made);
  return made != NULL ? &made->base : NULL;
}

static const operation_kind HOST = {run_host, NULL, copy_host, NULL, false};

/* Its first operation, one of these, if it is its turn; without the lock meanwhile. It is over when it has returned. */
static bool call_first(stream *one) {
  const host_operation called = *(host_operation *)one->first;
  uint64_t ready_ns = one->ready_ns > called.base.issued_ns ? one->ready_ns : called.base.issued_ns;
  if (!is_its_turn(one, one->first, &ready_ns)) return false;
  one->running = true;
  pthread_mutex_unlock(&lock);
  const uint64_t begin_ns = mock_now_ns();
  called.function(called.argument);
  const uint64_t end_ns = mock_now_ns();
  pthread_mutex_lock(&lock);
  one->running = false;
  ready_ns += mock_host_ns + end_ns - begin_ns;
  one->ready_ns = ready_ns > end_ns ? ready_ns : end_ns;
  remove_first(one);
  mock_streams_advance();
  return true;
}

static void call_host_functions(void) {
  for (stream *one = streams; one != NULL; one = one->next)
    while (one->first != NULL && !one->running && one->first->kind == &HOST && call_first(one)) continue;
}

/* Destroyed streams whose work is over; nobody may be walking along the streams, but for functions that run. */
static void free_gone(void) {
  for (stream **at = &streams; *at != NULL;) {
    stream *const one = *at;
    if (one->is_gone && one->first == NULL && one->ready_ns <= mock_now_ns()) {
      *at = one->next;
      free(one);
    } else {
      at = &one->next;
    }
  }
}

/* Carries out operations that wait for other processes, when no thread of the program does. */
static void *work(void *nothing) {
  pthread_mutex_lock(&lock);
  for (;;) {
    while (n_waiting == 0) pthread_cond_wait(&something_to_do, &lock);
    mock_streams_advance();
    call_host_functions();
    free_gone();
    pthread_mutex_unlock(&lock);
    sleep_for(SELDOM_NS);
    pthread_mutex_lock(&lock);
  }
  return nothing;
}

static void wake_worker(void) {
  if (worker_of != getpid()) {
    pthread_t thread;
    worker_of = getpid();
    if (pthread_create(&thread, NULL, work, NULL) == 0) pthread_detach(thread);
  }
  pthread_cond_signal(&something_to_do);
}

cuda_error mock_enqueue(void *handle, operation *one) {
  if (one == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  stream *const to = stream_of(handle);
  one->issued_ns = mock_now_ns();
  one->number = ++n_issued;
  one->next = NULL;
  if (to->captures != NULL) {
    mock_capture_add(to->captures, one);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
  }
  if (one->kind->is_kernel) to->n_kernels++;
  if (one->kind == &HOST && to->first == NULL) { /* at once, if it can be: its end is reckoned */
    to->first = to->last = one;
    n_waiting++;
    if (!call_first(to)) wake_worker();
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
  }
  if (one->kind->issue != NULL) one->kind->issue(one);
  if (to->first == NULL && run_one(to, one)) {
    if (one->kind->drop != NULL) one->kind->drop(one);
    free(one);
    mock_streams_advance();
  } else {
    if (to->first == NULL) n_waiting++;
    if (to->last != NULL) to->last->next = one;
    else to->first = one;
    to->last = one;
    mock_streams_advance();
    wake_worker();
  }
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

/* ---- kernels ---- */

typedef struct {
  operation base;
  uint64_t duration_ns;
  mock_uses uses;
} kernel_operation;

static bool run_kernel(operation *self, uint64_t *ready_ns) {
  const kernel_operation *const kernel = (kernel_operation *)self;
  *ready_ns += kernel->duration_ns;
  for (size_t i = 0; i < MOCK_MAX_USES; i++)
    if (kernel->uses.at[i] != NULL) (void)mock_use(kernel->uses.by, kernel->uses.at[i], 1, self->issued_ns, *ready_ns);
  return true;
}

static operation *copy_kernel(const operation *self) {
  kernel_operation *const made = malloc(sizeof *made);
  if (made != NULL) memcpy(made, self, sizeof *made);
  return made != NULL ? &made->base : NULL;
}

static const operation_kind KERNEL = {run_kernel, NULL, copy_kernel, NULL, true};

void mock_cuda_set_queue(uint32_t n_kernels) {
  pthread_mutex_lock(&lock);
  n_ahead = n_kernels < N_AHEAD ? n_kernels : N_AHEAD;
  pthread_mutex_unlock(&lock);
}

/* For the kernel that was launched n_ahead before. */
void mock_keep_within_queue(void *handle) {
  pthread_mutex_lock(&lock);
  stream *const one = stream_of(handle);
  uint64_t end_ns = 0;
  if (one->captures == NULL && one->n_kernels > n_ahead) {
    const uint64_t n_over = one->n_kernels - n_ahead;
    while (one->n_ended < n_over) {
      pthread_mutex_unlock(&lock);
      mock_sleep_a_moment();
      pthread_mutex_lock(&lock);
      mock_streams_advance();
    }
    if (one->n_ended - n_over < N_AHEAD) end_ns = one->ends_ns[(n_over - 1) % N_AHEAD];
  }
  pthread_mutex_unlock(&lock);
  mock_sleep_until(end_ns);
}

cuda_error mock_enqueue_kernel(void *handle, uint64_t duration_ns, const mock_uses *uses) {
  kernel_operation *const made = malloc(sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = (kernel_operation){.base.kind = &KERNEL, .duration_ns = duration_ns};
  if (uses != NULL) made->uses = *uses;
  const cuda_error error = mock_enqueue(handle, &made->base);
  mock_keep_within_queue(handle);
  return error;
}

/* ---- streams ---- */

static cuda_error cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
  stream *const made = calloc(1, sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  made->priority = priority;
  made->flags = flags;
  made->device = mock_current_device();
  pthread_mutex_lock(&lock);
  made->id = ++n_streams;
  made->next = streams;
  streams = made;
  pthread_mutex_unlock(&lock);
  *out = made;
  return CUDA_SUCCESS;
}

static cuda_error cudaStreamCreateWithFlags(void **out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}

static cuda_error cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }

/* At once; its operations go on. */
static cuda_error cudaStreamDestroy(void *handle) {
  if ((uintptr_t)handle <= MOCK_THREAD_STREAM) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  ((stream *)handle)->is_gone = true;
  free_gone();
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

static cuda_error cudaStreamGetId(void *handle, unsigned long long *id) {
  pthread_mutex_lock(&lock);
  *id = stream_of(handle)->id;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

static cuda_error cudaStreamGetPriority(void *handle, int *priority) {
  pthread_mutex_lock(&lock);
  *priority = stream_of(handle)->priority;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

static cuda_error cudaStreamGetFlags(void *handle, unsigned *flags) {
  pthread_mutex_lock(&lock);
  *flags = stream_of(handle)->flags;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

static cuda_error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

cuda_error mock_state(bool carried_out, uint64_t end_ns) {
  return carried_out && end_ns <= mock_now_ns() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static cuda_error cudaStreamQuery(void *handle) {
  pthread_mutex_lock(&lock);
  mock_streams_advance();
  const stream *const one = stream_of(handle);
  const cuda_error state = mock_state(one->first == NULL, one->ready_ns);
  pthread_mutex_unlock(&lock);
  return state;
}

void mock_wait_for_stream(void *handle, bool all, bool ended) {
  pthread_mutex_lock(&lock);
  uint64_t end_ns = 0;
  for (;;) {
    mock_streams_advance();
    const stream *const asked = all ? NULL : stream_of(handle);
    if (all ? n_waiting == 0 : asked->first == NULL) {
      for (const stream *one = streams; one != NULL; one = one->next)
        if ((all || one == asked) && one->ready_ns > end_ns) end_ns = one->ready_ns;
      break;
    }
    pthread_mutex_unlock(&lock);
    mock_sleep_a_moment();
    pthread_mutex_lock(&lock);
  }
  pthread_mutex_unlock(&lock);
  if (ended) mock_sleep_until(end_ns);
}

static cuda_error cudaStreamSynchronize(void *handle) {
  mock_wait_for_stream(handle, false, true);
  return CUDA_SUCCESS;
}

static cuda_error cudaDeviceSynchronize(void) {
  mock_wait_for_stream(NULL, true, true);
  return CUDA_SUCCESS;
}

static cuda_error cudaLaunchHostFunc(void *handle, void (*function)(void *), void *argument) {
  host_operation *const made = malloc(sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = (host_operation){.base.kind = &HOST, .function = function, .argument = argument};
  return mock_enqueue(handle, &made->base);
}

typedef struct {
  void *stream;
  void (*function)(void *, cuda_error, void *);
  void *argument;
} callback;

static void call_back(void *argument) {
  const callback called = *(callback *)argument;
  free(argument);
  called.function(called.stream, CUDA_SUCCESS, called.argument);
}

static cuda_error cudaStreamAddCallback(void *handle, void (*function)(void *, cuda_error, void *), void *argument,
                                        UNUSED unsigned flags) {
  callback *const made = malloc(sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = (callback){handle, function, argument};
  return cudaLaunchHostFunc(handle, call_back, made);
}

/* ---- captures ---- */

bool mock_is_capturing(void *handle) {
  pthread_mutex_lock(&lock);
  const bool captures = stream_of(handle)->captures != NULL;
  pthread_mutex_unlock(&lock);
  return captures;
}

capture *mock_stream_capture(void *handle) { return stream_of(handle)->captures; }

void mock_stream_set_capture(void *handle, capture *now) { stream_of(handle)->captures = now; }

void mock_capture_ended(capture *gone) {
  for (stream *one = streams; one != NULL; one = one->next)
    if (one->captures == gone) one->captures = NULL;
  mock_events_forget(gone);
}

static const mock_function functions[] = {
    MOCK_FUNCTION(cudaStreamCreate),
    MOCK_FUNCTION(cudaStreamCreateWithFlags),
    MOCK_FUNCTION(cudaStreamCreateWithPriority),
    MOCK_FUNCTION(cudaStreamDestroy),
    MOCK_FUNCTION(cudaStreamGetId),
    MOCK_FUNCTION(cudaStreamGetPriority),
    MOCK_FUNCTION(cudaStreamGetFlags),
    MOCK_FUNCTION(cudaDeviceGetStreamPriorityRange),
    MOCK_FUNCTION(cudaStreamQuery),
    MOCK_FUNCTION(cudaStreamSynchronize),
    MOCK_FUNCTION(cudaDeviceSynchronize),
    MOCK_FUNCTION(cudaLaunchHostFunc),
    MOCK_FUNCTION(cudaStreamAddCallback),
};

void *mock_timed_stream_function(const char *name) {
  return MOCK_FIND(functions, name);
}
