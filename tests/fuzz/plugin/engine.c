/* A small coverage-guided fuzzer for gcc, which has no libFuzzer: AFL's method in one process.
 *
 *   engine SECONDS SEED CURRENT FOLDER...
 *
 * Inputs are the files of the folders; those that reach something new are written into the last folder. SECONDS 0: only
 * those are run. The input being run is always in the file CURRENT, so that it is there after a fault, and removed at
 * the end. Prints the number of executions and of points reached. */
#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "target.h"

enum { MAP_BITS = 16, MAP_SIZE = 1 << MAP_BITS, MOST_BYTES = 4096, MOST_INPUTS = 4096, HANG_S = 10 };

typedef struct {
  uint8_t *data;
  size_t n_bytes;
} input;

static uint8_t map[MAP_SIZE], reached[MAP_SIZE]; /* by edge: passes, and which orders of magnitude of them were seen */
static uintptr_t previous;
static input pool[MOST_INPUTS];
static size_t n_pool;
static const char *found_folder;
static struct current {
  uint32_t n_bytes;
  uint8_t data[MOST_BYTES];
} *current;

/* Called at each block of the plugin's code (-fsanitize-coverage=trace-pc). */
void __sanitizer_cov_trace_pc(void) {
  const uintptr_t here = (uintptr_t)__builtin_return_address(0) * 0x9E3779B1u;
  uint8_t *passes = &map[((here >> 8) ^ previous) % MAP_SIZE];
  if (*passes < 255) ++*passes;
  previous = (here >> 8) >> 1;
}

static uint64_t state = 1;

static uint32_t random_below(uint32_t most) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17; /* xorshift */
  return (uint32_t)(state >> 16) % most;
}

static uint8_t magnitude(uint8_t passes) {
  return passes == 0 ? 0 : (uint8_t)(1u << (passes < 4 ? passes - 1 : passes < 8 ? 3 : passes < 16 ? 4 : passes < 32 ? 5 : passes < 128 ? 6 : 7));
}

/* Whether this input reaches what none before did. */
static bool run(const uint8_t *data, size_t n_bytes) {
  memcpy(current->data, data, n_bytes);
  current->n_bytes = (uint32_t)n_bytes;
  memset(map, 0, sizeof map);
  previous = 0;
  alarm(HANG_S);
  uint8_t *exact = malloc(n_bytes + (n_bytes == 0)); /* its ends are guarded */
  memcpy(exact, data, n_bytes);
  fuzz_one(exact, n_bytes);
  free(exact);
  bool is_new = false;
  for (size_t i = 0; i < MAP_SIZE; i++) {
    const uint8_t seen = magnitude(map[i]);
    if ((reached[i] | seen) == reached[i]) continue;
    reached[i] |= seen;
    is_new = true;
  }
  return is_new;
}

static void keep(const uint8_t *data, size_t n_bytes) {
  if (n_pool == MOST_INPUTS) return;
  pool[n_pool].data = malloc(n_bytes + 1);
  pool[n_pool].n_bytes = n_bytes;
  memcpy(pool[n_pool++].data, data, n_bytes);
}

static void write_found(const uint8_t *data, size_t n_bytes) {
  char path[4096];
  uint64_t hash = 14695981039346656037u;
  for (size_t i = 0; i < n_bytes; i++) hash = (hash ^ data[i]) * 1099511628211u;
  snprintf(path, sizeof path, "%s/%016llx", found_folder, (unsigned long long)hash);
  FILE *file = fopen(path, "wb");
  if (file == NULL) return;
  fwrite(data, 1, n_bytes, file);
  fclose(file);
}

static size_t mutate(uint8_t *data, size_t n_bytes) {
  static const uint8_t telling[] = {0, 1, 2, 3, 5, 7, 8, 16, 64, 127, 128, 223, 224, 230, 240, 250, 254, 255};
  for (uint32_t round = 1 + random_below(6); round > 0; round--) {
    const size_t place = n_bytes == 0 ? 0 : random_below((uint32_t)n_bytes);
    const size_t n_after = n_bytes - place;
    const input *other = &pool[random_below((uint32_t)n_pool)];
    switch (random_below(7)) {
    case 0:
      if (n_bytes > 0) data[place] ^= (uint8_t)(1u << random_below(8));
      break;
    case 1:
      if (n_bytes > 0) data[place] = telling[random_below(sizeof telling)];
      break;
    case 2:
      if (n_bytes > 0) data[place] = (uint8_t)random_below(256);
      break;
    case 3: { /* cut out */
      const size_t n_cut = n_after == 0 ? 0 : random_below((uint32_t)(n_after < 64 ? n_after : 64) + 1);
      memmove(data + place, data + place + n_cut, n_after - n_cut);
      n_bytes -= n_cut;
      break;
    }
    case 4: /* put one in */
      if (n_bytes == MOST_BYTES) break;
      memmove(data + place + 1, data + place, n_after);
      data[place] = (uint8_t)random_below(256);
      n_bytes++;
      break;
    case 5: { /* part of another input, over or between */
      if (other->n_bytes == 0) break;
      const size_t from = random_below((uint32_t)other->n_bytes);
      size_t n_copied = 1 + random_below((uint32_t)(other->n_bytes - from));
      if (n_copied > MOST_BYTES - n_bytes) n_copied = MOST_BYTES - n_bytes;
      memmove(data + place + n_copied, data + place, n_after);
      memcpy(data + place, other->data + from, n_copied);
      n_bytes += n_copied;
      break;
    }
    case 6: { /* another's end */
      if (other->n_bytes == 0) break;
      const size_t from = random_below((uint32_t)other->n_bytes);
      const size_t n_more = other->n_bytes - from, n_copied = n_more < MOST_BYTES - place ? n_more : MOST_BYTES - place;
      memcpy(data + place, other->data + from, n_copied);
      n_bytes = place + n_copied;
      break;
    }
    }
  }
  return n_bytes;
}

static uint64_t read_folder(const char *folder) {
  DIR *open = opendir(folder);
  uint64_t n_read = 0;
  for (struct dirent *entry; open != NULL && (entry = readdir(open)) != NULL;) {
    char path[4096];
    uint8_t data[MOST_BYTES];
    snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "rb");
    if (file == NULL) continue;
    const size_t n_bytes = fread(data, 1, sizeof data, file);
    fclose(file);
    n_read++;
    if (run(data, n_bytes)) keep(data, n_bytes);
  }
  if (open != NULL) closedir(open);
  return n_read;
}

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv) {
  if (argc < 5) return 2;
  const double ends_at_s = now_s() + atof(argv[1]);
  const char *current_path = argv[3];
  state = 0x9E3779B97F4A7C15u ^ strtoull(argv[2], NULL, 10);
  found_folder = argv[argc - 1];
  const int file = open(current_path, O_RDWR | O_CREAT | O_TRUNC, 0600);
  if (file < 0 || ftruncate(file, sizeof *current) != 0) return 2;
  current = mmap(NULL, sizeof *current, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (current == MAP_FAILED) return 2;
  uint64_t n_runs = 0;
  for (int i = 4; i < argc; i++) n_runs += read_folder(argv[i]);
  if (n_pool == 0) keep((const uint8_t *)"", 0);
  while (now_s() < ends_at_s) {
    for (int burst = 0; burst < 64; burst++, n_runs++) {
      uint8_t data[MOST_BYTES];
      const input *chosen = &pool[random_below((uint32_t)n_pool)];
      memcpy(data, chosen->data, chosen->n_bytes);
      const size_t n_bytes = mutate(data, chosen->n_bytes);
      if (!run(data, n_bytes)) continue;
      keep(data, n_bytes);
      write_found(data, n_bytes);
    }
  }
  size_t n_reached = 0;
  for (size_t i = 0; i < MAP_SIZE; i++) n_reached += reached[i] != 0;
  printf("%llu executions, %zu points reached, %zu inputs\n", (unsigned long long)n_runs, n_reached, n_pool);
  unlink(current_path);
  return 0;
}
