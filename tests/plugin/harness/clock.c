/* The clocks that the plugin reads too: a test may stop them, and then they go on only when it says so. */
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nccl_profiling.h"

static _Atomic bool is_stopped;
static _Atomic uint64_t stopped_at_ns; /* the thread's time stands still with it, and does not go on */

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!is_stopped || clock == CLOCK_REALTIME) return (int)syscall(SYS_clock_gettime, clock, now);
  const uint64_t now_ns = clock == CLOCK_THREAD_CPUTIME_ID ? 0 : stopped_at_ns;
  *now = (struct timespec){.tv_sec = (time_t)(now_ns / 1000000000u), .tv_nsec = (long)(now_ns % 1000000000u)};
  return 0;
}

void stop_clocks(void) {
  struct timespec now;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  stopped_at_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
  is_stopped = true;
}

void pass(uint64_t ns) { stopped_at_ns += ns; }

void let_clocks_go(void) { is_stopped = false; }
