/* Numbers that no NCCL says, through every entry point: nothing outside of its own memory is read or written. */
#include "harness.h"

#include <limits.h>

static const int numbers[] = {INT_MIN, INT_MIN + 1, -65536, -3, -1, 0, 1, 2, 3, 6, 7, 8, 9, 16, 17, 255, 256, 65536, INT_MAX};
#define N_NUMBERS (sizeof numbers / sizeof numbers[0])
enum { MOST_ALGORITHMS = 16, MOST_PROTOCOLS = 8 }; /* beyond, a table is not read at all */

static int ask(tuned tuner, int collective, size_t n_bytes, int n_pipe_ops, float *table, int n_algorithms, int n_protocols) {
  float **costs = (float **)(void *)table;
  int n_channels = 5;
#define REGISTERED(v)                                                                                           \
  case v:                                                                                                       \
    CHECK_EQUAL(the.tuner_v##v->get_coll_info(tuner.context, collective, n_bytes, n_pipe_ops, costs, n_algorithms, \
                                              n_protocols, 0, &n_channels),                                     \
                NCCL_SUCCESS);                                                                                  \
    break
  switch (tuner.version) {
  case 2: {
    int algorithm = -1, protocol = -1;
    CHECK_EQUAL(the.tuner_v2->get_coll_info(tuner.context, collective, n_bytes, n_algorithms, n_protocols, n_pipe_ops,
                                            &algorithm, &protocol, &n_channels),
                NCCL_SUCCESS);
    CHECK(algorithm >= -1 && algorithm < NCCL_MAX_ALGORITHMS && protocol >= -1 && protocol < NCCL_N_PROTOCOLS);
    break;
  }
  case 3:
    CHECK_EQUAL(the.tuner_v3->get_coll_info(tuner.context, collective, n_bytes, n_pipe_ops, costs, n_algorithms,
                                            n_protocols, &n_channels),
                NCCL_SUCCESS);
    break;
    REGISTERED(4);
    REGISTERED(5);
    REGISTERED(6);
    REGISTERED(7);
  }
  CHECK(n_channels == 5 || (n_channels > 0 && n_channels <= NCCL_MAX_CHANNELS));
  return n_channels;
}

/* The table has as many cells as it says where that is possible, else NCCL's 7 x 3: a sanitizer guards its ends. */
static void tables_of_any_size(tuned tuner) {
  for (size_t i = 0; i < N_NUMBERS; i++)
    for (size_t j = 0; j < N_NUMBERS; j++) {
      const int n_algorithms = numbers[i], n_protocols = numbers[j];
      const int is_read =
          n_algorithms > 0 && n_algorithms <= MOST_ALGORITHMS && n_protocols > 0 && n_protocols <= MOST_PROTOCOLS;
      const size_t n_cells = is_read ? (size_t)(n_algorithms * n_protocols) : 21;
      float *table = malloc(n_cells * sizeof *table);
      for (size_t cell = 0; cell < n_cells; cell++) table[cell] = 100.0f;
      for (size_t k = 0; k < N_NUMBERS; k++) {
        const int n_channels = ask(tuner, NCCL_ALL_GATHER, 2048, numbers[k], table, n_algorithms, n_protocols);
        if (tuner.version > 2 && !is_read) CHECK_EQUAL(n_channels, 5);
        (void)ask(tuner, numbers[k], (size_t)numbers[(i + k) % N_NUMBERS], 1, table, n_algorithms, n_protocols);
      }
      for (size_t cell = 0; cell < n_cells; cell++) CHECK(is_read || table[cell] == 100.0f);
      free(table);
    }
}

/* Communicators of a size that cannot be are served, and nothing is decided or recorded for them. */
static void communicators_of_any_size(int version) {
  static const size_t sizes[] = {0, 1, 2, 65536, 65537, INT_MAX, UINT32_MAX, (size_t)UINT32_MAX + 9, SIZE_MAX};
  float table[21] = {0};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
    for (size_t j = 0; j < sizeof sizes / sizeof sizes[0]; j++) {
      static zt_record records[64];
      tuned tuner = tuner_init(version, 7, sizes[i], sizes[j]);
      while (drained(records, 64) > 0) continue;
      (void)ask(tuner, NCCL_ALL_GATHER, 2048, 1, table, 7, 3);
      const int is_possible = sizes[i] > 0 && sizes[i] <= 65536 && sizes[j] > 0 && sizes[j] <= sizes[i];
      CHECK_EQUAL(drained(records, 64), is_possible);
      if (is_possible) CHECK(records[0].n_ranks == sizes[i] && records[0].n_nodes == sizes[j]);
      tuner_finalize(tuner);
    }
}

static void plans_with_any_row(void) {
  static zt_plan_row rows[2];
  unsigned char *bytes = (unsigned char *)rows;
  uint64_t state = 1;
  for (int round = 0; round < 20000; round++) {
    for (size_t i = 0; i < sizeof rows; i++) {
      state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
      bytes[i] = state >> 61 ? (unsigned char)(state >> 33) % 8 : (unsigned char)(state >> 33);
    }
    const int loaded = the.load(rows, 2, (uint32_t)round, (uint32_t)(state >> 32));
    CHECK(loaded <= 0 && loaded >= -4);
    CHECK_EQUAL(the.flip((uint32_t)round), loaded == 0 ? 0 : -1);
  }
  CHECK_EQUAL(the.load(rows, ZT_MAX_PLAN_ROWS + 1, 1, 0), -1);
  CHECK_EQUAL(the.load(rows, UINT32_MAX, 1, 0), -1);
}

static void events_of_any_number(void) {
  for (size_t i = 0; i < N_NUMBERS; i++) {
    const uint64_t word = (uint64_t)(int64_t)numbers[i];
    void *context, *handle = NULL, *channel = NULL;
    int mask = 0;
    CHECK_EQUAL(the.profiler_v7->init(&context, 9, &mask, "", numbers[i], 16, numbers[i], NULL), NCCL_SUCCESS);
    nccl_event_v7 event = {.type = NCCL_PROFILE_COLL,
                           .rank = numbers[i],
                           .coll_v7 = {.coll.coll = {.sequence = word,
                                                     .collective = "AllGather",
                                                     .count = word,
                                                     .datatype = "ncclFloat32",
                                                     .n_channels = (uint8_t)word,
                                                     .algorithm = "RING",
                                                     .protocol = "LL"}}};
    CHECK_EQUAL(the.profiler_v7->start_event(context, &handle, &event), NCCL_SUCCESS);
    for (int number = 0; number < 256; number++) {
      nccl_event_v7 kernel = {.type = NCCL_PROFILE_KERNEL_CHANNEL,
                              .parent = handle,
                              .kernel_channel = {.channel = (uint8_t)number, .start_ns = word}};
      CHECK_EQUAL(the.profiler_v7->start_event(context, &channel, &kernel), NCCL_SUCCESS);
      nccl_event_state_args args = {.kernel_channel_stop_ns = ~word};
      CHECK_EQUAL(the.profiler_v7->record_event_state(channel, 22, &args), NCCL_SUCCESS);
      CHECK_EQUAL(the.profiler_v7->stop_event(channel), NCCL_SUCCESS);
      CHECK_EQUAL(the.profiler_v7->stop_event((void *)(uintptr_t)(word << 16 | (uint64_t)number)), NCCL_SUCCESS);
    }
    CHECK_EQUAL(the.profiler_v7->stop_event(handle), NCCL_SUCCESS);
    CHECK_EQUAL(the.profiler_v7->finalize(context), NCCL_SUCCESS);
  }
}

void test_impossible_numbers(void) {
  static const zt_plan_row rows[] = {
      {2048, 2048, 16, 2, NCCL_ALL_GATHER, 0, NCCL_PAT, NCCL_SIMPLE, 4, 0, 64},
      {4096, SIZE_MAX, 16, 2, NCCL_ALL_GATHER, 0, ZT_NO_OPINION, ZT_NO_OPINION, 64, 0, 32768},
  };
  for (int version = 2; version <= 7; version++) {
    the.reset();
    the.set_recording(1);
    the.set_observing(1);
    adopt(rows, 2, 1, 0);
    tuned tuner = tuner_init(version, 1, 16, 2);
    tables_of_any_size(tuner);
    tuner_finalize(tuner);
    communicators_of_any_size(version);
  }
  the.reset();
  plans_with_any_row();
  the.reset();
  the.set_observing(1);
  events_of_any_number();
}
