#ifndef TARGET_H
#define TARGET_H

#include <stddef.h>
#include <stdint.h>

/* One input; whatever it is, this returns. A fault ends the process. */
void fuzz_one(const uint8_t *data, size_t n_bytes);

#endif
