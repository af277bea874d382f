#include "../mock_cuda.h"

#include <string.h>

mock_machine mock_the_machine;
mock_layout mock_the_layout;
uint64_t mock_kernel_ns, mock_host_ns;
static __thread int current_device;

void mock_cuda_set_machine(const mock_machine *machine) { mock_the_machine = *machine; }

void mock_cuda_set_layout(const mock_layout *layout) { mock_the_layout = *layout; }

void mock_cuda_set_device(int device) { current_device = device; }

int mock_current_device(void) { return current_device; }
