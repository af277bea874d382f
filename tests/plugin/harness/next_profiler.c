/* Another profiler beside ours: each is told what it asked for, and our records are what they are without it. */
#include "nccl_profiling.h"

enum { GROUP = 1, COLL = 2, PROXY_OP = 8, KERNEL_CHANNEL = 64, COLL_API = 512, EVERYTHING = 0xFF };

static const launched gather = {.collective = NCCL_ALL_GATHER, .count = 1000, .n_channels = 4,
                                .algorithm = NCCL_RING, .protocol = NCCL_LL};

static int count_of(int version, const char *name) { return *of_profiler(version, name); }

static int told(int version, int type) { return of_profiler(version, "n_of_type")[__builtin_ctz((unsigned)type)]; }

static void forget_told(int version) {
  memset(of_profiler(version, "n_of_type"), 0, 16 * sizeof(int));
  static const char *const counts[] = {"n_inits", "n_ends", "n_starts", "n_stops", "n_records", "n_orphans"};
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) *of_profiler(version, counts[i]) = 0;
}

static profiled begin(int version, int others_version, int mask) {
  the.reset();
  event_mask = 0;
  beside = (other_profiler){.newest = others_version, .mask = mask};
  forget_told(others_version);
  return profiler_init(version, 0xC0FFEE, 16, 2, 3);
}

static size_t n_records(void) {
  zt_record records[64];
  return drained(records, 64);
}

static void each_gets_what_it_asked_for(int version, int others_version) {
  const int api = version >= 5 && others_version >= 5 ? COLL_API : 0;
  const int kernels = 4;
  profiled profiler = begin(version, others_version, COLL);
  tuned tuner = tuner_init(5, 0xC0FFEE, 16, 2);
  CHECK_EQUAL(event_mask, COLL | (version < 7 ? 0 : KERNEL_CHANNEL));
  CHECK(strcmp(the.next_profiler(), "other") == 0);
  run_collective(profiler, &gather, kernels, 1000, 2000); /* ours asks for nothing */
  CHECK_EQUAL(n_records(), 0);
  CHECK_EQUAL(told(others_version, GROUP), 1); /* NCCL tells of what an event is in, too */
  CHECK_EQUAL(told(others_version, COLL), 1);
  CHECK_EQUAL(told(others_version, COLL_API), api ? 1 : 0);
  CHECK_EQUAL(told(others_version, KERNEL_CHANNEL), 0);
  CHECK_EQUAL(count_of(others_version, "n_stops"), count_of(others_version, "n_starts"));

  the.set_observing(1); /* both */
  CHECK_EQUAL(event_mask & (COLL | KERNEL_CHANNEL), COLL | KERNEL_CHANNEL);
  run_collective(profiler, &gather, kernels, 1000, 2000);
  CHECK_EQUAL(told(others_version, COLL), 2);
  CHECK_EQUAL(told(others_version, KERNEL_CHANNEL), 0);
  CHECK_EQUAL(n_records(), 1);

  *of_profiler(others_version, "mask") = 0; /* it asks for nothing any more, and says so through its pointer */
  **(int **)(void *)of_profiler(others_version, "nccl_mask") = 0;
  (void)n_records();
  CHECK_EQUAL(event_mask & GROUP, 0);
  run_collective(profiler, &gather, kernels, 1000, 2000);
  CHECK_EQUAL(told(others_version, COLL), 2);
  CHECK_EQUAL(n_records(), 1);
  **(int **)(void *)of_profiler(others_version, "nccl_mask") = KERNEL_CHANNEL;
  the.set_observing(0);
  CHECK_EQUAL(event_mask, KERNEL_CHANNEL);
  run_collective(profiler, &gather, kernels, 1000, 2000);
  CHECK_EQUAL(told(others_version, COLL), 3);
  CHECK_EQUAL(told(others_version, KERNEL_CHANNEL), kernels);
  CHECK_EQUAL(count_of(others_version, "n_records"), version >= 4 ? kernels : 0);
  CHECK_EQUAL(count_of(others_version, "n_orphans"), 3); /* groups alone */

  tuner_finalize(tuner);
  profiler_finalize(profiler);
  CHECK_EQUAL(count_of(others_version, "n_inits"), 1);
  CHECK_EQUAL(count_of(others_version, "n_ends"), 1);
  CHECK_EQUAL(counted().n_next_profiler_faults, 0);
}

static void its_faults_are_counted_and_its_init_may_fail(int version) {
  profiled profiler = begin(version, version, COLL | KERNEL_CHANNEL);
  *of_profiler(version, "fails") = 1;
  run_collective(profiler, &gather, 2, 1000, 2000);
  const uint64_t n_faults = counted().n_next_profiler_faults;
  CHECK_EQUAL(n_faults, count_of(version, "n_starts"));
  CHECK_EQUAL(count_of(version, "n_stops"), 0); /* what did not start is not stopped */
  profiler_finalize(profiler);
  CHECK_EQUAL(counted().n_next_profiler_faults, n_faults + 1);

  the.reset();
  event_mask = 0;
  forget_told(version);
  beside = (other_profiler){.newest = version, .mask = EVERYTHING, .init_fails = 1};
  profiler = profiler_init(version, 1, 16, 2, 0);
  CHECK_EQUAL(event_mask, version < 7 ? 0 : KERNEL_CHANNEL);
  the.set_observing(1);
  run_collective(profiler, &gather, 0, 0, 0);
  CHECK_EQUAL(count_of(version, "n_starts"), 0);
  profiler_finalize(profiler);
  CHECK_EQUAL(count_of(version, "n_ends"), 0);
  CHECK_EQUAL(counted().n_next_profiler_faults, 1);
}

static void one_that_is_off_is_left_alone(int version) {
  *of_profiler(version, "is_off") = 1;
  profiled profiler = begin(version, version, EVERYTHING);
  *of_profiler(version, "is_off") = 0;
  CHECK_EQUAL(event_mask, version < 7 ? 0 : KERNEL_CHANNEL);
  the.set_observing(1);
  run_collective(profiler, &gather, 0, 0, 0);
  profiler_finalize(profiler);
  CHECK_EQUAL(count_of(version, "n_starts"), 0);
  CHECK_EQUAL(count_of(version, "n_ends"), 0);
  CHECK_EQUAL(counted().n_next_profiler_faults, 0);
}

/* Proxies of other processes run in this one, with contexts of theirs. */
static void contexts_of_elsewhere_go_on_unchanged(int version) {
  profiled profiler = begin(version, version, PROXY_OP);
  int elsewhere;
  *(void **)(void *)of_profiler(version, "foreign_context") = &elsewhere;
  profiled foreign = profiler;
  foreign.context = &elsewhere;
  nccl_event_v5 event = {.type = PROXY_OP};
  void *handle = version >= 5 ? start_event(foreign, &event) : NULL;
  if (version == 4) {
    nccl_event_v4 narrow = {.type = PROXY_OP};
    CHECK_EQUAL(the.profiler_v4->start_event(&elsewhere, &handle, &narrow), 0);
  }
  stop_event(profiler, handle);
  CHECK_EQUAL(count_of(version, "n_starts"), 1);
  CHECK_EQUAL(count_of(version, "n_stops"), 1);
  profiler_finalize(profiler);
}

/* Some of it is not translated: a v3 profiler under a v5 NCCL is left out. */
static void what_is_too_old_is_left_out(void) {
  profiled profiler = begin(5, 3, EVERYTHING);
  CHECK(the.next_profiler()[0] == '\0');
  CHECK_EQUAL(event_mask, 0);
  CHECK_EQUAL(counted().n_next_profiler_faults, 1);
  profiler_finalize(profiler);
}

/* All that is tested of ours alone. */
static void ours_is_as_without_it(other_profiler other) {
  beside = other;
  event_mask = 0;
  the.reset();
  test_profiler();
  the.reset();
  test_passages();
  the.reset();
  test_shifts();
  the.reset();
  test_groups();
}

static void threads_beside_it(void) {
  the.reset();
  beside = (other_profiler){0};
  *of_profiler(5, "mask") = EVERYTHING;
  setenv("ZEROTUNE_NEXT_PROFILER", "other5", 1);
  test_threads();
  CHECK(strcmp(the.next_profiler(), "other") == 0);
}

void test_next_profiler(void) {
  for (int version = 3; version <= 7; version++) {
    each_gets_what_it_asked_for(version, version);
    if (version >= 5)
      for (int older = 4; older < version; older++) each_gets_what_it_asked_for(version, older);
    its_faults_are_counted_and_its_init_may_fail(version);
    one_that_is_off_is_left_alone(version);
    if (version >= 4) contexts_of_elsewhere_go_on_unchanged(version);
  }
  what_is_too_old_is_left_out();
  static const other_profiler each[] = {{.newest = 7},
                                        {.newest = 7, .mask = EVERYTHING},
                                        {.newest = 7, .mask = EVERYTHING, .reuses = 1},
                                        {.newest = 7, .mask = EVERYTHING, .untracked = GROUP | COLL_API},
                                        {.newest = 7, .mask = EVERYTHING, .untracked = COLL | KERNEL_CHANNEL},
                                        {.newest = 7, .mask = EVERYTHING, .untracked = ~UINT64_C(0)}};
  for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) ours_is_as_without_it(each[i]);
  threads_beside_it();
}
