/* NVML by its own names: this library's SONAME is libnvidia-ml.so.1, so that opening that returns this library. */
#include <stdio.h>
#include <string.h>

#include "../mock_cuda.h"

#define UNUSED __attribute__((unused))
#define NVML MOCK_API int

static mock_device *at(unsigned index) {
  return index < mock_the_machine.n_devices ? &mock_the_machine.devices[index] : NULL;
}

static int index_of(const mock_device *device) { return (int)(device - mock_the_machine.devices); }

NVML nvmlInit(void);
NVML nvmlInit(void) { return NVML_SUCCESS; }
NVML nvmlInit_v2(void);
NVML nvmlInit_v2(void) { return NVML_SUCCESS; }
NVML nvmlInitWithFlags(unsigned flags);
NVML nvmlInitWithFlags(UNUSED unsigned flags) { return NVML_SUCCESS; }
NVML nvmlShutdown(void);
NVML nvmlShutdown(void) { return NVML_SUCCESS; }

MOCK_API const char *nvmlErrorString(int error);
MOCK_API const char *nvmlErrorString(UNUSED int error) { return "an error of the mock NVML"; }

NVML nvmlDeviceGetCount_v2(unsigned *n_devices);
NVML nvmlDeviceGetCount_v2(unsigned *n_devices) {
  *n_devices = mock_the_machine.n_devices;
  return NVML_SUCCESS;
}
NVML nvmlDeviceGetCount(unsigned *n_devices);
NVML nvmlDeviceGetCount(unsigned *n_devices) { return nvmlDeviceGetCount_v2(n_devices); }

NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, mock_device **device);
NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, mock_device **device) {
  *device = at(index);
  return *device != NULL ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}
NVML nvmlDeviceGetHandleByIndex(unsigned index, mock_device **device);
NVML nvmlDeviceGetHandleByIndex(unsigned index, mock_device **device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

/* Domains of bus ids have four or eight digits. */
NVML nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, mock_device **device);
NVML nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, mock_device **device) {
  for (unsigned i = 0; i < mock_the_machine.n_devices; i++)
    if (strcasestr(bus_id, mock_the_machine.devices[i].bus_id + strlen("0000:")) != NULL)
      return nvmlDeviceGetHandleByIndex_v2(i, device);
  return NVML_ERROR_NOT_FOUND;
}
NVML nvmlDeviceGetHandleByPciBusId(const char *bus_id, mock_device **device);
NVML nvmlDeviceGetHandleByPciBusId(const char *bus_id, mock_device **device) {
  return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

/* In torch's format of a UUID. */
NVML nvmlDeviceGetHandleByUUID(const char *uuid, mock_device **device);
NVML nvmlDeviceGetHandleByUUID(const char *uuid, mock_device **device) {
  for (unsigned i = 0; i < mock_the_machine.n_devices; i++) {
    const unsigned char *const b = mock_uuid((int)i).bytes;
    char text[48];
    int at = snprintf(text, sizeof text, "GPU-");
    for (int k = 0; k < 16; k++)
      at += snprintf(text + at, sizeof text - (size_t)at, k == 4 || k == 6 || k == 8 || k == 10 ? "-%02x" : "%02x", b[k]);
    if (strcasecmp(uuid, text) == 0) return nvmlDeviceGetHandleByIndex_v2(i, device);
  }
  return NVML_ERROR_NOT_FOUND;
}

NVML nvmlSystemGetDriverVersion(char *version, unsigned n_bytes);
NVML nvmlSystemGetDriverVersion(char *version, unsigned n_bytes) {
  snprintf(version, n_bytes, "mock");
  return NVML_SUCCESS;
}

NVML nvmlDeviceGetIndex(const mock_device *device, unsigned *index);
NVML nvmlDeviceGetIndex(const mock_device *device, unsigned *index) {
  *index = (unsigned)index_of(device);
  return NVML_SUCCESS;
}

NVML nvmlDeviceGetName(const mock_device *device, char *name, unsigned n_bytes);
NVML nvmlDeviceGetName(const mock_device *device, char *name, unsigned n_bytes) {
  snprintf(name, n_bytes, "%s", device->name);
  return NVML_SUCCESS;
}

NVML nvmlDeviceGetMemoryInfo(const mock_device *device, nvml_memory *memory);
NVML nvmlDeviceGetMemoryInfo(const mock_device *device, nvml_memory *memory) {
  memory->total_bytes = device->memory_bytes;
  memory->used_bytes = mock_allocated_bytes(index_of(device));
  memory->free_bytes = memory->total_bytes - memory->used_bytes;
  return NVML_SUCCESS;
}

NVML nvmlDeviceGetCudaComputeCapability(const mock_device *device, int *major, int *minor);
NVML nvmlDeviceGetCudaComputeCapability(const mock_device *device, int *major, int *minor) {
  *major = device->capability / 10;
  *minor = device->capability % 10;
  return NVML_SUCCESS;
}

NVML nvmlDeviceGetP2PStatus(UNUSED const mock_device *a, UNUSED const mock_device *b, UNUSED int index, int *status);
NVML nvmlDeviceGetP2PStatus(UNUSED const mock_device *a, UNUSED const mock_device *b, UNUSED int index, int *status) {
  *status = 0;
  return NVML_SUCCESS;
}

NVML nvmlDeviceGetComputeRunningProcesses(UNUSED const mock_device *device, unsigned *n, UNUSED void *processes);
NVML nvmlDeviceGetComputeRunningProcesses(UNUSED const mock_device *device, unsigned *n, UNUSED void *processes) {
  *n = 0;
  return NVML_SUCCESS;
}

NVML nvmlSystemGetCudaDriverVersion_v2(int *version);
NVML nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = mock_the_machine.cuda_version;
  return NVML_SUCCESS;
}

NVML nvmlDeviceGetNvLinkRemoteDeviceType(UNUSED const mock_device *device, UNUSED unsigned link, UNUSED int *type);
NVML nvmlDeviceGetNvLinkRemoteDeviceType(UNUSED const mock_device *device, UNUSED unsigned link, UNUSED int *type) {
  return NVML_ERROR_NOT_SUPPORTED;
}

/* NCCL reads NVLinks in the topology file. */
NVML nvmlDeviceGetNvLinkState(UNUSED const mock_device *device, UNUSED unsigned link, int *active);
NVML nvmlDeviceGetNvLinkState(UNUSED const mock_device *device, UNUSED unsigned link, int *active) {
  *active = 0;
  return NVML_SUCCESS;
}

NVML nvmlDeviceGetNvLinkRemotePciInfo(UNUSED const mock_device *device, UNUSED unsigned link, nvml_pci_info *pci);
NVML nvmlDeviceGetNvLinkRemotePciInfo(UNUSED const mock_device *device, UNUSED unsigned link, nvml_pci_info *pci) {
  memset(pci, 0, sizeof *pci);
  return NVML_ERROR_NOT_FOUND;
}

NVML nvmlDeviceGetNvLinkRemotePciInfo_v2(const mock_device *device, unsigned link, nvml_pci_info *pci);
NVML nvmlDeviceGetNvLinkRemotePciInfo_v2(const mock_device *device, unsigned link, nvml_pci_info *pci) {
  return nvmlDeviceGetNvLinkRemotePciInfo(device, link, pci);
}

NVML nvmlDeviceGetNvLinkCapability(UNUSED const mock_device *device, UNUSED unsigned link, UNUSED int capability,
                                   unsigned *result);
NVML nvmlDeviceGetNvLinkCapability(UNUSED const mock_device *device, UNUSED unsigned link, UNUSED int capability,
                                   unsigned *result) {
  *result = 0;
  return NVML_ERROR_NOT_SUPPORTED;
}

NVML nvmlDeviceGetFieldValues(UNUSED const mock_device *device, UNUSED int n_values, UNUSED void *values);
NVML nvmlDeviceGetFieldValues(UNUSED const mock_device *device, UNUSED int n_values, UNUSED void *values) {
  return NVML_ERROR_NOT_SUPPORTED;
}
