#include "schedule.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "../next/loading.h"
#include "../tuner/communicator.h"

#define NO_PROMISE UINT64_MAX
#define WAIT_TIMED_OUT (UINT64_MAX - 1)

typedef struct {
  uint64_t from_call;
  zt_plan_table *table; /* NULL = the plan of the whole process */
  zt_cycle *cycle;      /* NULL = none */
} stage;

struct zt_schedule {
  zt_schedule *next_retired;
  uint64_t retired_at; /* number of calls that had begun */
  uint32_t n_stages;
  stage stages[]; /* by from_call; calls before the first stage run under the plan of the whole process */
};

static zt_plan_table *prepared[ZT_MAX_STAGES]; /* under the registry's lock */
static uint32_t n_prepared;

static pthread_mutex_t outcome_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t outcome_is_known = PTHREAD_COND_INITIALIZER;
static _Atomic uint32_t n_waiting;
static _Atomic uint64_t n_waits, longest_wait_ns, patience_ns = UINT64_C(1260000000000);

/* ---- the thread that calls the communicator ---- */

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static bool must_wait(zt_agreed *agreed, uint64_t call) { return call >= atomic_load(&agreed->promise); }

static void wait_until(zt_agreed *agreed, uint64_t call, uint64_t until_ns) {
  pthread_mutex_lock(&outcome_lock);
  atomic_fetch_add(&n_waiting, 1);
  while (must_wait(agreed, call) && now_ns() < until_ns) {
    struct timespec soon; /* waits in slices, since this clock may jump */
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_sec += 1;
    pthread_cond_timedwait(&outcome_is_known, &outcome_lock, &soon);
  }
  if (must_wait(agreed, call)) atomic_store(&agreed->promise, WAIT_TIMED_OUT);
  atomic_fetch_sub(&n_waiting, 1);
  pthread_mutex_unlock(&outcome_lock);
}

__attribute__((noinline)) static void await_outcome(zt_agreed *agreed, uint64_t call) {
  const uint64_t began_ns = now_ns();
  int (*holds_gil)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
  void *(*release_gil)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  void (*restore_gil)(void *) = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
  const bool releases = holds_gil != NULL && release_gil != NULL && restore_gil != NULL && holds_gil();
  void *state = releases ? release_gil() : NULL;
  wait_until(agreed, call, began_ns + atomic_load(&patience_ns));
  if (releases) restore_gil(state);
  const uint64_t waited_ns = now_ns() - began_ns;
  atomic_fetch_add(&n_waits, 1);
  uint64_t longest = atomic_load(&longest_wait_ns);
  while (longest < waited_ns && !atomic_compare_exchange_weak(&longest_wait_ns, &longest, waited_ns)) continue;
}

static const stage *stage_at(const zt_schedule *schedule, uint64_t call) {
  const stage *found = NULL;
  for (uint32_t i = 0; i < schedule->n_stages && schedule->stages[i].from_call <= call; i++)
    found = &schedule->stages[i];
  return found;
}

zt_call_plan zt_call_begin(zt_agreed *agreed, uint32_t collective, uint64_t message_bytes) {
  const uint64_t call = zt_history_add(&agreed->history, collective, message_bytes);
  if (__builtin_expect(must_wait(agreed, call), 0)) await_outcome(agreed, call);
  /* Sequentially consistent with the call's number, by which old schedules are freed. */
  const zt_schedule *schedule = atomic_load(&agreed->schedule);
  const stage *in_force = schedule == NULL ? NULL : stage_at(schedule, call);
  if (in_force == NULL) return (zt_call_plan){NULL, ZT_NO_PHASE, false};
  const uint32_t phase = zt_cycle_follow(&agreed->place, in_force->cycle, collective, message_bytes);
  const bool is_off = in_force->cycle != NULL && phase == ZT_NO_PHASE;
  const uint32_t n_off = is_off ? atomic_load_explicit(&agreed->n_off_cycle, memory_order_relaxed) + 1 : 0;
  atomic_store_explicit(&agreed->n_off_cycle, n_off, memory_order_relaxed);
  return (zt_call_plan){in_force->table, phase, is_off};
}

void zt_call_end(zt_agreed *agreed) {
  atomic_store_explicit(&agreed->n_decided, atomic_load_explicit(&agreed->history.n_calls, memory_order_relaxed),
                        memory_order_release);
}

/* ---- the agreement's thread, under the registry's lock ---- */

static void free_schedule(zt_schedule *schedule) {
  for (uint32_t i = 0; i < schedule->n_stages; i++) {
    if (schedule->stages[i].table != NULL) zt_plan_table_release(schedule->stages[i].table);
    zt_cycle_release(schedule->stages[i].cycle);
  }
  free(schedule);
}

static void free_retired(zt_agreed *agreed) {
  const uint64_t n_decided = atomic_load_explicit(&agreed->n_decided, memory_order_acquire);
  for (zt_schedule **link = &agreed->retired; *link != NULL;) {
    zt_schedule *old = *link;
    if (n_decided < old->retired_at) {
      link = &old->next_retired;
      continue;
    }
    *link = old->next_retired;
    free_schedule(old);
  }
}

static void retire(zt_agreed *agreed, zt_schedule *old) {
  if (old == NULL) return;
  old->retired_at = atomic_load(&agreed->history.n_calls);
  old->next_retired = agreed->retired;
  agreed->retired = old;
}

/* Put `schedule`, unless NULL, in force, and let calls pass. Returns false if a call has given up waiting. */
static bool publish(zt_agreed *agreed, zt_schedule *schedule) {
  zt_schedule *old = NULL;
  pthread_mutex_lock(&outcome_lock);
  const bool in_time = atomic_load(&agreed->promise) < WAIT_TIMED_OUT;
  if (in_time && schedule != NULL) old = atomic_exchange(&agreed->schedule, schedule);
  if (in_time) atomic_store(&agreed->promise, NO_PROMISE);
  pthread_cond_broadcast(&outcome_is_known);
  pthread_mutex_unlock(&outcome_lock);
  retire(agreed, old);
  return in_time;
}

void zt_agreed_end(zt_agreed *agreed) {
  const struct timespec pause = {.tv_nsec = 100000};
  atomic_store(&agreed->is_over, true);
  (void)publish(agreed, NULL);
  for (int i = 0; i < 1000; i++) {
    if (atomic_load(&agreed->n_decided) >= atomic_load(&agreed->history.n_calls)) return;
    nanosleep(&pause, NULL);
  }
}

static zt_cycle *cycle_after(const zt_schedule *schedule, const zt_cycle_call *calls, uint32_t n_calls) {
  if (n_calls == 0) return NULL;
  zt_cycle *before = schedule->n_stages > 0 ? schedule->stages[schedule->n_stages - 1].cycle : NULL;
  if (!zt_cycle_equals(before, calls, n_calls)) return zt_cycle_new(calls, n_calls);
  before->n_references++;
  return before;
}

static int commit(zt_agreed *agreed, const uint64_t *from_calls, uint32_t n_from, const zt_cycle_call *cycle,
                  uint32_t n_cycle) {
  if (n_from != n_prepared && n_from != 0) return -1;
  const uint64_t promise = atomic_load(&agreed->promise);
  if (promise < WAIT_TIMED_OUT && from_calls[0] < promise) return -1;
  const zt_schedule *old = atomic_load(&agreed->schedule);
  const uint32_t n_old = old == NULL ? 0 : old->n_stages;
  zt_schedule *new = calloc(1, sizeof *new + (n_old + n_from + 1) * sizeof(stage));
  if (new == NULL) return -2;
  const uint64_t n_calls = atomic_load(&agreed->history.n_calls);
  for (uint32_t i = 0; i < n_old && old->stages[i].from_call < from_calls[0]; i++) {
    const bool is_over = i + 1 < n_old && old->stages[i + 1].from_call <= n_calls &&
                         old->stages[i + 1].from_call < from_calls[0];
    if (is_over) continue;
    new->stages[new->n_stages++] = old->stages[i];
    if (old->stages[i].table != NULL) (void)zt_plan_table_retain(old->stages[i].table);
    if (old->stages[i].cycle != NULL) old->stages[i].cycle->n_references++;
  }
  if (n_from == 0) new->stages[new->n_stages++] = (stage){.from_call = from_calls[0]};
  for (uint32_t i = 0; i < n_from; i++) {
    zt_cycle *its_cycle = cycle_after(new, cycle, n_cycle);
    if (n_cycle > 0 && its_cycle == NULL) {
      free_schedule(new);
      return -2;
    }
    new->stages[new->n_stages++] = (stage){from_calls[i], zt_plan_table_retain(prepared[i]), its_cycle};
  }
  if (publish(agreed, new)) return 0;
  free_schedule(new);
  return -3;
}

void zt_agreed_init(zt_agreed *agreed) { atomic_store(&agreed->promise, NO_PROMISE); }

void zt_agreed_free(zt_agreed *agreed) {
  retire(agreed, atomic_exchange(&agreed->schedule, NULL));
  atomic_store(&agreed->n_decided, UINT64_MAX);
  free_retired(agreed);
}

void zt_prepared_forget(void) {
  while (n_prepared > 0) zt_plan_table_release(prepared[--n_prepared]);
}

int zerotune_prepare(const zt_plan_row *rows, uint32_t n_rows, uint32_t epoch, uint32_t gathers_after_step) {
  zt_registry_lock();
  int fault = n_prepared < ZT_MAX_STAGES ? 0 : -5;
  if (fault == 0) prepared[n_prepared] = zt_plan_table_new(rows, n_rows, epoch, gathers_after_step, &fault);
  if (fault == 0) n_prepared++;
  zt_registry_unlock();
  return fault;
}

void zerotune_prepare_end(void) {
  zt_registry_lock();
  zt_prepared_forget();
  zt_registry_unlock();
}

uint64_t zerotune_promise(uint64_t owner, uint64_t lead_calls) {
  uint64_t promise = 0;
  zt_registry_lock();
  zt_communicator *communicator = zt_find_owner(owner);
  if (communicator != NULL && atomic_load(&communicator->agreed.promise) == NO_PROMISE) {
    zt_agreed *agreed = &communicator->agreed;
    free_retired(agreed);
    const uint64_t wanted = atomic_load(&agreed->history.n_calls) + 1 + lead_calls;
    atomic_store(&agreed->promise, wanted);
    if (atomic_load(&agreed->history.n_calls) < wanted)
      promise = wanted;
    else
      (void)publish(agreed, NULL); /* a call has passed it meanwhile */
  }
  zt_registry_unlock();
  return promise;
}

int zerotune_commit(uint64_t owner, const uint64_t *from_calls, uint32_t n_stages, const zt_cycle_call *cycle,
                    uint32_t n_cycle) {
  zt_registry_lock();
  zt_communicator *communicator = zt_find_owner(owner);
  const int fault = communicator == NULL ? 0 /* it has no more calls */
                                         : commit(&communicator->agreed, from_calls, n_stages, cycle, n_cycle);
  zt_registry_unlock();
  return fault;
}

void zerotune_release(uint64_t owner) {
  zt_registry_lock();
  zt_communicator *communicator = zt_find_owner(owner);
  if (communicator != NULL && !atomic_load(&communicator->agreed.is_over)) (void)publish(&communicator->agreed, NULL);
  zt_registry_unlock();
}

void zerotune_set_patience(double seconds) { atomic_store(&patience_ns, (uint64_t)(seconds * 1e9)); }

void zerotune_waits(zt_waits *out) {
  *out = (zt_waits){atomic_load(&n_waits), atomic_load(&longest_wait_ns), atomic_load(&n_waiting)};
}
