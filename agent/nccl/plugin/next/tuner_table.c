/* Finds the next tuner's table of functions. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "../zerotune_plugin.h"
#include "library.h"
#include "tuner.h"
#include "loading.h"

#define OLDEST 2
#define NEWEST 7

static pthread_mutex_t finding = PTHREAD_MUTEX_INITIALIZER;
static bool has_searched, has_next;
static zt_next_tuner found;
static _Atomic(const char *) its_name;

/* Every version begins with a name. zerotune's own plugin does not count as a next tuner. */
static const void *table_of(void *library, int abi) {
  char symbol[32];
  (void)snprintf(symbol, sizeof symbol, "ncclTunerPlugin_v%d", abi);
  const char *const *table = dlsym(library, symbol);
  return table == NULL || (table[0] != NULL && strcmp(table[0], "zerotune") == 0) ? NULL : table;
}

static zt_next_tuner described(int abi, const void *table) {
  zt_next_tuner next = {.abi = abi};
  switch (abi) {
  case 2:
    next.v2 = table;
    next.name = next.v2->name;
    next.end = next.v2->destroy;
    break;
  case 3:
    next.v3 = table;
    next.name = next.v3->name;
    next.end = next.v3->destroy;
    break;
  case 4:
    next.v4 = table;
    next.name = next.v4->name;
    next.ask = next.v4->get_coll_info;
    next.end = next.v4->destroy;
    break;
  default:
    next.v5 = table;
    next.name = next.v5->name;
    next.ask = next.v5->get_coll_info;
    next.end = next.v5->finalize;
    next.get_chunk_size = abi >= 6 ? ((const nccl_tuner_v6 *)table)->get_chunk_size : NULL;
  }
  if (next.name == NULL) next.name = "?";
  return next;
}

const zt_next_tuner *zt_next_tuner_find(int newest_abi, void (*has_found)(const zt_next_tuner *)) {
  pthread_mutex_lock(&finding);
  if (!has_searched) {
    has_searched = true;
    void *library = zt_open_next("ZEROTUNE_NEXT_TUNER", "tuner");
    const void *table = NULL;
    int abi = newest_abi < NEWEST ? newest_abi : NEWEST;
    for (; library != NULL && abi >= OLDEST && (table = table_of(library, abi)) == NULL;) abi--;
    has_next = table != NULL;
    if (has_next) found = described(abi, table);
    has_found(has_next ? &found : NULL);
    atomic_store(&its_name, has_next ? found.name : NULL);
  }
  pthread_mutex_unlock(&finding);
  return has_next ? &found : NULL;
}

void zt_next_tuner_forget(void) {
  pthread_mutex_lock(&finding);
  has_searched = has_next = false;
  atomic_store(&its_name, NULL);
  pthread_mutex_unlock(&finding);
}

const char *zerotune_next_tuner(void) {
  const char *name = atomic_load(&its_name);
  return name == NULL ? "" : name;
}
