#include "base/random.h"

#include <cerrno>
#include <cstdlib>
#include <random>
#include <sys/random.h>
#include <system_error>
#include <utility>

namespace torchrpc {

namespace {

void fillSecurely(void* out, size_t bytes) {
#ifdef __APPLE__
  ::arc4random_buf(out, bytes);  // the kernel's generator seeds it
#else
  for (size_t have = 0; have < bytes;) {
    const auto got = ::getrandom(static_cast<char*>(out) + have, bytes - have, 0);
    if (got < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "getrandom");
    if (got > 0) have += static_cast<size_t>(got);
  }
#endif
}

}  // namespace

std::string secureRandomBytes(size_t bytes) {
  std::string out(bytes, '\0');
  fillSecurely(out.data(), bytes);
  return out;
}

uint64_t SecureNumbers::next() {
  MutexLock lock(mutex_);
  if (left_ == 0) {
    fillSecurely(numbers_.data(), sizeof(numbers_));
    left_ = kAtATime;
  }
  return std::exchange(numbers_[--left_], 0);
}

uint64_t randomNumber() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace torchrpc
