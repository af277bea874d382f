/* A hash of this library's sources, which compiled.py finds in the file's bytes without loading it. */
#include "zerotune_plugin.h"

#ifndef ZT_SOURCE_HASH
#define ZT_SOURCE_HASH "by hand"
#endif

const char *zerotune_source_hash(void) { return "zerotune-source:" ZT_SOURCE_HASH; }
