#include "transport/native/auth/sodium.h"

#include <sodium.h>

#include "base/error.h"

namespace torchrpc::native {

void startSodium() {
  if (sodium_init() < 0) throw Error(ErrorCode::kUnknown, "libsodium cannot start: the system has no random numbers");
}

}  // namespace torchrpc::native
