// SPDX-License-Identifier: Apache-2.0
// Counts a process's calls of the CUDA driver, when preloaded.
//
// MAX opens libcuda.so.1 with dlopen and finds its functions with dlsym. This
// library stands before dlsym and gives out, for each function named below,
// one that counts and goes on to the driver's. A process that asks for one
// gets a file of its own in the folder $DRIVER_CALLS: an array of Entry, mapped
// into the process, so that others see the counts while it runs.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// What waits for the device, and the launch of a captured step.
#define COUNTED(X)                                                       \
  X(cuStreamSynchronize, (void *stream), (stream))                       \
  X(cuEventSynchronize, (void *event), (event))                          \
  X(cuCtxSynchronize, (void), ())                                        \
  X(cuMemcpyDtoH_v2, (void *to, uint64_t from, size_t n), (to, from, n)) \
  X(cuGraphLaunch, (void *graph, void *stream), (graph, stream))

typedef struct {
  char name[24];
  _Atomic uint64_t calls;
} Entry;

#define INDEX(counted, parameters, arguments) INDEX_##counted,
enum { COUNTED(INDEX) COUNT };

static Entry *entries;

#define FUNCTION(counted, parameters, arguments)                  \
  static int (*real_##counted) parameters;                        \
  static int count_##counted parameters {                         \
    atomic_fetch_add_explicit(&entries[INDEX_##counted].calls, 1, \
                              memory_order_relaxed);              \
    return real_##counted arguments;                              \
  }
COUNTED(FUNCTION)

static void map_entries(void) {
  const char *folder = getenv("DRIVER_CALLS");
  char path[4096];
  size_t size = COUNT * sizeof(Entry);
  int length = snprintf(path, sizeof path, "%s/%d", folder ? folder : "",
                        (int)getpid());
  int file = -1;
  void *memory = MAP_FAILED;
  if (folder && length < (int)sizeof path)
    file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file >= 0 && ftruncate(file, size) == 0)
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    // Uncounted calls must not look like none.
    fprintf(stderr, "driver_calls: DRIVER_CALLS=%s: cannot map %s\n",
            folder ? folder : "", path);
    abort();
  }
  close(file);
  entries = memory;
#define NAME(counted, parameters, arguments) \
  strcpy(entries[INDEX_##counted].name, #counted);
  COUNTED(NAME)
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

typedef void *Dlsym(void *, const char *);

static Dlsym *real_dlsym(void) {
  static Dlsym *found;
  // The version since glibc 2.34, then the first of x86-64 and of aarch64.
  static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5",
                                         "GLIBC_2.17"};
  for (size_t i = 0; !found && i < sizeof versions / sizeof *versions; i++)
    found = (Dlsym *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
  if (!found) {
    fprintf(stderr, "driver_calls: no dlsym in the C library: %s\n",
            dlerror());
    abort();
  }
  return found;
}

void *dlsym(void *handle, const char *name) {
  Dlsym *find = real_dlsym();
#define GIVE(counted, parameters, arguments)      \
  if (strcmp(name, #counted) == 0) {              \
    void *address = find(handle, name);           \
    if (!address) return NULL;                    \
    pthread_once(&once, map_entries);             \
    real_##counted = (int (*) parameters)address; \
    return (void *)count_##counted;               \
  }
  COUNTED(GIVE)
  // A jump, not a call: RTLD_NEXT goes by the caller, and jemalloc uses it.
  return find(handle, name);
}
