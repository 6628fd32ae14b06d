#include "base/random.h"

#include <cerrno>
#include <cstdlib>
#include <random>
#include <sys/random.h>
#include <system_error>

namespace torchrpc {

std::string secureRandomBytes(size_t bytes) {
  std::string out(bytes, '\0');
#ifdef __APPLE__
  ::arc4random_buf(out.data(), bytes);  // the kernel's generator seeds it
#else
  for (size_t have = 0; have < bytes;) {
    const auto got = ::getrandom(out.data() + have, bytes - have, 0);
    if (got < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "getrandom");
    if (got > 0) have += static_cast<size_t>(got);
  }
#endif
  return out;
}

uint64_t randomNumber() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace torchrpc
