/* Redirects calls of libc by a loaded libnccl to the mock, in its relocation table; nothing on disk changes. */
#include <elf.h>
#include <link.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../mock_cuda.h"

#if defined(__x86_64__)
enum { RELOCATION_OF_CALLS = R_X86_64_JUMP_SLOT };
#else
enum { RELOCATION_OF_CALLS = R_AARCH64_JUMP_SLOT };
#endif

int mock_accept(int socket, struct sockaddr *address, socklen_t *length);
int mock_mkstemp(char *path);
int mock_munmap(void *base, size_t n_bytes);
int mock_open(const char *path, int flags, ...);
int mock_poll(struct pollfd *asked, nfds_t n_asked, int timeout_ms);
ssize_t mock_recv(int socket, void *buffer, size_t n_bytes, int flags);
int mock_sched_yield(void);
int mock_unlink(const char *path);

static const struct {
  const char *name;
  void *mock;
} CALLS[] = {
    {"accept", (void *)mock_accept}, {"mkstemp", (void *)mock_mkstemp}, {"munmap", (void *)mock_munmap},
    {"open", (void *)mock_open},     {"poll", (void *)mock_poll},       {"recv", (void *)mock_recv},
    {"unlink", (void *)mock_unlink}, {"sched_yield", (void *)mock_sched_yield},
};

static int replace(void **slot, void *function) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  if (mprotect((void *)((uintptr_t)slot & ~(page - 1)), page, PROT_READ | PROT_WRITE) != 0) return -1;
  *slot = function;
  return 0;
}

typedef struct {
  uintptr_t within; /* any address of the library */
  uintptr_t base;
  const ElfW(Dyn) *dynamic;
} library_of;

static int find_library(struct dl_phdr_info *info, size_t size, void *asked) {
  (void)size;
  library_of *found = asked;
  const ElfW(Dyn) *dynamic = NULL;
  bool holds = false;
  for (size_t i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
    const uintptr_t start = info->dlpi_addr + segment->p_vaddr;
    if (segment->p_type == PT_DYNAMIC) dynamic = (const void *)start;
    if (segment->p_type == PT_LOAD && found->within >= start && found->within - start < segment->p_memsz) holds = true;
  }
  if (!holds) return 0;
  found->base = info->dlpi_addr;
  found->dynamic = dynamic;
  return 1;
}

int mock_cuda_redirect_calls(const void *within) {
  library_of library = {.within = (uintptr_t)within};
  if (dl_iterate_phdr(find_library, &library) == 0 || library.dynamic == NULL) return -1;
  const ElfW(Rela) *calls = NULL;
  const ElfW(Sym) *symbols = NULL;
  const char *names = NULL;
  size_t n_bytes = 0;
  for (const ElfW(Dyn) *entry = library.dynamic; entry->d_tag != DT_NULL; entry++) {
    if (entry->d_tag == DT_JMPREL) calls = (const void *)entry->d_un.d_ptr;
    if (entry->d_tag == DT_SYMTAB) symbols = (const void *)entry->d_un.d_ptr;
    if (entry->d_tag == DT_STRTAB) names = (const void *)entry->d_un.d_ptr;
    if (entry->d_tag == DT_PLTRELSZ) n_bytes = entry->d_un.d_val;
  }
  if (calls == NULL || symbols == NULL || names == NULL) return -1;
  for (size_t i = 0; i < n_bytes / sizeof *calls; i++) {
    if (ELF64_R_TYPE(calls[i].r_info) != RELOCATION_OF_CALLS) continue;
    const char *name = names + symbols[ELF64_R_SYM(calls[i].r_info)].st_name;
    for (size_t j = 0; j < sizeof CALLS / sizeof *CALLS; j++)
      if (strcmp(name, CALLS[j].name) == 0 && replace((void **)(library.base + calls[i].r_offset), CALLS[j].mock) != 0)
        return -1;
  }
  return 0;
}
