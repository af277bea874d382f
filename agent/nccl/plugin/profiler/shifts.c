#include "shifts.h"

#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include "events.h"

#define N_ENTRIES 64u         /* further communicators are not checked */
#define DRIFT_SHIFT 10u       /* clocks drift apart by less than 2^-10 while NTP adjusts one */
#define SLACK_NS 100000       /* far above the steps of the GPU's clock */
#define NO_LEAD INT64_MAX
#define RING_WORKS 64u
#define MOMENT_NS 100000 /* NCCL's thread polls more often */
#define MOST_IDLE_MOMENTS 2000 /* without a report; counted, since a busy machine makes each longer */

static struct {
  _Atomic(const void *) communicator; /* NULL = free */
  _Atomic int64_t lead_ns;            /* upper bound of the CPU's clock minus the GPU's */
  _Atomic uint64_t lead_at_ns;        /* CPU time of that bound */
  _Atomic bool is_shifted;
  _Atomic uint64_t n_launched, n_reported; /* channels */
  _Atomic uint64_t n_works;
  _Atomic uint64_t usual_ns; /* duration of a work */
  _Atomic bool is_behind;    /* NCCL's thread is late */
} entries[N_ENTRIES];

static _Atomic bool is_silent; /* waiting for a communicator was in vain, and NCCL has reported nothing since */

#define READ(word) atomic_load_explicit(&(word), memory_order_relaxed)
#define WRITE(word, value) atomic_store_explicit(&(word), (value), memory_order_relaxed)

static int entry_of(const void *communicator) {
  for (uint32_t i = 0; i < N_ENTRIES; i++)
    if (READ(entries[i].communicator) == communicator) return (int)i;
  return -1;
}

static void forget_history(int i) {
  WRITE(entries[i].lead_ns, NO_LEAD);
  WRITE(entries[i].is_shifted, false);
  WRITE(entries[i].n_launched, 0);
  WRITE(entries[i].n_reported, 0);
  WRITE(entries[i].n_works, 0);
  WRITE(entries[i].usual_ns, 0);
  WRITE(entries[i].is_behind, false);
}

void zt_shifts_add(const void *communicator) {
  for (uint32_t i = 0; i < N_ENTRIES; i++) {
    const void *nobody = NULL;
    if (!atomic_compare_exchange_strong(&entries[i].communicator, &nobody, communicator)) continue;
    forget_history((int)i);
    return;
  }
}

void zt_shifts_remove(const void *communicator) {
  const int i = entry_of(communicator);
  if (i >= 0) WRITE(entries[i].communicator, NULL);
}

static int64_t lead_at(int i, uint64_t cpu_ns) {
  const int64_t lead_ns = READ(entries[i].lead_ns);
  return lead_ns == NO_LEAD ? NO_LEAD : lead_ns + (int64_t)((cpu_ns - READ(entries[i].lead_at_ns)) >> DRIFT_SHIFT);
}

void zt_shifts_reported(const void *communicator, uint64_t gpu_ns) {
  const int i = entry_of(communicator);
  if (READ(is_silent)) WRITE(is_silent, false);
  if (i < 0) return;
  atomic_fetch_add_explicit(&entries[i].n_reported, 1, memory_order_relaxed);
  if (gpu_ns == 0) return;
  const uint64_t cpu_ns = zt_cpu_ns();
  const int64_t known_ns = lead_at(i, cpu_ns), new_lead_ns = (int64_t)(cpu_ns - gpu_ns);
  WRITE(entries[i].lead_ns, new_lead_ns < known_ns ? new_lead_ns : known_ns);
  WRITE(entries[i].lead_at_ns, cpu_ns);
}

void zt_shifts_launched(const void *communicator, uint32_t n_channels) {
  const int i = entry_of(communicator);
  if (i >= 0) atomic_fetch_add_explicit(&entries[i].n_launched, n_channels, memory_order_relaxed);
}

uint64_t zt_shifts_enqueued(const void *communicator) {
  const int i = entry_of(communicator);
  return i < 0 ? 0 : atomic_fetch_add_explicit(&entries[i].n_works, 1, memory_order_relaxed) + 1;
}

void zt_shifts_add_duration(const void *communicator, uint64_t duration_ns) {
  const int i = entry_of(communicator);
  if (i < 0) return;
  const uint64_t usual_ns = READ(entries[i].usual_ns);
  WRITE(entries[i].usual_ns, usual_ns == 0 ? duration_ns : usual_ns - usual_ns / RING_WORKS + duration_ns / RING_WORKS);
}

/* Time that the calling thread, which polls for works all the time, did not run since its last call. */
static uint64_t off_cpu_ns(void) {
  static _Thread_local uint64_t asked_ns, ran_ns;
  struct timespec ran;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ran);
  const uint64_t now_ns = zt_cpu_ns(), now_ran_ns = (uint64_t)ran.tv_sec * 1000000000u + (uint64_t)ran.tv_nsec;
  const uint64_t passed_ns = now_ns - asked_ns, its_ns = now_ran_ns - ran_ns;
  asked_ns = now_ns;
  ran_ns = now_ran_ns;
  return passed_ns > its_ns ? passed_ns - its_ns : 0;
}

/* How much later than at best NCCL reports a start at `gpu_ns` now. */
static uint64_t lag_ns(int i, uint64_t gpu_ns) {
  const uint64_t now_ns = zt_cpu_ns();
  const int64_t new_lead_ns = (int64_t)(now_ns - gpu_ns), known_ns = lead_at(i, now_ns);
  if (new_lead_ns < known_ns) {
    WRITE(entries[i].lead_ns, new_lead_ns);
    WRITE(entries[i].lead_at_ns, now_ns);
    return 0;
  }
  return (uint64_t)(new_lead_ns - known_ns);
}

void zt_shifts_started(const void *communicator, uint64_t number, uint64_t gpu_ns) {
  const uint64_t missed_ns = off_cpu_ns();
  const int i = entry_of(communicator);
  if (i < 0) return;
  const uint64_t lagging_ns = lag_ns(i, gpu_ns), works_ns = RING_WORKS / 4 * READ(entries[i].usual_ns);
  const uint64_t limit_ns = works_ns > SLACK_NS ? works_ns : SLACK_NS;
  const bool is_its_own = READ(entries[i].n_works) - number < RING_WORKS;
  if (is_its_own || lagging_ns > limit_ns || missed_ns > limit_ns)
    WRITE(entries[i].is_behind, lagging_ns > limit_ns || (!is_its_own && missed_ns > limit_ns));
}

bool zt_shifts_are_late(const void *communicator, uint64_t number) {
  const int i = entry_of(communicator);
  return i >= 0 && READ(entries[i].n_works) - number >= RING_WORKS && READ(entries[i].is_behind);
}

void zt_shifts_wait(const void *communicator) {
  const int i = entry_of(communicator);
  const struct timespec moment = {0, MOMENT_NS};
  uint64_t n_known = 0;
  for (int n_idle = 0; i >= 0 && !READ(is_silent); n_idle++) {
    const uint64_t n_reported = READ(entries[i].n_reported);
    if (n_reported >= READ(entries[i].n_launched)) return;
    if (n_reported != n_known) n_idle = 0;
    n_known = n_reported;
    if (n_idle == MOST_IDLE_MOMENTS) WRITE(is_silent, true);
    nanosleep(&moment, NULL);
  }
}

bool zt_shifts_is_foreign(const void *communicator, uint64_t start_ns, uint64_t called_us) {
  const int i = entry_of(communicator);
  if (i < 0) return false;
  const int64_t lead_ns = lead_at(i, zt_cpu_ns());
  if (called_us != 0 && lead_ns != NO_LEAD) {
    const uint64_t at_latest_ns = start_ns + (uint64_t)lead_ns + SLACK_NS;
    if ((int64_t)(at_latest_ns - called_us * 1000u) < 0) WRITE(entries[i].is_shifted, true);
  }
  return READ(entries[i].is_shifted);
}

void zt_shifts_reset(void) {
  WRITE(is_silent, false);
  for (int i = 0; i < (int)N_ENTRIES; i++) forget_history(i);
}
