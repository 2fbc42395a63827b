// SPDX-License-Identifier: Apache-2.0
// Counts a process's calls of the CUDA driver, when preloaded.
//
// MAX opens libcuda.so.1 with dlopen and finds its functions with dlsym. This
// library stands before dlsym and gives out, for each function named below,
// one that counts and goes on to the driver's. CUDA's own libraries, cuBLAS
// among them, ask dlsym for cuGetProcAddress alone and that for the rest, so
// it gives out the same. A process that asks for one gets a file of its own in
// the folder $DRIVER_CALLS: an array of Entry, mapped into the process, so that
// others see the counts while it runs.

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
#define WAITS(X)                                                         \
  X(cuStreamSynchronize, (void *stream), (stream))                       \
  X(cuEventSynchronize, (void *event), (event))                          \
  X(cuCtxSynchronize, (void), ())                                        \
  X(cuMemcpyDtoH_v2, (void *to, uint64_t from, size_t n), (to, from, n)) \
  X(cuGraphLaunch, (void *graph, void *stream), (graph, stream))

// What launches one kernel. Only with -DLAUNCHES: these are called a hundred
// times more often.
#ifdef LAUNCHES
#define KERNELS(X)                                                           \
  X(cuLaunchKernel,                                                          \
    (void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx,       \
     unsigned by, unsigned bz, unsigned shared, void *stream, void **values, \
     void **extra),                                                          \
    (kernel, gx, gy, gz, bx, by, bz, shared, stream, values, extra))         \
  X(cuLaunchKernelEx,                                                        \
    (const void *config, void *kernel, void **values, void **extra),         \
    (config, kernel, values, extra))
#else
#define KERNELS(X)
#endif

#define COUNTED(X) WAITS(X) KERNELS(X)

typedef struct {
  char name[24];
  _Atomic uint64_t calls;
} Entry;

#define INDEX(counted, parameters, arguments) INDEX_##counted,
enum { COUNTED(INDEX) COUNT };

#define NAME(counted, parameters, arguments) #counted,
static const char *const names[] = {COUNTED(NAME)};

static Entry *entries;
static void *reals[COUNT];

#define FUNCTION(counted, parameters, arguments)                   \
  static int count_##counted parameters {                          \
    atomic_fetch_add_explicit(&entries[INDEX_##counted].calls, 1,  \
                              memory_order_relaxed);               \
    return ((int (*) parameters)reals[INDEX_##counted]) arguments; \
  }
COUNTED(FUNCTION)

#define COUNTER(counted, parameters, arguments) (void *)count_##counted,
static void *const counters[] = {COUNTED(COUNTER)};

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
  for (int i = 0; i < COUNT; i++) strcpy(entries[i].name, names[i]);
}

// Returns what counts and goes on to the driver's function at that address.
static void *counter(int index, void *real) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, map_entries);
  // A driver that looks up its own functions by dlsym finds ours.
  if (real != counters[index]) reals[index] = real;
  return counters[index];
}

typedef int Find(const char *, void **, int, uint64_t);
typedef int FindV2(const char *, void **, int, uint64_t, void *);

static Find *real_find;
static FindV2 *real_find_v2;
static FindV2 find_v2;

// Puts counting functions in the place of what cuGetProcAddress has found.
static void replace(const char *name, void **found, int version,
                    uint64_t flags) {
  // It is asked for names without their version, and can find itself.
  size_t length = strlen(name);
  if (version >= 12000 && strcmp(name, "cuGetProcAddress") == 0) {
    if (*found != (void *)find_v2) real_find_v2 = (FindV2 *)*found;
    *found = (void *)find_v2;
  }
  // CUDA's runtime also asks for the forms that have a default stream a thread,
  // which MAX does not use.
  if (flags & 2) return;
  for (int i = 0; i < COUNT; i++)
    if (strncmp(names[i], name, length) == 0 &&
        (!names[i][length] || strcmp(names[i] + length, "_v2") == 0))
      *found = counter(i, *found);
}

static int find(const char *name, void **found, int version, uint64_t flags) {
  int error = real_find(name, found, version, flags);
  if (!error && *found) replace(name, found, version, flags);
  return error;
}

static int find_v2(const char *name, void **found, int version, uint64_t flags,
                   void *status) {
  int error = real_find_v2(name, found, version, flags, status);
  if (!error && *found) replace(name, found, version, flags);
  return error;
}

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
  Dlsym *look_up = real_dlsym();
  for (int i = 0; i < COUNT; i++)
    if (strcmp(name, names[i]) == 0) {
      void *address = look_up(handle, name);
      return address ? counter(i, address) : NULL;
    }
  if (strcmp(name, "cuGetProcAddress") == 0) {
    real_find = (Find *)look_up(handle, name);
    return real_find ? (void *)find : NULL;
  }
  if (strcmp(name, "cuGetProcAddress_v2") == 0) {
    real_find_v2 = (FindV2 *)look_up(handle, name);
    return real_find_v2 ? (void *)find_v2 : NULL;
  }
  // A jump, not a call: RTLD_NEXT goes by the caller, and jemalloc uses it.
  return look_up(handle, name);
}
