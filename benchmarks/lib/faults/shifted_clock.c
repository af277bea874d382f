// Loaded with LD_PRELOAD: a process's clocks, shifted by the offsets in a shared file at each call.
//
// The machine's own clock is never touched, so a wait until a time of a shifted clock is converted to the kernel's
// time. A wait that has begun keeps its length when the clock jumps.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000LL
// A monotonic time is always below this, a calendar time above.
#define EARLIEST_REALTIME_S 500000000

static const volatile int64_t nothing[2];
static const volatile int64_t *offsets_ns = nothing;  // of CLOCK_REALTIME, of CLOCK_MONOTONIC

__attribute__((constructor)) static void map_offsets(void) {
    const char *path = getenv("SHIFTED_CLOCK_OFFSETS");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *found = mmap(NULL, sizeof nothing, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) offsets_ns = found;
    close(file);
}

static int64_t offset_of(clockid_t clock) {
    switch (clock) {
        case CLOCK_REALTIME:
        case CLOCK_REALTIME_COARSE: return offsets_ns[0];
        case CLOCK_MONOTONIC:
        case CLOCK_MONOTONIC_COARSE:
        case CLOCK_MONOTONIC_RAW:
        case CLOCK_BOOTTIME: return offsets_ns[1];
        default: return 0;
    }
}

static void add_ns(struct timespec *time, int64_t ns) {
    int64_t rest = time->tv_nsec + ns % NS_PER_S;
    time->tv_sec += ns / NS_PER_S;
    if (rest >= NS_PER_S) time->tv_sec += 1, rest -= NS_PER_S;
    if (rest < 0) time->tv_sec -= 1, rest += NS_PER_S;
    time->tv_nsec = rest;
}

static struct timespec in_kernel_time(const struct timespec *deadline, clockid_t clock) {
    struct timespec time = *deadline;
    add_ns(&time, -offset_of(clock));
    if (time.tv_sec < 0) time.tv_sec = 0;  // long ago
    return time;
}

// The default version of a symbol is the first that ever was, for some: conditions have had two layouts.
static void *next_of(const char *name, const char *version) {
    void *found = version == NULL ? NULL : dlvsym(RTLD_NEXT, name, version);
    return found != NULL ? found : dlsym(RTLD_NEXT, name);
}

#define NEXT(name, version)                                                     \
    static __typeof__(name) *next;                                              \
    if (next == NULL) next = (__typeof__(name) *)next_of(#name, version)

int clock_gettime(clockid_t clock, struct timespec *time) {
    NEXT(clock_gettime, NULL);
    int failed = next(clock, time);
    if (!failed) add_ns(time, offset_of(clock));
    return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    (void)zone;  // obsolete
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    if (!failed) *time = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told != NULL) *told = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(
    pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
    NEXT(pthread_cond_timedwait, "GLIBC_2.3.2");
    // The clock of a condition cannot be read.
    clockid_t clock = deadline->tv_sec > EARLIEST_REALTIME_S ? CLOCK_REALTIME : CLOCK_MONOTONIC;
    struct timespec kernel_time = in_kernel_time(deadline, clock);
    return next(condition, mutex, &kernel_time);
}

int pthread_cond_clockwait(
    pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
    const struct timespec *restrict deadline) {
    NEXT(pthread_cond_clockwait, NULL);
    struct timespec kernel_time = in_kernel_time(deadline, clock);
    return next(condition, mutex, clock, &kernel_time);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
    NEXT(pthread_mutex_timedlock, NULL);
    struct timespec kernel_time = in_kernel_time(deadline, CLOCK_REALTIME);
    return next(mutex, &kernel_time);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    NEXT(sem_timedwait, NULL);
    struct timespec kernel_time = in_kernel_time(deadline, CLOCK_REALTIME);
    return next(semaphore, &kernel_time);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict deadline) {
    NEXT(sem_clockwait, NULL);
    struct timespec kernel_time = in_kernel_time(deadline, clock);
    return next(semaphore, clock, &kernel_time);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *length, struct timespec *rest) {
    NEXT(clock_nanosleep, NULL);
    if (!(flags & TIMER_ABSTIME)) return next(clock, flags, length, rest);
    struct timespec kernel_time = in_kernel_time(length, clock);
    return next(clock, flags, &kernel_time, rest);
}
