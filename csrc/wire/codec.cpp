#include "wire/codec.h"

#include "base/error.h"

namespace torchrpc {

void Reader::fail(const char* what) { throw Error(ErrorCode::kProtocol, std::string("malformed message: ") + what); }

}  // namespace torchrpc
