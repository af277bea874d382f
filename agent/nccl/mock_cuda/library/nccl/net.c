/* A net plugin, v8, which every release from 2.21 on accepts. It has the NICs of the topology file by their names, so
 * that NCCL's search keeps them. A request is over when it is made, and transfers nothing. A second plugin, for the
 * NICs that support it by the file, has collectives in the switches, as SHARP. */
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

static char token; /* every handle points to it */

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

/* ---- in the switches ---- */

static const mock_nic *sharp_nic(int number) {
  for (uint32_t i = 0; i < mock_the_machine.n_nics; i++)
    if (mock_the_machine.nics[i].is_sharp && number-- == 0) return &mock_the_machine.nics[i];
  return NULL;
}

static int sharp_devices(int *n_devices) {
  for (*n_devices = 0; sharp_nic(*n_devices) != NULL;) ++*n_devices;
  return 0;
}

static int sharp_properties(int device, net_properties *out) {
  const mock_nic *const nic = sharp_nic(device);
  return nic != NULL ? properties((int)(nic - mock_the_machine.nics), out) : 4;
}

static int join_group(UNUSED void *handles[], UNUSED int n_nodes, UNUSED int node, UNUSED void *listener, void **group) {
  *group = &token;
  return 0;
}

static int reduces(UNUSED int datatype, UNUSED int operation, int *supported) {
  *supported = 1;
  return 0;
}

static int reduce_all(UNUSED void *group, UNUSED void *from, UNUSED void *to, UNUSED int count, UNUSED int datatype,
                      UNUSED int operation, UNUSED void *from_handle, UNUSED void *to_handle, void **request) {
  *request = &token;
  return 0;
}

static int gather_all(UNUSED void *group, UNUSED void *from, UNUSED int n_parts, UNUSED void *parts, UNUSED size_t rank_bytes,
                      UNUSED size_t offset, UNUSED size_t n_bytes, UNUSED void *handle, void **request) {
  *request = &token;
  return 0;
}

static int scatter_reduced(UNUSED void *group, UNUSED int n_parts, UNUSED void *parts, UNUSED void *to,
                           UNUSED size_t rank_bytes, UNUSED size_t offset, UNUSED size_t n_bytes, UNUSED int datatype,
                           UNUSED int operation, UNUSED void *handle, void **request) {
  *request = &token;
  return 0;
}

static int flush_group(UNUSED void *group, UNUSED void *data, UNUSED int n_bytes, UNUSED void *handle, void **request) {
  *request = NULL;
  return 0;
}

MOCK_API const struct {
  const char *name;
  void *functions[16];
} ncclCollNetPlugin_v8 = {
    "zerotune mock",
    {(void *)init, (void *)sharp_devices, (void *)sharp_properties, (void *)listen_at, (void *)join_group, (void *)reduces,
     (void *)register_memory, (void *)register_dmabuf, (void *)deregister, (void *)reduce_all, (void *)gather_all,
     (void *)scatter_reduced, (void *)flush_group, (void *)test, (void *)close_connection, (void *)close_connection},
};
