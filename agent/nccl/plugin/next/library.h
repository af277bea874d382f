/* The library that NCCL would have opened, had its variable not named ours. */
#ifndef ZEROTUNE_NEXT_LIBRARY_H
#define ZEROTUNE_NEXT_LIBRARY_H

/* `variable` holds what NCCL's own said before ours took its place: a path, a name, STATIC_PLUGIN, none; empty =
 * nothing, so that NCCL searches by itself. Not set = there is none. `kind` is "tuner" or "profiler". Returns what
 * dlopen does, NULL = none. Never closed. */
void *zt_open_next(const char *variable, const char *kind);

#endif
