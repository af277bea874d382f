/* Calls an all-gather of NCCL many times: Python's own cost per call would hide the result. */
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#define BURST 16           /* calls that a step may have in flight */
#define PAUSE_NS 2000000   /* NCCL's threads finish a burst meanwhile */

typedef int (*all_gather)(const void *send, void *receive, size_t count, int datatype, void *communicator, void *stream);

static double now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static int compare(const void *first, const void *second) {
  const double a = *(const double *)first, b = *(const double *)second;
  return a < b ? -1 : a > b;
}

/* Nanoseconds per call, median over bursts; negative: NCCL's error. */
double loop(all_gather call, void *communicator, size_t count, int n_bursts) {
  double *const each = malloc((size_t)n_bursts * sizeof *each);
  if (each == NULL) return -1;
  double result = 0;
  for (int burst = 0; burst < n_bursts && result == 0; burst++) {
    const double began_ns = now_ns();
    for (int i = 0; i < BURST; i++) {
      const int error = call((void *)0x10000000, (void *)0x20000000, count, 0, communicator, NULL);
      if (error != 0) result = -error;
    }
    each[burst] = (now_ns() - began_ns) / BURST;
    const struct timespec pause = {0, PAUSE_NS};
    nanosleep(&pause, NULL);
  }
  if (result == 0) {
    qsort(each, (size_t)n_bursts, sizeof *each, compare);
    result = each[n_bursts / 2];
  }
  free(each);
  return result;
}
