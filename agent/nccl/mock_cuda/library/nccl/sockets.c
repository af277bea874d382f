/* NCCL's ranks poll their sockets in a loop while they wait for each other. On a real cluster each has its own core.
 * Here they share few cores, and would slow the rank for which they wait. So a poll without a result sleeps for a
 * moment. */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <time.h>

#include "../mock_cuda.h"

enum {
  MOMENT_MS = 1,      /* poll()'s shortest timeout */
  POLL_MOST_MS = 20, /* limits how long the end of a communicator waits for a thread */
};

static bool has_nothing(void) { return errno == EAGAIN || errno == EWOULDBLOCK; }

static bool is_readable(int socket) {
  struct pollfd asked = {.fd = socket, .events = POLLIN};
  const bool came = poll(&asked, 1, MOMENT_MS) > 0;
  errno = EAGAIN;
  return came;
}

ssize_t mock_recv(int socket, void *buffer, size_t n_bytes, int flags) {
  const ssize_t got = recv(socket, buffer, n_bytes, flags);
  return got < 0 && has_nothing() && is_readable(socket) ? recv(socket, buffer, n_bytes, flags) : got;
}

int mock_accept(int socket, struct sockaddr *address, socklen_t *length) {
  const int got = accept(socket, address, length);
  return got < 0 && has_nothing() && is_readable(socket) ? accept(socket, address, length) : got;
}

/* NCCL's service threads check every half second whether the communicator is destroyed, and its end waits for them. */
int mock_poll(struct pollfd *asked, nfds_t n_asked, int timeout_ms) {
  return poll(asked, n_asked, timeout_ms > POLL_MOST_MS ? POLL_MOST_MS : timeout_ms);
}

static _Atomic uint64_t away_ns;

void mock_cuda_set_away_ms(double away_ms) { atomic_store(&away_ns, (uint64_t)(away_ms * 1e6)); }

/* NCCL's proxies yield their core whenever they find nothing to do, and on a busy host get it back late. */
int mock_sched_yield(void) {
  const uint64_t n_ns = atomic_load(&away_ns);
  if (n_ns == 0) return sched_yield();
  const struct timespec pause = {(time_t)(n_ns / 1000000000u), (long)(n_ns % 1000000000u)};
  return nanosleep(&pause, NULL);
}
