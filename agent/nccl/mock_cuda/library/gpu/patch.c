/* Replaces functions of a loaded library in memory; nothing on disk changes. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../mock_cuda.h"

#if defined(__x86_64__)
/* mov rax, target; jmp rax */
enum { JUMP_BYTES = 12, STUB_BYTES = 32 };
static void write_jump(unsigned char *at, const void *target) {
  memcpy(at, "\x48\xb8", 2);
  memcpy(at + 2, &target, 8);
  memcpy(at + 10, "\xff\xe0", 2);
}
/* mov rdi, argument; mov rax, target; jmp rax */
static void write_stub(unsigned char *at, const void *argument, const void *target) {
  memcpy(at, "\x48\xbf", 2);
  memcpy(at + 2, &argument, 8);
  write_jump(at + 10, target);
}
#elif defined(__aarch64__)
/* ldr x16, #8; br x16; .quad target */
enum { JUMP_BYTES = 16, STUB_BYTES = 32 };
static void write_jump(unsigned char *at, const void *target) {
  static const uint32_t code[] = {0x58000050, 0xd61f0200};
  memcpy(at, code, sizeof code);
  memcpy(at + 8, &target, 8);
}
/* ldr x0, #16; ldr x16, #20; br x16; nop; .quad argument; .quad target */
static void write_stub(unsigned char *at, const void *argument, const void *target) {
  static const uint32_t code[] = {0x58000080, 0x580000b0, 0xd61f0200, 0xd503201f};
  memcpy(at, code, sizeof code);
  memcpy(at + 16, &argument, 8);
  memcpy(at + 24, &target, 8);
}
#else
#error "the mock CUDA supports x86-64 and aarch64"
#endif

void *mock_find_function(const mock_function *functions, size_t n_functions, const char *name) {
  for (size_t i = 0; i < n_functions; i++)
    if (strcmp(functions[i].name, name) == 0) return functions[i].function;
  return NULL;
}

static cuda_error report_missing(const char *name) {
  fprintf(stderr, "zerotune: the mock CUDA has no %s, and says that it is not supported\n", name);
  return CUDA_ERROR_NOT_SUPPORTED;
}

static int protect(const void *at, size_t n_bytes, int protection) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  const uintptr_t first = (uintptr_t)at & ~(page - 1);
  return mprotect((void *)first, (uintptr_t)at + n_bytes - first, protection);
}

/* "cudaMalloc_ptsz" does the same as "cudaMalloc": per-thread default streams have no effect here. */
static void *function_for(const char *name, int kind) {
  if (kind == MOCK_BLAS) return mock_blas_function != NULL ? mock_blas_function(name) : NULL;
  char base[128];
  const size_t length = strlen(name);
  if (length >= sizeof base) return NULL;
  memcpy(base, name, length + 1);
  for (size_t i = 0; i < 2; i++) {
    const char *suffix = i == 0 ? "_ptsz" : "_ptds";
    if (length > 5 && strcmp(base + length - 5, suffix) == 0) base[length - 5] = '\0';
  }
  return mock_runtime_function(base, kind == MOCK_RUNTIME_OF_NCCL);
}

int mock_cuda_patch(const char *const *names, void *const *addresses, const uint64_t *sizes, size_t n_functions,
                    int kind) {
  unsigned char *stubs = mmap(NULL, n_functions * STUB_BYTES + 1, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stubs == MAP_FAILED) return -1;
  for (size_t i = 0; i < n_functions; i++) {
    if (sizes[i] < JUMP_BYTES) continue; /* returns a constant: a function that CUDA 13 has removed */
    void *target = function_for(names[i], kind);
    if (target == NULL) {
      target = stubs + i * STUB_BYTES;
      write_stub(target, strdup(names[i]), (const void *)report_missing);
    }
    if (protect(addresses[i], JUMP_BYTES, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return -1;
    write_jump(addresses[i], target);
    if (protect(addresses[i], JUMP_BYTES, PROT_READ | PROT_EXEC) != 0) return -1;
    __builtin___clear_cache((char *)addresses[i], (char *)addresses[i] + JUMP_BYTES);
  }
  if (protect(stubs, n_functions * STUB_BYTES + 1, PROT_READ | PROT_EXEC) != 0) return -1;
  __builtin___clear_cache((char *)stubs, (char *)stubs + n_functions * STUB_BYTES);
  return 0;
}
