/* A net plugin (v8, which every release from 2.21 on takes): the NICs of the topology file by their names, so that
 * NCCL's search keeps them. A request is over when it is made, and carries nothing. */
#include <string.h>

#include "../mock_cuda.h"

#define UNUSED __attribute__((unused))

typedef struct {
  const char *name, *pci_path;
  uint64_t guid;
  int pointer_types; /* 1 = host, 2 = CUDA */
  int global_registration;
  int speed_mbps, port;
  float latency_us;
  int max_communicators, max_receives, device_type, device_version;
} net_properties;

static char token; /* what every handle points to */

static int init(UNUSED void *log) { return 0; }

static int devices(int *n_devices) {
  *n_devices = (int)mock_the_machine.n_nics;
  return 0;
}

static int properties(int device, net_properties *out) {
  if (device < 0 || device >= (int)mock_the_machine.n_nics) return 4; /* ncclInvalidArgument */
  const mock_nic *nic = &mock_the_machine.nics[device];
  *out = (net_properties){
      .name = nic->name,
      .guid = nic->guid,
      .pointer_types = nic->reaches_gpu_memory ? 3 : 1,
      .global_registration = 1,
      .speed_mbps = nic->speed_mbps,
      .port = nic->port,
      .latency_us = nic->latency_us,
      .max_communicators = 1 << 17,
      .max_receives = 1,
  };
  return 0;
}

static int listen_at(UNUSED int device, void *handle, void **listener) {
  memset(handle, 0, 64);
  *listener = &token;
  return 0;
}

static int connect_to(UNUSED int device, UNUSED void *handle, void **sender, void **device_handle) {
  *sender = &token;
  if (device_handle != NULL) *device_handle = NULL;
  return 0;
}

static int accept_from(UNUSED void *listener, void **receiver, void **device_handle) {
  *receiver = &token;
  if (device_handle != NULL) *device_handle = NULL;
  return 0;
}

static int register_memory(UNUSED void *connection, UNUSED void *data, UNUSED size_t n_bytes, UNUSED int type,
                           void **handle) {
  *handle = &token;
  return 0;
}

static int register_dmabuf(UNUSED void *connection, UNUSED void *data, UNUSED size_t n_bytes, UNUSED int type,
                           UNUSED uint64_t offset, UNUSED int file, void **handle) {
  *handle = &token;
  return 0;
}

static int deregister(UNUSED void *connection, UNUSED void *handle) { return 0; }

static int send_to(UNUSED void *sender, UNUSED void *data, UNUSED int n_bytes, UNUSED int tag, UNUSED void *handle,
                   void **request) {
  *request = &token;
  return 0;
}

static int receive_from(UNUSED void *receiver, UNUSED int n, UNUSED void **data, UNUSED int *n_bytes, UNUSED int *tags,
                        UNUSED void **handles, void **request) {
  *request = &token;
  return 0;
}

static int flush(UNUSED void *receiver, UNUSED int n, UNUSED void **data, UNUSED int *n_bytes, UNUSED void **handles,
                 void **request) {
  *request = NULL;
  return 0;
}

static int test(UNUSED void *request, int *done, int *n_bytes) {
  *done = 1;
  if (n_bytes != NULL) *n_bytes = 0;
  return 0;
}

static int close_connection(UNUSED void *connection) { return 0; }

static int device_memory(UNUSED void *connection, UNUSED void *handle, void **out) {
  *out = NULL;
  return 0;
}

static int consumed(UNUSED void *receiver, UNUSED int n, UNUSED void *request) { return 0; }

MOCK_API const struct {
  const char *name;
  void *functions[18];
} ncclNetPlugin_v8 = {
    "zerotune mock",
    {(void *)init, (void *)devices, (void *)properties, (void *)listen_at, (void *)connect_to, (void *)accept_from,
     (void *)register_memory, (void *)register_dmabuf, (void *)deregister, (void *)send_to, (void *)receive_from,
     (void *)flush, (void *)test, (void *)close_connection, (void *)close_connection, (void *)close_connection,
     (void *)device_memory, (void *)consumed},
};
