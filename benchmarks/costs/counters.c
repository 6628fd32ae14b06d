// A library for LD_PRELOAD that counts heap allocations, mutex acquisitions and copied bytes of a process, by the place
// that asks for them. __main__.py compiles it and reads the counts.
//
// The counts are in the file $TORCHRPC_COSTS_FOLDER/PID, a table of `struct Place` to which all threads add, and which
// another process may read at any time. The first place has no counts: its key is 1 while the library counts, which the
// reader sets. With TORCHRPC_COSTS_DEPTH=n a place is the innermost n frames of the stack instead of one return
// address; n is at most 12.
//
// A call inside glibc does not pass through here: the reacquired mutex of a condition variable is not counted.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum Kind { kAllocation = 1, kMutex = 2, kCopy = 3 };
enum { kPlaces = 1 << 14, kFrames = 12, kSkipped = 8 };

struct Place {
  _Atomic uint64_t key;  // 0 if the place is not used
  uint64_t kind;
  _Atomic uint64_t count;
  _Atomic uint64_t bytes;
  uint64_t frames[kFrames];
};

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static struct Place* places;
static int depth = 1;
static __thread int counting __attribute__((tls_model("initial-exec")));

static int stackFrom(void* caller, uint64_t* frames) {
  if (depth == 1) {
    frames[0] = (uint64_t)caller;
    return 1;
  }
  void* stack[kFrames + kSkipped];
  const int found = backtrace(stack, depth + kSkipped);
  int first = 0;
  while (first < found && stack[first] != caller) ++first;
  int n = 0;
  for (; first < found && n < depth; ++first) frames[n++] = (uint64_t)stack[first];
  return n;
}

static void count(enum Kind kind, uint64_t bytes, void* caller) {
  if (!places || counting || !atomic_load_explicit(&places[0].key, memory_order_relaxed)) return;
  counting = 1;
  uint64_t frames[kFrames] = {0};
  const int n = stackFrom(caller, frames);
  uint64_t key = kind;
  for (int i = 0; i < n; ++i) key = (key ^ frames[i]) * 0x9e3779b97f4a7c15u, key ^= key >> 29;
  if (key == 0) key = 1;
  for (uint64_t i = 0; i < kPlaces; ++i) {
    const uint64_t index = (key + i) % kPlaces;
    if (index == 0) continue;
    struct Place* place = &places[index];
    uint64_t there = atomic_load_explicit(&place->key, memory_order_relaxed);
    if (there == 0 && atomic_compare_exchange_strong(&place->key, &there, key)) {
      place->kind = kind;
      for (int f = 0; f < n; ++f) place->frames[f] = frames[f];
      there = key;
    }
    if (there == key) {
      atomic_fetch_add_explicit(&place->count, 1, memory_order_relaxed);
      atomic_fetch_add_explicit(&place->bytes, bytes, memory_order_relaxed);
      break;
    }
  }
  counting = 0;
}

__attribute__((constructor)) static void start(void) {
  const char* folder = getenv("TORCHRPC_COSTS_FOLDER");
  if (!folder) return;
  const char* frames = getenv("TORCHRPC_COSTS_DEPTH");
  if (frames) depth = atoi(frames);
  if (depth > kFrames) depth = kFrames;
  void* first[1];
  backtrace(first, 1);  // loads libgcc_s, which allocates
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
  const int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(struct Place) * kPlaces) != 0) return;
  void* mapped = mmap(0, sizeof(struct Place) * kPlaces, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return;
  madvise(mapped, sizeof(struct Place) * kPlaces, MADV_DONTFORK);
  places = mapped;
}

static void stop(void) { places = 0; }  // a child of fork() does not have the table
__attribute__((constructor)) static void stopInChildren(void) { pthread_atfork(0, 0, stop); }

#define CALLER __builtin_return_address(0)

void* malloc(size_t size) {
  count(kAllocation, size, CALLER);
  return __libc_malloc(size);
}
void* calloc(size_t number, size_t size) {
  count(kAllocation, number * size, CALLER);
  return __libc_calloc(number, size);
}
void* realloc(void* old, size_t size) {
  count(kAllocation, size, CALLER);
  return __libc_realloc(old, size);
}
void* memalign(size_t alignment, size_t size) {
  count(kAllocation, size, CALLER);
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  count(kAllocation, size, CALLER);
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** out, size_t alignment, size_t size) {
  count(kAllocation, size, CALLER);
  *out = __libc_memalign(alignment, size);
  return *out ? 0 : 12;  // ENOMEM
}

// C++'s operator new, in all its forms; operator delete of libstdc++ calls free.
static void* allocate(size_t size, size_t alignment, void* caller) {
  count(kAllocation, size, caller);
  void* memory = alignment ? __libc_memalign(alignment, size) : __libc_malloc(size);
  if (!memory) abort();
  return memory;
}
void* _Znwm(size_t size) { return allocate(size, 0, CALLER); }
void* _Znam(size_t size) { return allocate(size, 0, CALLER); }
void* _ZnwmRKSt9nothrow_t(size_t size, void* tag) { return (void)tag, allocate(size, 0, CALLER); }
void* _ZnamRKSt9nothrow_t(size_t size, void* tag) { return (void)tag, allocate(size, 0, CALLER); }
void* _ZnwmSt11align_val_t(size_t size, size_t alignment) { return allocate(size, alignment, CALLER); }
void* _ZnamSt11align_val_t(size_t size, size_t alignment) { return allocate(size, alignment, CALLER); }

// Counts, and calls the function of the same name in the libraries behind this one.
#define LOCKS(name, Lock)                            \
  int name(Lock* lock) {                             \
    static int (*real)(Lock*) = 0;                   \
    if (!real) real = dlsym(RTLD_NEXT, #name);       \
    count(kMutex, 0, CALLER);                        \
    return real(lock);                               \
  }
LOCKS(pthread_mutex_lock, pthread_mutex_t)
LOCKS(pthread_mutex_trylock, pthread_mutex_t)
LOCKS(pthread_rwlock_rdlock, pthread_rwlock_t)
LOCKS(pthread_rwlock_wrlock, pthread_rwlock_t)

// Copies of a size that the compiler knows are not calls.
#define COPIES(name, Size, ...)                                                    \
  void* name(void* to, const void* from, size_t size __VA_ARGS__) {                \
    static void* (*real)(void*, const void*, size_t) = 0;                          \
    if (!real) real = dlsym(RTLD_NEXT, Size);                                      \
    count(kCopy, size, CALLER);                                                    \
    return real(to, from, size);                                                   \
  }
COPIES(memcpy, "memcpy")
COPIES(memmove, "memmove")
COPIES(__memcpy_chk, "memcpy", , size_t limit)
COPIES(__memmove_chk, "memmove", , size_t limit)
