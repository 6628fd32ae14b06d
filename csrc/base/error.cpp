#include "base/error.h"

namespace torchrpc {

std::string_view name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kUnknown: return "unknown";
    case ErrorCode::kInvalidArgument: return "invalid argument";
    case ErrorCode::kTimeout: return "timeout";
    case ErrorCode::kWorkerLost: return "worker lost";
    case ErrorCode::kUnknownWorker: return "unknown worker";
    case ErrorCode::kUserException: return "user exception";
    case ErrorCode::kNoSuchFunction: return "no such function";
    case ErrorCode::kSerialization: return "serialization";
    case ErrorCode::kFrameTooLarge: return "frame too large";
    case ErrorCode::kProtocol: return "protocol";
    case ErrorCode::kShutdown: return "shutdown";
    case ErrorCode::kRRefCreation: return "rref creation";
    case ErrorCode::kRRefDeleted: return "rref deleted";
    case ErrorCode::kRendezvous: return "rendezvous";
    case ErrorCode::kBackward: return "backward";
    case ErrorCode::kNotAllowed: return "not allowed";
    case ErrorCode::kRRefCreationTimeout: return "RRef creation timeout";
    case ErrorCode::kQuotaExceeded: return "quota exceeded";
  }
  return "unknown";  // a number from a newer peer
}

}  // namespace torchrpc
