/* NCCL's ranks share tens of megabytes by files in /dev/shm. Here these are anonymous, so that none is left behind when
 * a process is killed. Ranks send each other the last six characters of a file's name. The mock encodes process id and
 * descriptor in them, and opens the file through /proc/<pid>/fd. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include "../mock_cuda.h"

static const char PREFIX[] = "/dev/shm/nccl-"; /* ncclShmOpen: the same from 2.21 to 2.32 */
static const char DIGITS[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
enum { PREFIX_LENGTH = sizeof PREFIX - 1, N_DIGITS = 6, BASE = sizeof DIGITS - 1 };
#define MAX_FILES UINT64_C(13541) /* 62^6 names over Linux's 2^22 processes */

static bool is_shared(const char *path) {
  return path != NULL /* 2.29 opens that, too */ && strncmp(path, PREFIX, PREFIX_LENGTH) == 0 && strlen(path) == PREFIX_LENGTH + N_DIGITS;
}

int mock_mkstemp(char *path) {
  const int file = is_shared(path) ? mock_memory_file("zerotune-mock-nccl") : -1;
  if (file < 0) return mkstemp(path);
  if ((uint64_t)file >= MAX_FILES) { /* dozens of communicators are open */
    close(file);
    return mkstemp(path);
  }
  uint64_t name = (uint64_t)getpid() * MAX_FILES + (uint64_t)file;
  for (int place = N_DIGITS - 1; place >= 0; place--, name /= BASE) path[PREFIX_LENGTH + place] = DIGITS[name % BASE];
  return file;
}

static int open_anonymous(const char *path, int flags) {
  uint64_t name = 0;
  for (int place = 0; place < N_DIGITS; place++) {
    const char *digit = memchr(DIGITS, path[PREFIX_LENGTH + place], BASE);
    if (digit == NULL) return -1;
    name = name * BASE + (uint64_t)(digit - DIGITS);
  }
  char anonymous[64];
  snprintf(anonymous, sizeof anonymous, "/proc/%d/fd/%d", (int)(name / MAX_FILES), (int)(name % MAX_FILES));
  return open(anonymous, flags);
}

int mock_open(const char *path, int flags, ...) {
  mode_t mode = 0;
  if (flags & O_CREAT) {
    va_list rest;
    va_start(rest, flags);
    mode = va_arg(rest, mode_t);
    va_end(rest);
  }
  const int file = open(path, flags, mode);
  return file < 0 && errno == ENOENT && is_shared(path) ? open_anonymous(path, flags) : file;
}

/* An anonymous file is freed by its last close. */
int mock_unlink(const char *path) {
  const int failed = unlink(path);
  return is_shared(path) ? 0 : failed;
}

/* Proxies' buffers may be in such a file. */
int mock_munmap(void *base, size_t n_bytes) {
  mock_forget_proxies(base, n_bytes);
  return munmap(base, n_bytes);
}
