/* dlopen and dlsym with their symbol versions before glibc 2.34, which moved them from libdl to libc: so a library that
 * is built on a new Linux can be loaded on an old one. */
#ifndef ZEROTUNE_NEXT_LOADING_H
#define ZEROTUNE_NEXT_LOADING_H

#include <dlfcn.h>

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.17");
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
#endif

#endif
