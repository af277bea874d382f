/* Bookkeeping of GPU memory, for the files that map and free it. */
#ifndef ZEROTUNE_MOCK_MEMORY_H
#define ZEROTUNE_MOCK_MEMORY_H

#include "../mock_cuda.h"

void mock_count_bytes(int device, int64_t n_bytes); /* adds to the device's memory in use */
bool mock_has_room(int device, uint64_t n_bytes);
void mock_map_memory(char *base, size_t n_bytes, int device);
void mock_unmap_memory(char *base, size_t n_bytes); /* at once, even if a kernel still uses it */
bool mock_locate_mapped(const void *pointer, int *file, uint64_t *offset); /* in a cuMem handle's file */

#endif
