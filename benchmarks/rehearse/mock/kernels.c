/* The few kernels of torch that are computed, by their names: those that determine the size of its next buffer; and the
 * many that work element by element, of which only the addresses are known.
 *
 * Sizes of pickled objects are filled, joined, added up and compared on the GPU; `nonzero`, and with it the printing of
 * a tensor, counts there. Without the kernel such a size would be random. Larger tensors are left alone. */
#include <stdlib.h>
#include <string.h>

#include "streams.h"

#define UNUSED __attribute__((unused))
#define MOST_KERNELS 65536u /* of these kinds; a power of two */
#define MOST_ELEMENTS 4096
#define MOST_BYTES (64u << 20)
#define MOST_INPUTS 128

typedef enum { NOTHING, FILL, JOIN, SUM, COUNT, COMPARE, ADD, ADD_NUMBER } task;

typedef struct {
  const void *function;
  const char *name; /* mangled; its library keeps it */
  task what;
  uint32_t element_bytes, n_inputs; /* JOIN: that its parameters have room for */
  uint32_t n_addresses;             /* of one that works element by element */
} known_kernel;

static known_kernel known[MOST_KERNELS];

/* ---- names ---- */

static uint32_t number_after(const char *name, const char *word) {
  const char *const at = strstr(name, word);
  return at != NULL ? (uint32_t)strtoul(at + strlen(word), NULL, 10) : 0;
}

/* Of C++'s mangled name of a type */
static uint32_t bytes_of_type(const char *type) {
  if (strncmp(type, "N3c104Half", 10) == 0 || strncmp(type, "N3c108BFloat16", 14) == 0) return 2;
  switch (type[0]) {
  case 'l':
  case 'm':
  case 'd':
    return 8;
  case 'i':
  case 'j':
  case 'f':
    return 4;
  case 's':
  case 't':
    return 2;
  case 'a':
  case 'h':
  case 'b':
    return 1;
  default:
    return 0;
  }
}

static known_kernel recognise(const char *name) {
  known_kernel found = {.what = NOTHING};
  const char *at;
  if (strstr(name, "vectorized_elementwise_kernel") != NULL || strstr(name, "unrolled_elementwise_kernelI") != NULL)
    found.n_addresses = number_after(name, "IPcLm");
  if ((at = strstr(name, "CatArrayBatchedCopy")) != NULL && strstr(at, "EEEjLi") != NULL) {
    found.element_bytes = number_after(at, "OpaqueTypeILj");
    const char *const dimensions = strstr(at, "EEEjLi") + strlen("EEEjLi");
    found.n_inputs = number_after(dimensions, "ELi");
    if (found.element_bytes > 0 && found.n_inputs > 0 && found.n_inputs <= MOST_INPUTS) found.what = JOIN;
  } else if (strstr(name, "vectorized_elementwise_kernel") != NULL || strstr(name, "LoadWithoutCast") != NULL) {
    if ((at = strstr(name, "11FillFunctorI")) != NULL) {
      found.element_bytes = bytes_of_type(at + strlen("11FillFunctorI"));
      if (found.element_bytes > 0) found.what = FILL;
    } else if (strstr(name, "14CompareFunctorIlE") != NULL) {
      found.what = COMPARE;
    } else if (strstr(name, "CUDAFunctor_addIlE") != NULL) {
      found.what = ADD;
    } else if (strstr(name, "CUDAFunctorOnSelf_addIlE") != NULL) {
      found.what = ADD_NUMBER;
    }
  } else if (strstr(name, "reduce_kernel") != NULL && strstr(name, "sum_functorIlll") != NULL) {
    found.what = SUM;
  } else if (strstr(name, "DeviceReduceSingleTileKernel") != NULL && (at = strstr(name, "9NonZeroOpI")) != NULL) {
    found.element_bytes = bytes_of_type(at + strlen("9NonZeroOpI"));
    if (found.element_bytes > 0) found.what = COUNT;
  }
  return found;
}

static known_kernel *slot_of(const void *function) {
  size_t at = ((uintptr_t)function >> 4) & (MOST_KERNELS - 1);
  for (size_t i = 0; i < MOST_KERNELS; i++, at = (at + 1) & (MOST_KERNELS - 1))
    if (known[at].function == function || known[at].function == NULL) return &known[at];
  return NULL;
}

/* Libraries register their kernels when they are loaded, one after another. */
static void register_function(UNUSED void **handle, const void *function, UNUSED char *device_function,
                              const char *name) {
  known_kernel found = recognise(name);
  known_kernel *const slot = found.what != NOTHING || found.n_addresses > 0 ? slot_of(function) : NULL;
  if (slot == NULL) return;
  found.function = function;
  found.name = name;
  *slot = found;
}

static const mock_function functions[] = {{"__cudaRegisterFunction", (void *)register_function}};

void *mock_kernel_function(const char *name) { return MOCK_FIND(functions, name); }

/* ---- at work, in the order of the stream ---- */

typedef struct {
  operation base;
  const char *name;
  task what;
  uint32_t element_bytes, n_inputs;
  int64_t n_elements;
  char *to;
  const char *from[MOST_INPUTS];
  uint64_t offsets[MOST_INPUTS], n_bytes[MOST_INPUTS];
  char value[16]; /* the functor */
} computation;

static int64_t integer_at(const computation *one, int input, int64_t index) {
  return ((const int64_t *)(const void *)one->from[input])[index];
}

/* Elements with a bit that is set */
static int32_t count(const char *elements, int64_t n_elements, uint32_t element_bytes) {
  static const char zero[8];
  int32_t n_found = 0;
  for (int64_t i = 0; i < n_elements; i++) n_found += memcmp(elements + i * element_bytes, zero, element_bytes) != 0;
  return n_found;
}

static bool run(operation *self, uint64_t *ready_ns) {
  const computation *const one = (computation *)self;
  int64_t sum = 0;
  int32_t n_found;
  bool is_there = mock_use(one->name, one->to, 1, self->issued_ns, *ready_ns);
  for (size_t i = 0; i < MOST_INPUTS && one->from[i] != NULL; i++)
    is_there &= mock_use(one->name, one->from[i], 1, self->issued_ns, *ready_ns);
  if (!is_there) return true;
  switch (one->what) {
  case FILL:
    for (int64_t i = 0; i < one->n_elements; i++)
      memcpy(one->to + i * one->element_bytes, one->value, one->element_bytes);
    break;
  case JOIN:
    for (uint32_t i = 0; i < one->n_inputs; i++) memmove(one->to + one->offsets[i], one->from[i], one->n_bytes[i]);
    break;
  case SUM:
    for (int64_t i = 0; i < one->n_elements; i++) sum += integer_at(one, 0, i);
    memcpy(one->to, &sum, sizeof sum);
    break;
  case COUNT:
    n_found = count(one->from[0], one->n_elements, one->element_bytes);
    memcpy(one->to, &n_found, sizeof n_found);
    break;
  case COMPARE:
    for (int64_t i = 0; i < one->n_elements; i++) {
      const int64_t a = integer_at(one, 0, i), b = integer_at(one, 1, i);
      const bool results[] = {a >= b, a > b, a <= b, a < b}; /* torch's CompareOpType */
      one->to[i] = results[one->value[0] & 3];
    }
    break;
  default:
    for (int64_t i = 0; i < one->n_elements; i++) {
      int64_t words[2]; /* the factor of the added tensor, or the number and its factor */
      memcpy(words, one->value, sizeof words);
      const int64_t added = one->what == ADD ? integer_at(one, 1, i) * words[0] : words[0] * words[1];
      const int64_t result = integer_at(one, 0, i) + added;
      memcpy(one->to + i * (int64_t)sizeof result, &result, sizeof result);
    }
  }
  return true;
}

static operation *copy(const operation *self) {
  computation *const made = malloc(sizeof *made);
  if (made != NULL) memcpy(made, self, sizeof *made);
  return made != NULL ? &made->base : NULL;
}

static const operation_kind COMPUTATION = {run, NULL, copy, NULL, false};

static bool on_device(const void *pointer) {
  int file;
  uint64_t offset;
  return mock_locate(pointer, &file, &offset);
}

/* (int n, functor, array of the output's and the inputs' addresses, ...) */
static bool read_elementwise(computation *one, void **parameters) {
  static const struct {
    uint32_t n_value_bytes, n_inputs;
  } shapes[] = {[COMPARE] = {1, 2}, [ADD] = {8, 2}, [ADD_NUMBER] = {16, 1}, [FILL] = {0, 0}};
  int n;
  char *pointers[3] = {NULL, NULL, NULL};
  const uint32_t n_inputs = shapes[one->what].n_inputs;
  memcpy(&n, parameters[0], sizeof n);
  memcpy(one->value, parameters[1], one->what == FILL ? one->element_bytes : shapes[one->what].n_value_bytes);
  memcpy(pointers, parameters[2], (1 + n_inputs) * sizeof *pointers);
  one->n_elements = n;
  one->to = pointers[0];
  bool ours = on_device(one->to);
  for (uint32_t i = 0; i < n_inputs; i++) ours &= on_device(one->from[i] = pointers[1 + i]);
  return n <= MOST_ELEMENTS && ours;
}

/* (output, {addresses, offsets, sizes along the dimension, elements, ...}, strides, dimension, its stride): along the first
 * dimension inputs lie one after another. */
static bool read_join(computation *one, void **parameters, const known_kernel *kernel, unsigned n_inputs) {
  int dimension;
  uint32_t stride;
  const char *const inputs = parameters[1];
  const uint32_t *const offsets = (const uint32_t *)(const void *)(inputs + sizeof(char *) * kernel->n_inputs);
  const uint32_t *const n_elements = offsets + 2 * kernel->n_inputs;
  uint64_t n_bytes = 0;
  memcpy(&one->to, parameters[0], sizeof one->to);
  memcpy(&dimension, parameters[3], sizeof dimension);
  memcpy(&stride, parameters[4], sizeof stride);
  if (dimension != 0 || n_inputs > kernel->n_inputs) return false;
  one->n_inputs = n_inputs;
  memcpy(one->from, inputs, n_inputs * sizeof *one->from);
  for (unsigned i = 0; i < n_inputs; i++) {
    one->offsets[i] = (uint64_t)offsets[i] * stride * kernel->element_bytes;
    n_bytes += one->n_bytes[i] = (uint64_t)n_elements[i] * kernel->element_bytes;
    if (!on_device(one->from[i])) return false;
  }
  return n_bytes <= MOST_BYTES && on_device(one->to);
}

/* ReduceOp: {..., element_size_bytes, num_inputs, num_outputs, ..., src, dst[2], three buffers that small sums have not,
 * base_idx, {accumulate, final_output, noutputs}}; what lies between differs by release, and partly is not initialised. */
static bool read_sum(computation *one, void **parameters) {
  enum { CONFIGURATION = 4, N_WORDS = 512 };
  int32_t shape[3];
  memcpy(shape, (const char *)parameters[0] + CONFIGURATION * sizeof(int32_t), sizeof shape);
  if (shape[0] != 8 || shape[1] > MOST_ELEMENTS || shape[2] != 1) return false;
  one->n_elements = shape[1];
  const char *const *words = parameters[0];
  for (size_t i = 0; i < N_WORDS; i++)
    if (on_device(words[i]) && on_device(words[i + 1]) && words[i + 3] == NULL && words[i + 4] == NULL &&
        words[i + 5] == NULL && words[i + 6] == NULL && (uintptr_t)words[i + 7] >> 32 == 1) {
      one->from[0] = words[i];
      one->to = (char *)(uintptr_t)words[i + 1];
      return true;
    }
  return false;
}

/* ({empty functor, input}, output, elements, ...) */
static bool read_count(computation *one, void **parameters) {
  one->from[0] = ((const char *const *)parameters[0])[1];
  memcpy(&one->to, parameters[1], sizeof one->to);
  memcpy(&one->n_elements, parameters[2], sizeof one->n_elements);
  return one->n_elements >= 0 && one->n_elements <= MOST_ELEMENTS && on_device(one->from[0]) && on_device(one->to);
}

/* (int n, functor, array of addresses, ...) */
static void read_uses(mock_uses *uses, void **parameters, const known_kernel *kernel) {
  if (kernel->n_addresses > MOCK_MAX_USES) return;
  uses->by = kernel->name;
  memcpy(uses->at, parameters[2], kernel->n_addresses * sizeof *uses->at);
}

cuda_error mock_compute(const void *function, cuda_dim3 grid, void **parameters, void *stream, mock_uses *uses) {
  const known_kernel *const kernel = slot_of(function);
  if (kernel == NULL || kernel->function == NULL) return CUDA_SUCCESS;
  if (kernel->n_addresses > 0) read_uses(uses, parameters, kernel);
  if (kernel->what == NOTHING) return CUDA_SUCCESS;
  computation *const made = calloc(1, sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  made->base.kind = &COMPUTATION;
  made->name = kernel->name;
  made->what = kernel->what;
  made->element_bytes = kernel->element_bytes;
  const bool readable = kernel->what == JOIN    ? read_join(made, parameters, kernel, grid.y)
                        : kernel->what == SUM   ? read_sum(made, parameters)
                        : kernel->what == COUNT ? read_count(made, parameters)
                                                : read_elementwise(made, parameters);
  if (readable) {
    *uses = (mock_uses){0}; /* the computation reports them */
    return mock_enqueue(stream, &made->base);
  }
  free(made);
  return CUDA_SUCCESS;
}
