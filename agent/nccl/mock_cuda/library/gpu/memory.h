/* What lies at an address of the GPU's: what mapping and freeing it tell of it. */
#ifndef ZEROTUNE_MOCK_MEMORY_H
#define ZEROTUNE_MOCK_MEMORY_H

#include "../mock_cuda.h"

void mock_count_bytes(int device, int64_t n_bytes); /* that the device holds, more or fewer */
bool mock_has_room(int device, uint64_t n_bytes);
void mock_map_memory(char *base, size_t n_bytes, int device); /* from now on it is there */
void mock_unmap_memory(char *base, size_t n_bytes);           /* no longer; at once, whoever may still run */
bool mock_locate_mapped(const void *pointer, int *file, uint64_t *offset); /* of a cuMem handle */

#endif
