/* Communicators and events that come and go in any order. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "nccl_profiling.h"

#define N_POOL 1024

static const launched reduce = {.collective = NCCL_REDUCE_SCATTER, .count = 64, .n_channels = 2, .algorithm = NCCL_RING,
                                .protocol = NCCL_SIMPLE};

#define N_ORDERS 24

/* The order-th permutation of 0, 1, 2, 3. */
static void permute(int order, int out[4]) {
  int left[4] = {0, 1, 2, 3};
  for (int n = 4; n > 0; n--) {
    const int chosen = order % n;
    order /= n;
    out[4 - n] = left[chosen];
    for (int i = chosen; i + 1 < n; i++) left[i] = left[i + 1];
  }
}

/* Two communicators of one shape, created either way round and destroyed in every order, tuner and profiler
 * apart. */
static void any_order_of_ends(void) {
  int ends[N_ORDERS][4];
  for (int order = 0; order < N_ORDERS; order++) permute(order, ends[order]);
  for (size_t i = 0; i < 2 * N_ORDERS; i++) {
    const int *const order = ends[i / 2];
    the.reset();
    profiled profilers[2];
    tuned tuners[2];
    for (int c = 0; c < 2; c++) {
      const uint64_t id = 70 + (uint64_t)c;
      if (i % 2) tuners[c] = tuner_init(5, id, 8, 1);
      profilers[c] = profiler_init(5, id, 8, 1, c);
      if (!(i % 2)) tuners[c] = tuner_init(5, id, 8, 1);
      CHECK(tuners[c].context == profilers[c].context);
    }
    CHECK(tuners[0].context != tuners[1].context);
    CHECK_EQUAL(counted().n_communicators, 2);
    the.set_observing(1);
    for (int step = 0; step < 4; step++) {
      for (int c = 0; c < 2; c++) { /* whoever is left still works */
        int tuner_left = 0, profiler_left = 0;
        for (int later = step; later < 4; later++) {
          tuner_left |= order[later] == c;
          profiler_left |= order[later] == 2 + c;
        }
        question asked = ordinary_question(NCCL_REDUCE_SCATTER, 1024);
        if (tuner_left) tuner_ask(tuners[c], &asked);
        zt_record record;
        if (!profiler_left) continue;
        run_collective(profilers[c], &reduce, 2, 100, 200);
        CHECK_EQUAL(drained(&record, 1), 1);
        CHECK_EQUAL(record.comm_id, 70 + c);
        CHECK_EQUAL(record.rank, c);
      }
      const int end = order[step];
      if (end < 2)
        tuner_finalize(tuners[end]);
      else
        profiler_finalize(profilers[end - 2]);
    }
    event_mask = 0;
    the.set_observing(0);
    event_mask = 5;
    the.set_observing(1);
    CHECK_EQUAL(event_mask, 5); /* nobody's any more */
  }
}

/* Ranks in one process share commId: each pairs on its own thread, here by turns on one. */
static void equal_ids_pair_in_turn(void) {
  profiled first = profiler_init(5, 9, 2, 1, 0);
  tuned first_tuner = tuner_init(5, 9, 2, 1);
  profiled second = profiler_init(5, 9, 2, 1, 1);
  tuned second_tuner = tuner_init(5, 9, 2, 1);
  CHECK(first.context == first_tuner.context && second.context == second_tuner.context);
  CHECK(first.context != second.context);
  tuner_finalize(first_tuner);
  profiler_finalize(second);
  tuner_finalize(second_tuner);
  profiler_finalize(first);
}

static void *init_elsewhere(void *made) {
  *(tuned *)made = tuner_init(4, 0, 8, 1);
  return NULL;
}

typedef struct {
  profiled profiler;
  tuned tuner;
  pthread_t thread;
} half;

static void *init_tuner_alone(void *argument) {
  half *its = argument;
  its->thread = pthread_self();
  its->tuner = tuner_init(4, 0, 8, 1);
  return NULL;
}

static void *init_profiler_alone(void *argument) {
  half *its = argument;
  its->thread = pthread_self();
  its->profiler = profiler_init(4, 5, 8, 1, 0);
  return NULL;
}

/* A thread that is gone leaves its pthread_self() to the next one: that is another's communicator all the same. */
static void a_later_thread_of_the_same_id_does_not_pair(void) {
  half first = {0}, second = {0};
  int n_tries = 0;
  do {
    if (n_tries > 0) {
      tuner_finalize(first.tuner);
      profiler_finalize(second.profiler);
    }
    pthread_t thread;
    pthread_create(&thread, NULL, init_tuner_alone, &first);
    pthread_join(thread, NULL);
    pthread_create(&thread, NULL, init_profiler_alone, &second);
    pthread_join(thread, NULL);
    CHECK(first.tuner.context != second.profiler.context);
  } while (!pthread_equal(first.thread, second.thread) && ++n_tries < 1000);
  tuner_finalize(first.tuner);
  profiler_finalize(second.profiler);
}

/* Abort: no kernel will ever report its end, on any of the job's communicators. */
static void ends_without_a_word_are_waited_for_once(void) {
  enum { N_COMMUNICATORS = 32 };
  profiled profilers[N_COMMUNICATORS];
  tuned tuners[N_COMMUNICATORS];
  the.set_observing(1);
  for (int i = 0; i < N_COMMUNICATORS; i++) {
    profilers[i] = profiler_init(7, 80 + (uint64_t)i, 8, 1, 0);
    tuners[i] = tuner_init(7, 80 + (uint64_t)i, 8, 1);
    stop_event(profilers[i], start_coll(profilers[i], NULL, &reduce));
  }
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int i = 0; i < N_COMMUNICATORS; i++) {
    tuner_finalize(tuners[i]);
    profiler_finalize(profilers[i]);
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  CHECK(end.tv_sec - begin.tv_sec < 5); /* 0.2 s each, and more on a busy machine */
  the.set_observing(0);
  zt_record record;
  while (drained(&record, 1) > 0) continue;
}

static void other_shapes_and_ids_do_not_pair(void) {
  profiled profiler = profiler_init(4, 5, 8, 1, 0);
  tuned other_shape = tuner_init(4, 0, 16, 2), other_id = tuner_init(5, 6, 8, 1), elsewhere;
  pthread_t thread;
  pthread_create(&thread, NULL, init_elsewhere, &elsewhere);
  pthread_join(thread, NULL);
  CHECK(elsewhere.context != profiler.context);
  tuned same = tuner_init(4, 0, 8, 1);
  CHECK(other_shape.context != profiler.context && same.context == profiler.context);
  CHECK(other_id.context != profiler.context);
  tuner_finalize(other_shape);
  tuner_finalize(same);
  tuner_finalize(other_id);
  tuner_finalize(elsewhere);
  profiler_finalize(profiler);
}

/* Collectives in flight when their communicator goes: counted, and their late ends touch nobody else. */
static void ends_with_events_in_flight(void) {
  profiled dying = profiler_init(5, 1, 8, 1, 0), living = profiler_init(5, 2, 8, 1, 0);
  the.set_observing(1);
  zt_record record;
  void *half = start_coll(dying, NULL, &reduce);
  void *channel = start_kernel_channel(dying, half, 0, 100), *never_stopped = start_coll(dying, NULL, &reduce);
  stop_event(dying, half);
  profiler_finalize(dying);
  CHECK_EQUAL(drained(&record, 1), 1); /* the half that the host had stopped */
  CHECK_EQUAL(record.timing_source, 3);
  CHECK_EQUAL(counted().n_abandoned_events, 1);
  void *reused[2] = {start_coll(living, NULL, &reduce), start_coll(living, NULL, &reduce)};
  stop_kernel_channel(dying, channel, 200);
  stop_event(dying, half);
  stop_event(dying, never_stopped);
  CHECK(start_kernel_channel(dying, half, 1, 100) != NULL);
  CHECK_EQUAL(drained(&record, 1), 0);
  for (int i = 0; i < 2; i++) {
    stop_event(living, reused[i]);
    for (int c = 0; c < 2; c++) stop_kernel_channel(living, start_kernel_channel(living, reused[i], c, 100), 300);
    CHECK_EQUAL(drained(&record, 1), 1);
    CHECK_EQUAL(record.comm_id, 2);
    CHECK(record.duration_us == 0.2f);
  }
  profiler_finalize(living);
}

/* Kernel channels may be over before the host has stopped the event. */
static void kernel_first(void) {
  profiled profiler = profiler_init(5, 1, 8, 1, 0);
  the.set_observing(1);
  zt_record record;
  void *coll = start_coll(profiler, NULL, &reduce);
  for (int c = 0; c < 2; c++) stop_kernel_channel(profiler, start_kernel_channel(profiler, coll, c, 100), 300);
  CHECK_EQUAL(drained(&record, 1), 0);
  stop_event(profiler, coll);
  CHECK_EQUAL(drained(&record, 1), 1);
  CHECK_EQUAL(record.timing_source, 1);
  profiler_finalize(profiler);
}

static void exhausted_pool_is_counted(void) {
  static void *handles[N_POOL + 10];
  profiled profiler = profiler_init(5, 1, 8, 1, 0);
  the.set_observing(1);
  for (int lap = 0; lap < 3; lap++) {
    for (int i = 0; i < N_POOL + 10; i++) handles[i] = start_coll(profiler, NULL, &reduce);
    CHECK_EQUAL(counted().n_lost_events, 10 * (lap + 1));
    for (int i = 0; i < N_POOL + 10; i++) {
      stop_event(profiler, handles[i]);
      for (int c = 0; c < 2; c++) stop_kernel_channel(profiler, start_kernel_channel(profiler, handles[i], c, 1), 2);
    }
    static zt_record records[2 * N_POOL];
    CHECK_EQUAL(drained(records, 2 * N_POOL), N_POOL);
  }
  profiler_finalize(profiler);
}

static void no_context_does_no_harm(void) {
  for (int version = 2; version <= 6; version++) {
    tuned none = {.version = version};
    question asked = ordinary_question(NCCL_ALL_GATHER, 4096);
    tuner_ask(none, &asked);
    tuner_finalize(none);
  }
  for (int version = 3; version <= 7; version++) {
    profiled none = {.version = version};
    run_collective(none, &reduce, 1, 100, 200);
    profiler_finalize(none);
  }
}

static _Atomic int masks_end;

static void *switch_observing(void *unused) {
  for (uint32_t on = 1; !masks_end; on = !on) the.set_observing(on);
  return unused;
}

/* Where each communicator has a mask, it goes with it: the sanitizers see a write by a switch that comes too late. */
static void masks_end_while_observing_is_switched(void) {
  pthread_t thread;
  masks_end = 0;
  pthread_create(&thread, NULL, switch_observing, NULL);
  for (int i = 0; i < 2000; i++) {
    void *context;
    int *mask = calloc(1, sizeof *mask);
    CHECK_EQUAL(the.profiler_v3->init(&context, mask), NCCL_SUCCESS);
    CHECK_EQUAL(the.profiler_v3->finalize(context), NCCL_SUCCESS);
    free(mask);
  }
  masks_end = 1;
  pthread_join(thread, NULL);
}

void test_lifetimes(void) {
  static void (*const each[])(void) = {any_order_of_ends,  equal_ids_pair_in_turn,    other_shapes_and_ids_do_not_pair,
                                       ends_with_events_in_flight, kernel_first,      exhausted_pool_is_counted,
                                       no_context_does_no_harm,    masks_end_while_observing_is_switched,
                                       a_later_thread_of_the_same_id_does_not_pair,
                                       ends_without_a_word_are_waited_for_once};
  for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) {
    the.reset();
    each[i]();
  }
}
