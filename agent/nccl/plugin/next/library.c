#include "library.h"
#include "loading.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static void *open_named(const char *kind, const char *name, int flags) {
  char file[PATH_MAX];
  const int length = snprintf(file, sizeof file, name[0] == '\0' ? "libnccl-%s.so" : "libnccl-%s-%s.so", kind, name);
  return length > 0 && (size_t)length < sizeof file ? dlopen(file, flags) : NULL;
}

/* By its path, or as the short name of a file. */
static void *open_either(const char *kind, const char *name, int flags) {
  void *library = name[0] == '\0' ? NULL : dlopen(name, flags);
  return library != NULL ? library : open_named(kind, name, flags);
}

/* A network plugin may contain tuners and profilers. If NCCL uses one, it has opened it by now. */
static void *find_net_plugin(void) {
  const char *names = getenv("NCCL_NET_PLUGIN");
  if (names == NULL) names = "";
  if (strcasecmp(names, "none") == 0) return NULL;
  char list[PATH_MAX], *rest = list;
  if (strlen(names) >= sizeof list) return NULL;
  strcpy(list, names);
  void *library = NULL;
  while (library == NULL && rest != NULL) library = open_either("net", strsep(&rest, ","), RTLD_NOW | RTLD_NOLOAD);
  return library;
}

/* As NCCL: any prefix of the word matches. */
static bool is_static_plugin(const char *name) {
  return name[0] != '\0' && strncasecmp(name, "STATIC_PLUGIN", strlen(name)) == 0;
}

void *zt_open_next(const char *variable, const char *kind) {
  const char *name = getenv(variable);
  if (name == NULL || strcasecmp(name, "none") == 0) return NULL;
  void *library = is_static_plugin(name) ? dlopen(NULL, RTLD_NOW) : open_either(kind, name, RTLD_NOW | RTLD_LOCAL);
  return library != NULL ? library : find_net_plugin();
}
