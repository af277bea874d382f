/* Plans by agreement: two sides of one communicator, each called by a thread of its own, run every call under the same
 * plan while a third thread prepares, promises and commits; and what a call does that is kept waiting. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "harness.h"

#define N_SIDES 2
#if defined __SANITIZE_THREAD__ || defined __SANITIZE_ADDRESS__
#define N_CALLS 60000u
#else
#define N_CALLS 600000u
#endif
#define BYTES 4096

static uint8_t ran[N_SIDES][N_CALLS];
static uint64_t owners[N_SIDES];
static tuned sides[N_SIDES];
static _Atomic int n_calling;

/* A plan whose stages ask for 1 + epoch % 60 channels. */
static void prepare(uint32_t epoch, uint32_t n_stages) {
  the.prepare_end();
  for (uint32_t i = 0; i < n_stages; i++) {
    const zt_plan_row row = {.min_bytes = 1, .max_bytes = 1 << 20, .n_ranks = 2, .n_nodes = 1,
                             .collective = NCCL_ALL_GATHER, .phase = i % 2 ? ZT_ANY_PHASE : 1, .algorithm = NCCL_RING,
                             .n_channels = (uint8_t)(1 + (epoch + i) % 60)};
    CHECK_EQUAL(the.prepare(&row, 1, epoch + i, 0), 0);
  }
}

static int call(tuned side) {
  question asked = ordinary_question(NCCL_ALL_GATHER, BYTES);
  tuner_ask(side, &asked);
  return asked.n_channels;
}

static void *call_on(void *argument) {
  const size_t side = (size_t)argument;
  for (uint32_t i = 0; i < N_CALLS; i++) ran[side][i] = (uint8_t)call(sides[side]);
  atomic_fetch_sub(&n_calling, 1);
  return NULL;
}

static uint64_t newest(void) {
  zt_communicator_state state;
  CHECK(the.communicators(&state, 1) >= 1);
  return state.owner;
}

static void sides_switch_at_one_call(void) {
  for (int side = 0; side < N_SIDES; side++) {
    sides[side] = tuner_init(5, 9, 2, 1);
    owners[side] = newest();
  }
  pthread_t threads[N_SIDES];
  atomic_store(&n_calling, N_SIDES);
  for (size_t side = 0; side < N_SIDES; side++) pthread_create(&threads[side], NULL, call_on, (void *)side);
  const zt_cycle_call cycle[2] = {{BYTES, NCCL_ALL_GATHER, 1}, {BYTES, NCCL_ALL_GATHER, 2}};
  for (uint32_t epoch = 1; atomic_load(&n_calling) > 0; epoch += 3) {
    uint64_t from_calls[3] = {0};
    prepare(epoch, 3);
    bool all_promised = true; /* calls may be too fast for that */
    for (int side = 0; side < N_SIDES; side++) {
      const uint64_t promise = the.promise(owners[side], epoch % 7);
      all_promised &= promise > 0;
      if (promise > from_calls[0]) from_calls[0] = promise;
    }
    from_calls[1] = from_calls[0] + epoch % 50;
    from_calls[2] = from_calls[1] + 1;
    for (int side = 0; side < N_SIDES; side++) {
      if (epoch % 11 == 0 || !all_promised)
        the.release(owners[side]);
      else if (epoch % 13 == 0)
        CHECK_EQUAL(the.commit(owners[side], from_calls, 0, NULL, 0), 0);
      else
        CHECK_EQUAL(the.commit(owners[side], from_calls, 3, cycle, epoch % 3), 0);
    }
  }
  the.prepare_end();
  for (int side = 0; side < N_SIDES; side++) pthread_join(threads[side], NULL);
  uint32_t n_plans = 0;
  for (uint32_t i = 0; i < N_CALLS; i++) {
    CHECK_EQUAL(ran[0][i], ran[1][i]);
    n_plans += i > 0 && ran[0][i] != ran[0][i - 1];
  }
  CHECK(n_plans > 20);
  for (int side = 0; side < N_SIDES; side++) tuner_finalize(sides[side]);
}

static void *call_once(void *argument) {
  *(int *)argument = call(sides[0]);
  return NULL;
}

static void a_promised_call_waits_for_the_outcome(void) {
  sides[0] = tuner_init(5, 9, 2, 1);
  owners[0] = newest();
  CHECK_EQUAL(call(sides[0]), 0);
  prepare(1, 1);
  CHECK_EQUAL(the.promise(owners[0], 0), 2);
  CHECK_EQUAL(the.promise(owners[0], 0), 0); /* promised already */
  pthread_t thread;
  int channels = -1;
  pthread_create(&thread, NULL, call_once, &channels);
  zt_waits waits = {0};
  while (waits.n_waiting == 0) the.waits(&waits);
  const uint64_t below = 1, from_call = 2;
  const zt_cycle_call cycle = {BYTES, NCCL_ALL_GATHER, 1};
  CHECK_EQUAL(the.commit(owners[0], &below, 1, &cycle, 1), -1);
  CHECK_EQUAL(the.commit(owners[0], &from_call, 2, NULL, 0), -1); /* not what was prepared */
  CHECK_EQUAL(the.commit(owners[0], &from_call, 1, &cycle, 1), 0);
  pthread_join(thread, NULL);
  CHECK_EQUAL(channels, 2);
  CHECK_EQUAL(the.commit(owners[0], &from_call, 1, &cycle, 1), -3); /* nothing is promised */
  CHECK_EQUAL(the.commit(12345, &from_call, 1, &cycle, 1), 0);      /* gone: it has no more calls */
  /* Nobody brings the outcome: it passes under what was in force, and never promises again. */
  the.set_patience(0.01);
  CHECK_EQUAL(the.promise(owners[0], 0), 3);
  CHECK_EQUAL(call(sides[0]), 2);
  CHECK_EQUAL(the.commit(owners[0], (uint64_t[]){3}, 1, &cycle, 1), -3);
  CHECK_EQUAL(the.promise(owners[0], 0), 0);
  the.waits(&waits);
  CHECK(waits.n_waits >= 2 && waits.longest_ns >= 10000000);
  the.set_patience(1260);
  the.prepare_end();
  tuner_finalize(sides[0]);
}

static void steps_are_told_by_calls(void) {
  sides[0] = tuner_init(5, 9, 2, 1);
  zt_cycle_call cycle[8];
  for (uint32_t step = 0; step < 4; step++) {
    (void)the.set_step(step);
    for (uint32_t i = 0; i < 3; i++) {
      the.set_phase(i < 2 ? ZT_REGION_FORWARD : ZT_REGION_BACKWARD);
      (void)call(sides[0]);
    }
  }
  zt_communicator_state state;
  CHECK_EQUAL(the.communicators(&state, 1), 1);
  CHECK_EQUAL(state.n_calls, 12);
  CHECK_EQUAL(state.step_began, 10);
  CHECK_EQUAL(state.calls_per_step, 3);
  CHECK_EQUAL(the.cycle(state.owner, 0, cycle, 2), 0); /* no room */
  CHECK_EQUAL(the.cycle(state.owner, 0, cycle, 8), 3);
  CHECK(cycle[0].phase == 1 && cycle[1].phase == 1 && cycle[2].phase == 2);
  CHECK_EQUAL(the.cycle(state.owner, 1, cycle, 8), 3);
  CHECK(cycle[0].phase == 4);
  tuner_finalize(sides[0]);
}

void test_agreed(void) {
  sides_switch_at_one_call();
  the.reset();
  a_promised_call_waits_for_the_outcome();
  the.reset();
  steps_are_told_by_calls();
}
