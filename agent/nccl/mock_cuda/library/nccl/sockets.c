/* NCCL's ranks ask their sockets in a loop while they wait for one another. On a real cluster each has a core to do so;
 * here they share few, and would take them from the rank that is waited for: what finds nothing waits for a moment. */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <time.h>

#include "../mock_cuda.h"

enum {
  MOMENT_MS = 1,      /* poll()'s shortest; a rank that is waited for needs many */
  LOOK_AGAIN_MS = 20, /* the longest that the end of a communicator then waits for a thread */
};

static bool has_nothing(void) { return errno == EAGAIN || errno == EWOULDBLOCK; }

static bool something_came(int socket) {
  struct pollfd asked = {.fd = socket, .events = POLLIN};
  const bool came = poll(&asked, 1, MOMENT_MS) > 0;
  errno = EAGAIN;
  return came;
}

ssize_t mock_recv(int socket, void *buffer, size_t n_bytes, int flags) {
  const ssize_t got = recv(socket, buffer, n_bytes, flags);
  return got < 0 && has_nothing() && something_came(socket) ? recv(socket, buffer, n_bytes, flags) : got;
}

int mock_accept(int socket, struct sockaddr *address, socklen_t *length) {
  const int got = accept(socket, address, length);
  return got < 0 && has_nothing() && something_came(socket) ? accept(socket, address, length) : got;
}

/* Threads that serve others look every half second whether the communicator is gone, and its end waits for them. */
int mock_poll(struct pollfd *asked, nfds_t n_asked, int timeout_ms) {
  return poll(asked, n_asked, timeout_ms > LOOK_AGAIN_MS ? LOOK_AGAIN_MS : timeout_ms);
}

static _Atomic uint64_t away_ns;

void mock_cuda_set_away_ms(double away_ms) { atomic_store(&away_ns, (uint64_t)(away_ms * 1e6)); }

/* NCCL's proxies give their core away whenever they find nothing to do, and on a busy host get it back late. */
int mock_sched_yield(void) {
  const uint64_t n_ns = atomic_load(&away_ns);
  if (n_ns == 0) return sched_yield();
  const struct timespec pause = {(time_t)(n_ns / 1000000000u), (long)(n_ns % 1000000000u)};
  return nanosleep(&pause, NULL);
}
