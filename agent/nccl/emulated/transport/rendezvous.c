/* Exchange between the ranks of one emulated communicator: call headers and payloads in anonymous shared memory.
 *
 * The mapping has no name in any file system, so that nothing is left behind when every rank is killed. For each rank
 * it has a counter of published calls, a counter of consumed calls, a ring of call headers and an arena for payloads. A
 * call is published without waiting. A rank that needs its result waits for all ranks' headers and copies data out of
 * their arenas. A living rank holds a POSIX record lock on its byte of the mapping's file. The kernel drops the lock
 * when the process ends, however it ends, and so the other ranks notice.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/memfd.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RV_MAGIC 0x7a65726f72763031ull
#define RV_MAX_RANKS 64u
#define RV_PAGE 4096u
#define RV_ALIGN 64u
#define RV_SPINS 40
#define RV_PROBE_NS 20000000 /* how often a waiting rank checks whether its peers live */

enum rv_result { RV_OK = 0, RV_TIMEOUT = -1, RV_FULL = -2, RV_TOO_LARGE = -3, RV_ABORTED = -4, RV_DEAD = -100 };

typedef struct {
  uint64_t message_bytes;
  uint64_t n_elements;
  double arrival_us;     /* virtual time at which this rank issues the call */
  double contention;     /* share of the call's duration lost to this rank's other communicators */
  uint64_t payload;      /* offset of the payload in the mapping; filled by rv_publish */
  int32_t root;
  uint32_t n_pieces;
  uint8_t collective;
  uint8_t datatype;
  uint8_t redop;
  uint8_t algorithm;     /* 255 = NCCL was not asked */
  uint8_t protocol;
  uint8_t n_channels;
  uint8_t failed;        /* this rank's NCCL returned an error */
  uint8_t even;          /* message_bytes must be equal on all ranks */
  uint32_t chunk_kib;    /* 0 = NCCL's own */
  uint8_t reserved[4];
  uint64_t index;        /* filled by rv_publish */
  uint8_t padding[56];
} rv_header;

_Static_assert(sizeof(rv_header) == 128, "rv_header is mirrored in rendezvous.py");

typedef struct {
  double arrival_us;   /* of the last rank */
  double contention;   /* the largest */
  uint64_t message_bytes; /* the most */
  int32_t failed_rank; /* -1 = none */
  int32_t call_rank;   /* first rank whose call differs from rank 0's, -1 = none */
  int32_t setting_rank;/* first rank whose setting differs from rank 0's, -1 = none */
  int32_t reserved;
} rv_joined;

typedef struct {
  _Alignas(64) uint64_t n_published;
  _Alignas(64) uint64_t n_consumed;
  uint32_t present; /* 0 not yet, 1 present, 2 closed */
} rv_rank;

typedef struct {
  uint64_t magic;
  uint64_t nonce;
  uint64_t arena_bytes;
  uint32_t n_ranks;
  uint32_t n_slots;
  _Alignas(64) uint32_t tick; /* futex word, incremented with every event that a peer may wait for */
  uint32_t n_sleeping;
  uint32_t n_starved; /* ranks that wait for others to consume */
  rv_rank ranks[RV_MAX_RANKS];
} rv_shared;

typedef struct {
  uint64_t offset;
  uint64_t end;
  uint64_t index;
} rv_block;

typedef struct {
  rv_shared *shared;
  char *base;
  uint64_t mapped_bytes;
  int fd;
  uint32_t rank;
  uint32_t aborted;
  rv_block *blocks; /* own live payloads, sorted by offset */
  uint32_t n_blocks;
  uint32_t blocks_capacity;
} rv;

static uint64_t rv_round(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

static uint64_t rv_rings_offset(void) { return rv_round(sizeof(rv_shared), RV_PAGE); }

static uint64_t rv_arenas_offset(const rv_shared *shared) {
  return rv_rings_offset() + rv_round((uint64_t)shared->n_ranks * shared->n_slots * sizeof(rv_header), RV_PAGE);
}

static rv_header *rv_slot(const rv *self, uint64_t index, uint32_t rank) {
  rv_header *ring = (rv_header *)(self->base + rv_rings_offset());
  return ring + (uint64_t)rank * self->shared->n_slots + index % self->shared->n_slots;
}

static uint64_t rv_load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static void rv_notify(rv *self) {
  __atomic_add_fetch(&self->shared->tick, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&self->shared->n_sleeping, __ATOMIC_SEQ_CST) > 0)
    syscall(SYS_futex, &self->shared->tick, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static int64_t rv_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* A sparse file large enough for all ranks; only touched pages cost memory. */
int rv_create(uint32_t n_ranks, uint32_t n_slots, uint64_t arena_bytes, uint64_t nonce) {
  if (n_ranks == 0 || n_ranks > RV_MAX_RANKS) return -1;
  /* Not memfd_create(), which needs glibc 2.27: wheels are for 2.17 and newer. */
  int fd = (int)syscall(SYS_memfd_create, "zerotune-emulated", MFD_CLOEXEC);
  if (fd < 0) return -1;
  rv_shared head = {.magic = RV_MAGIC, .nonce = nonce, .arena_bytes = rv_round(arena_bytes, RV_PAGE),
                    .n_ranks = n_ranks, .n_slots = n_slots};
  uint64_t total = rv_arenas_offset(&head) + n_ranks * head.arena_bytes;
  if (ftruncate(fd, (off_t)total) != 0 || pwrite(fd, &head, sizeof head, 0) != (ssize_t)sizeof head) {
    close(fd);
    return -1;
  }
  return fd;
}

/* Takes ownership of the descriptor. NULL: another file, or it cannot be mapped. */
rv *rv_open(int fd, uint32_t rank, uint64_t nonce) {
  rv_shared head;
  if (pread(fd, &head, sizeof head, 0) != (ssize_t)sizeof head || head.magic != RV_MAGIC ||
      head.nonce != nonce || rank >= head.n_ranks)
    return NULL;
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
  if (fcntl(fd, F_SETLK, &lock) != 0) return NULL;
  uint64_t total = rv_arenas_offset(&head) + head.n_ranks * head.arena_bytes;
  void *base = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) return NULL;
  rv *self = calloc(1, sizeof *self);
  if (self == NULL) {
    munmap(base, total);
    return NULL;
  }
  *self = (rv){.shared = base, .base = base, .mapped_bytes = total, .fd = fd, .rank = rank};
  __atomic_store_n(&self->shared->ranks[rank].present, 1, __ATOMIC_SEQ_CST);
  rv_notify(self);
  return self;
}

void rv_close(rv *self) {
  __atomic_store_n(&self->shared->ranks[self->rank].present, 2, __ATOMIC_SEQ_CST);
  rv_notify(self);
  munmap(self->base, self->mapped_bytes);
  close(self->fd);
  free(self->blocks);
  free(self);
}

void rv_abort(rv *self) {
  __atomic_store_n(&self->aborted, 1, __ATOMIC_SEQ_CST);
  rv_notify(self);
}

static int rv_is_gone(rv *self, uint32_t rank) {
  uint32_t present = __atomic_load_n(&self->shared->ranks[rank].present, __ATOMIC_ACQUIRE);
  if (present != 1) return present == 2; /* a rank that has not opened it yet is not gone */
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
  return rank != self->rank && fcntl(self->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* First rank (from `first` on) that has not reached `goal`, or n_ranks. `what`: 0 published, 1 consumed. */
static uint32_t rv_laggard(const rv *self, int what, uint64_t goal, uint32_t first) {
  for (uint32_t rank = first; rank < self->shared->n_ranks; rank++) {
    const rv_rank *peer = &self->shared->ranks[rank];
    if (rv_load(what == 0 ? &peer->n_published : &peer->n_consumed) < goal) return rank;
  }
  return self->shared->n_ranks;
}

static int rv_await(rv *self, int what, uint64_t goal, int64_t timeout_us) {
  uint32_t laggard = 0;
  for (int spin = 0; spin < RV_SPINS; spin++) {
    laggard = rv_laggard(self, what, goal, laggard);
    if (laggard == self->shared->n_ranks) return RV_OK;
    sched_yield();
  }
  int64_t deadline_ns = timeout_us < 0 ? INT64_MAX : rv_now_ns() + timeout_us * 1000;
  int64_t probe_ns = rv_now_ns() + RV_PROBE_NS;
  for (;;) {
    uint32_t tick = __atomic_load_n(&self->shared->tick, __ATOMIC_SEQ_CST);
    laggard = rv_laggard(self, what, goal, laggard);
    if (laggard == self->shared->n_ranks) return RV_OK;
    if (__atomic_load_n(&self->aborted, __ATOMIC_SEQ_CST)) return RV_ABORTED;
    int64_t now_ns = rv_now_ns();
    if (now_ns >= probe_ns) {
      for (uint32_t rank = laggard; rank < self->shared->n_ranks; rank++)
        if (rv_is_gone(self, rank) && rv_laggard(self, what, goal, rank) == rank) return RV_DEAD - (int)rank;
      probe_ns = now_ns + RV_PROBE_NS;
    }
    if (now_ns >= deadline_ns) return RV_TIMEOUT;
    int64_t nap_ns = probe_ns - now_ns;
    if (nap_ns > deadline_ns - now_ns) nap_ns = deadline_ns - now_ns;
    struct timespec nap = {.tv_sec = 0, .tv_nsec = nap_ns};
    __atomic_add_fetch(&self->shared->n_sleeping, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &self->shared->tick, FUTEX_WAIT, tick, &nap, NULL, 0);
    __atomic_sub_fetch(&self->shared->n_sleeping, 1, __ATOMIC_SEQ_CST);
  }
}

/* Wait until all ranks have published call `index`; to be called without Python's GIL. */
int rv_wait(rv *self, uint64_t index, int64_t timeout_us) { return rv_await(self, 0, index + 1, timeout_us); }

/* Wait until all ranks have consumed call `index`. */
int rv_wait_consumed(rv *self, uint64_t index, int64_t timeout_us) {
  __atomic_add_fetch(&self->shared->n_starved, 1, __ATOMIC_SEQ_CST);
  int result = rv_await(self, 1, index + 1, timeout_us);
  __atomic_sub_fetch(&self->shared->n_starved, 1, __ATOMIC_SEQ_CST);
  return result;
}

int rv_is_ready(const rv *self, uint64_t index) {
  return rv_laggard(self, 0, index + 1, 0) == self->shared->n_ranks;
}

static uint64_t rv_min_consumed(const rv *self) {
  uint64_t least = UINT64_MAX;
  for (uint32_t rank = 0; rank < self->shared->n_ranks; rank++) {
    uint64_t n_consumed = rv_load(&self->shared->ranks[rank].n_consumed);
    if (n_consumed < least) least = n_consumed;
  }
  return least;
}

/* First gap of this rank's arena with `bytes`; arenas are sparse, so low gaps keep memory small. */
static int rv_allocate(rv *self, uint64_t bytes, uint64_t index, uint64_t n_consumed, uint64_t *offset) {
  uint32_t n_live = 0;
  for (uint32_t i = 0; i < self->n_blocks; i++)
    if (self->blocks[i].index >= n_consumed) self->blocks[n_live++] = self->blocks[i];
  self->n_blocks = n_live;
  if (n_live == self->blocks_capacity) {
    uint32_t capacity = n_live ? 2 * n_live : 64;
    rv_block *blocks = realloc(self->blocks, capacity * sizeof *blocks);
    if (blocks == NULL) return RV_TOO_LARGE;
    self->blocks = blocks;
    self->blocks_capacity = capacity;
  }
  uint64_t start = 0;
  uint32_t place = 0;
  while (place < n_live && self->blocks[place].offset < start + bytes) start = self->blocks[place++].end;
  if (start + bytes > self->shared->arena_bytes) return n_live ? RV_FULL : RV_TOO_LARGE;
  memmove(self->blocks + place + 1, self->blocks + place, (n_live - place) * sizeof *self->blocks);
  self->blocks[place] = (rv_block){.offset = start, .end = start + bytes, .index = index};
  self->n_blocks = n_live + 1;
  *offset = rv_arenas_offset(self->shared) + self->rank * self->shared->arena_bytes + start;
  return RV_OK;
}

/* Publish the next call. RV_FULL: consume earlier calls first, then rv_wait_consumed(). */
int rv_publish(rv *self, rv_header *header, const uint64_t *pointers, const uint64_t *bytes) {
  rv_rank *own = &self->shared->ranks[self->rank];
  uint64_t index = own->n_published;
  uint64_t n_consumed = rv_min_consumed(self);
  if (index >= n_consumed + self->shared->n_slots) return RV_FULL;
  uint64_t directory_bytes = rv_round(header->n_pieces * 2 * sizeof(uint64_t), RV_ALIGN);
  uint64_t total = directory_bytes;
  for (uint32_t i = 0; i < header->n_pieces; i++) total += rv_round(bytes[i], RV_ALIGN);
  header->payload = 0;
  if (total > 0) {
    int result = rv_allocate(self, total, index, n_consumed, &header->payload);
    if (result != RV_OK) return result;
    uint64_t *directory = (uint64_t *)(self->base + header->payload);
    uint64_t place = header->payload + directory_bytes;
    for (uint32_t i = 0; i < header->n_pieces; i++) {
      directory[2 * i] = place;
      directory[2 * i + 1] = bytes[i];
      if (bytes[i]) memcpy(self->base + place, (const void *)(uintptr_t)pointers[i], bytes[i]);
      place += rv_round(bytes[i], RV_ALIGN);
    }
  }
  header->index = index;
  *rv_slot(self, index, self->rank) = *header;
  __atomic_store_n(&own->n_published, index + 1, __ATOMIC_RELEASE);
  rv_notify(self);
  return RV_OK;
}

/* Compare all ranks' headers of a call; the result is equal on all ranks. */
void rv_join(const rv *self, uint64_t index, rv_joined *out) {
  const rv_header *first = rv_slot(self, index, 0);
  *out = (rv_joined){.arrival_us = first->arrival_us, .contention = first->contention,
                     .message_bytes = first->message_bytes, .failed_rank = first->failed ? 0 : -1, .call_rank = -1, .setting_rank = -1};
  for (uint32_t rank = 1; rank < self->shared->n_ranks; rank++) {
    const rv_header *peer = rv_slot(self, index, rank);
    if (peer->arrival_us > out->arrival_us) out->arrival_us = peer->arrival_us;
    if (peer->contention > out->contention) out->contention = peer->contention;
    if (peer->message_bytes > out->message_bytes) out->message_bytes = peer->message_bytes;
    if (peer->failed && out->failed_rank < 0) out->failed_rank = (int32_t)rank;
    int same_call = peer->collective == first->collective &&
                    peer->root == first->root && peer->redop == first->redop &&
                    (!first->even || (peer->message_bytes == first->message_bytes &&
                                      peer->datatype == first->datatype && peer->n_pieces == first->n_pieces));
    int same_setting = peer->algorithm == first->algorithm && peer->protocol == first->protocol &&
                       peer->n_channels == first->n_channels && peer->chunk_kib == first->chunk_kib;
    if (!same_call && out->call_rank < 0) out->call_rank = (int32_t)rank;
    if (!same_setting && out->setting_rank < 0) out->setting_rank = (int32_t)rank;
  }
}

const rv_header *rv_peek(const rv *self, uint64_t index, uint32_t rank) { return rv_slot(self, index, rank); }

/* Address of one piece of a rank's payload, and its length; NULL if there is none. */
const void *rv_piece(const rv *self, uint64_t index, uint32_t rank, uint32_t piece, uint64_t *bytes) {
  const rv_header *header = rv_slot(self, index, rank);
  if (header->payload == 0 || piece >= header->n_pieces) return NULL;
  const uint64_t *directory = (const uint64_t *)(self->base + header->payload);
  *bytes = directory[2 * piece + 1];
  return self->base + directory[2 * piece];
}

/* Copy `bytes` from `offset` of a piece; -1 if the piece is shorter. */
int rv_copy(const rv *self, uint64_t index, uint32_t rank, uint32_t piece, uint64_t offset, void *to, uint64_t bytes) {
  uint64_t available = 0;
  const char *from = rv_piece(self, index, rank, piece, &available);
  if (from == NULL) return bytes == 0 ? 0 : -1;
  if (offset + bytes > available) return -1;
  memcpy(to, from + offset, bytes);
  return 0;
}

/* Copy the same piece of every rank, one after another. */
int rv_gather(const rv *self, uint64_t index, uint32_t piece, char *to, uint64_t bytes) {
  for (uint32_t rank = 0; rank < self->shared->n_ranks; rank++)
    if (rv_copy(self, index, rank, piece, 0, to + rank * bytes, bytes) != 0) return -1;
  return 0;
}

void rv_consume(rv *self, uint64_t index) {
  __atomic_store_n(&self->shared->ranks[self->rank].n_consumed, index + 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&self->shared->n_starved, __ATOMIC_SEQ_CST) > 0) rv_notify(self);
}

uint64_t rv_n_published(const rv *self) { return self->shared->ranks[self->rank].n_published; }
