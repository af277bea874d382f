/* Between a process and the kernel (LD_PRELOAD): the n-th call of one kind on files of one folder fails, and changes
 * in the folder are logged for a replay.
 *
 * Kinds are counted apart. A call of malloc counts if it comes from SQLite's library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum kind { WRITE, SYNC, RENAME, TRUNCATE, UNLINK, OPEN, READ, MALLOC, N_KINDS };
enum how { FAIL = 0, SHORT = 1, SHORT_THEN_FAIL = 2 };
enum { LOG_WRITE, LOG_SYNC, LOG_RENAME, LOG_TRUNCATE, LOG_UNLINK, LOG_CREATE, LOG_SYNC_FOLDER, LOG_MARK };

struct record {
    uint32_t what, name_bytes;
    uint64_t inode;
    int64_t offset, size;
};

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char folder[4096];
static size_t folder_bytes;
static volatile int is_watching;
static int log_fd = -1;
static long counts[N_KINDS];
static int armed_kind = -1, armed_errno, armed_how, fails_next;
static long armed_at;
static long n_fired;
static __thread char place[4096];
static char failed_at[4096];
static uintptr_t sqlite_from, sqlite_to;

#define REAL(type, name, ...)                                                                                          \
    static type (*real)(__VA_ARGS__);                                                                                  \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int find_sqlite(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size;
    (void)unused;
    if (!strstr(info->dlpi_name, "libsqlite3")) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && (part->p_flags & PF_X)) {
            sqlite_from = info->dlpi_addr + part->p_vaddr;
            sqlite_to = sqlite_from + part->p_memsz;
        }
    }
    return 1;
}

/* Count calls on files below `path` from now on; `log` < 0: keep no log. 1 if SQLite's calls of malloc are seen, too. */
int faults_watch(const char *path, int log) {
    dl_iterate_phdr(find_sqlite, NULL);
    snprintf(folder, sizeof folder, "%s", path);
    folder_bytes = strlen(folder);
    log_fd = log;
    is_watching = 1;
    return sqlite_to > 0;
}

void faults_stop(void) { is_watching = 0; }
/* The `at`-th call of `kind` from now on, counted from 1, ends in `error`. */
void faults_arm(int kind, long at, int error, int how) {
    armed_at = counts[kind] + at;
    armed_errno = error;
    armed_how = how;
    armed_kind = kind;
}
long faults_count(int kind) { return counts[kind]; }
long faults_fired(void) { return n_fired; }
/* The file of the call that failed, below the folder. */
const char *faults_place(void) { return failed_at; }

static void put(int what, uint64_t inode, int64_t offset, const char *name, const void *data, int64_t size) {
    if (log_fd < 0) return;
    REAL(ssize_t, "write", int, const void *, size_t);
    struct record head = {what, name ? strlen(name) : 0, inode, offset, size};
    int failed = real(log_fd, &head, sizeof head) < 0;
    failed |= name && real(log_fd, name, head.name_bytes) < 0;
    failed |= data && size && real(log_fd, data, size) < 0;
    if (failed) _exit(99);
}

/* The answer that the process got at this place of the log. */
void faults_mark(int64_t number) {
    pthread_mutex_lock(&mutex);
    put(LOG_MARK, 0, number, NULL, NULL, 0);
    pthread_mutex_unlock(&mutex);
}

/* Whether this call fails; errno says how. The mutex is held. */
static int fails(int kind) {
    counts[kind]++;
    if (fails_next && kind == WRITE) {
        fails_next = 0;
        errno = armed_errno;
        return 1;
    }
    if (kind != armed_kind || counts[kind] != armed_at) return 0;
    n_fired++;
    snprintf(failed_at, sizeof failed_at, "%s", kind == MALLOC ? "" : place);
    errno = armed_errno;
    return 1;
}

static int is_below(const char *path) {
    if (strncmp(path, folder, folder_bytes) || (path[folder_bytes] && path[folder_bytes] != '/')) return 0;
    snprintf(place, sizeof place, "%s", path + folder_bytes);
    return 1;
}

static int path_of(int fd, const char *name, char *path, size_t size) {
    char link[64];
    if (fd == AT_FDCWD || (name && name[0] == '/')) return snprintf(path, size, "%s", name) < (int)size;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, size - 1);
    if (n < 0) return 0;
    path[n] = 0;
    if (name) snprintf(path + n, size - n, "/%s", name);
    return 1;
}

static int is_ours(int fd) {
    char path[4096];
    return is_watching && fd != log_fd && path_of(fd, NULL, path, sizeof path) && is_below(path);
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

static ssize_t write_at(int fd, const void *data, size_t size, off_t offset, int moves) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t);
    static ssize_t (*real_write)(int, const void *, size_t);
    if (!real_write) real_write = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (!is_ours(fd)) return moves ? real_write(fd, data, size) : real(fd, data, size, offset);
    pthread_mutex_lock(&mutex);
    ssize_t done = -1;
    int fault = fails(WRITE);
    if (fault && n_fired && armed_how != FAIL && size > 1) {
        fault = 0;
        size /= 2;
        fails_next = armed_how == SHORT_THEN_FAIL;
        armed_how = FAIL;
    }
    if (!fault) {
        if (moves) offset = lseek(fd, 0, SEEK_CUR);
        done = moves ? real_write(fd, data, size) : real(fd, data, size, offset);
        if (done > 0) put(LOG_WRITE, inode_of(fd), offset, NULL, data, done);
    }
    int error = errno;
    pthread_mutex_unlock(&mutex);
    errno = error;
    return done;
}

ssize_t write(int fd, const void *data, size_t size) { return write_at(fd, data, size, 0, 1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return write_at(fd, data, size, at, 0); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return write_at(fd, data, size, at, 0); }

static int sync_it(int fd, int (*real)(int)) {
    if (!is_ours(fd)) return real(fd);
    pthread_mutex_lock(&mutex);
    int failed = fails(SYNC) ? -1 : real(fd);
    struct stat found;
    if (!failed && !fstat(fd, &found)) put(S_ISDIR(found.st_mode) ? LOG_SYNC_FOLDER : LOG_SYNC, found.st_ino, 0, NULL, NULL, 0);
    int error = errno;
    pthread_mutex_unlock(&mutex);
    errno = error;
    return failed;
}

int fsync(int fd) {
    REAL(int, "fsync", int);
    return sync_it(fd, real);
}
int fdatasync(int fd) {
    REAL(int, "fdatasync", int);
    return sync_it(fd, real);
}

int ftruncate(int fd, off_t size) {
    REAL(int, "ftruncate64", int, off_t);
    if (!is_ours(fd)) return real(fd, size);
    pthread_mutex_lock(&mutex);
    int failed = fails(TRUNCATE) ? -1 : real(fd, size);
    if (!failed) put(LOG_TRUNCATE, inode_of(fd), size, NULL, NULL, 0);
    int error = errno;
    pthread_mutex_unlock(&mutex);
    errno = error;
    return failed;
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    if (!is_watching || !is_below(from)) return real(from, to);
    char both[8192];
    snprintf(both, sizeof both, "%s\n%s", from, to);
    pthread_mutex_lock(&mutex);
    int failed = fails(RENAME) ? -1 : real(from, to);
    if (!failed) put(LOG_RENAME, 0, 0, both, NULL, 0);
    int error = errno;
    pthread_mutex_unlock(&mutex);
    errno = error;
    return failed;
}

static int unlink_it(int fd, const char *name, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    char path[4096];
    if (!is_watching || (flags & AT_REMOVEDIR) || !path_of(fd, name, path, sizeof path) || !is_below(path))
        return real(fd, name, flags);
    pthread_mutex_lock(&mutex);
    int failed = fails(UNLINK) ? -1 : real(fd, name, flags);
    if (!failed) put(LOG_UNLINK, 0, 0, path, NULL, 0);
    int error = errno;
    pthread_mutex_unlock(&mutex);
    errno = error;
    return failed;
}
int unlink(const char *name) { return unlink_it(AT_FDCWD, name, 0); }
int unlinkat(int fd, const char *name, int flags) { return unlink_it(fd, name, flags); }

static int open_it(int fd, const char *name, int flags, mode_t mode) {
    REAL(int, "openat64", int, const char *, int, mode_t);
    char path[4096];
    struct stat before, after;
    if (!is_watching || (flags & O_DIRECTORY) || !path_of(fd, name, path, sizeof path) || !is_below(path))
        return real(fd, name, flags, mode);
    pthread_mutex_lock(&mutex);
    int was_there = !lstat(path, &before);
    int opened = fails(OPEN) ? -1 : real(fd, name, flags, mode);
    if (opened >= 0 && !fstat(opened, &after) && S_ISREG(after.st_mode)) {
        if (!was_there) put(LOG_CREATE, after.st_ino, 0, path, NULL, 0);
        else if (flags & O_TRUNC) put(LOG_TRUNCATE, after.st_ino, 0, NULL, NULL, 0);
    }
    int error = errno;
    pthread_mutex_unlock(&mutex);
    errno = error;
    return opened;
}

#define OPEN_BODY(fd, name, flags)                                                                                     \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                                             \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }                                                                                                                  \
    return open_it(fd, name, flags, mode)

int open(const char *name, int flags, ...) { OPEN_BODY(AT_FDCWD, name, flags); }
int open64(const char *name, int flags, ...) { OPEN_BODY(AT_FDCWD, name, flags); }
int openat(int fd, const char *name, int flags, ...) { OPEN_BODY(fd, name, flags); }
int openat64(int fd, const char *name, int flags, ...) { OPEN_BODY(fd, name, flags); }

static int read_fails(int fd) {
    if (!is_ours(fd)) return 0;
    pthread_mutex_lock(&mutex);
    int failed = fails(READ);
    int error = errno;
    pthread_mutex_unlock(&mutex);
    errno = error;
    return failed;
}

ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, "read", int, void *, size_t);
    return read_fails(fd) ? -1 : real(fd, data, size);
}
ssize_t pread(int fd, void *data, size_t size, off_t at) {
    REAL(ssize_t, "pread64", int, void *, size_t, off_t);
    return read_fails(fd) ? -1 : real(fd, data, size, at);
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { return pread(fd, data, size, at); }

static int malloc_fails(void *caller) {
    if (!is_watching || (uintptr_t)caller < sqlite_from || (uintptr_t)caller >= sqlite_to) return 0;
    long count = __sync_add_and_fetch(&counts[MALLOC], 1);
    if (armed_kind != MALLOC || count != armed_at) return 0;
    n_fired++;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) { return malloc_fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size); }
void *realloc(void *old, size_t size) {
    return malloc_fails(__builtin_return_address(0)) ? NULL : __libc_realloc(old, size);
}
void *calloc(size_t n, size_t size) { return malloc_fails(__builtin_return_address(0)) ? NULL : __libc_calloc(n, size); }
