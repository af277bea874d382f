#include "../mock_cuda.h"

#include <time.h>

mock_machine mock_the_machine;
mock_layout mock_the_layout;
static __thread int current_device;

void mock_cuda_set_machine(const mock_machine *machine) { mock_the_machine = *machine; }

void mock_cuda_set_layout(const mock_layout *layout) { mock_the_layout = *layout; }

void mock_cuda_set_device(int device) { current_device = device; }

int mock_current_device(void) { return current_device; }

/* Different for each GPU, and not zero. */
cu_uuid mock_uuid(int device) { return (cu_uuid){{(unsigned char)(1 + device)}}; }

uint64_t mock_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
