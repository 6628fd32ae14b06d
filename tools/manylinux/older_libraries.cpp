// Linked into the wheels' binaries: what they would otherwise need from a glibc after 2.28 or a libstdc++ after GCC 8.
//
// Hidden symbols bind within the library that this object is part of, so nothing else in the process sees them.

#include <condition_variable>
#include <dlfcn.h>
#include <mutex>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define HIDDEN(name) __asm__(name) __attribute__((visibility("hidden")))

namespace {

constexpr long kNanosecondsPerSecond = 1'000'000'000;

timespec now(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return time;
}

using ClockWait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);

}  // namespace

// glibc 2.32. libstdc++ asks it whether reference counts may do without atomic operations: never.
extern char singleThreaded HIDDEN("__libc_single_threaded");
char singleThreaded = 0;

// glibc 2.30.
extern "C" pid_t threadId() HIDDEN("gettid");
pid_t threadId() { return static_cast<pid_t>(syscall(SYS_gettid)); }

// glibc 2.30. With an older one, a change of the system clock while a thread waits changes how long it waits.
extern "C" int clockWait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*)
    HIDDEN("pthread_cond_clockwait");
int clockWait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* deadline) {
  static const auto from_glibc = reinterpret_cast<ClockWait>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (from_glibc) return from_glibc(condition, mutex, clock, deadline);
  const timespec then = now(clock);
  timespec real = now(CLOCK_REALTIME);
  real.tv_sec += deadline->tv_sec - then.tv_sec;
  real.tv_nsec += deadline->tv_nsec - then.tv_nsec;
  if (real.tv_nsec < 0) {
    real.tv_nsec += kNanosecondsPerSecond;
    --real.tv_sec;
  } else if (real.tv_nsec >= kNanosecondsPerSecond) {
    real.tv_nsec -= kNanosecondsPerSecond;
    ++real.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &real);
}

// GLIBCXX_3.4.30 (GCC 12): std::condition_variable::wait. The version before it differs in the exception specification.
extern "C" void conditionWait(std::condition_variable*, std::unique_lock<std::mutex>&)
    HIDDEN("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void conditionWait(std::condition_variable* condition, std::unique_lock<std::mutex>& lock) {
  pthread_cond_wait(condition->native_handle(), lock.mutex()->native_handle());
}

// GLIBCXX_3.4.29 (GCC 11): std::stringbuf::str() of C++20, which the older one of the same name does for C++17. A
// member function is called as a function whose first argument is the object.
extern "C++" std::string olderContents(const std::stringbuf*) __asm__(
    "_ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
extern "C++" std::string contents(const std::stringbuf*)
    HIDDEN("_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
std::string contents(const std::stringbuf* buffer) { return olderContents(buffer); }
