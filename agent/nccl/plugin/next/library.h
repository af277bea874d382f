/* The library of the next plugin: the one that NCCL would have opened without zerotune's. */
#ifndef ZEROTUNE_NEXT_LIBRARY_H
#define ZEROTUNE_NEXT_LIBRARY_H

/* `variable` has the user's value of NCCL's own variable: a path, a name, STATIC_PLUGIN, none; empty = search by NCCL's
 * rules. Not set = there is no next plugin. `kind` is "tuner" or "profiler". Returns dlopen's handle, which is never
 * closed; NULL = none. */
void *zt_open_next(const char *variable, const char *kind);

#endif
