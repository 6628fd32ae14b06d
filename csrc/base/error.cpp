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
    case ErrorCode::kCancelled: return "cancelled";
    case ErrorCode::kArgumentMismatch: return "argument mismatch";
    case ErrorCode::kResultMismatch: return "result mismatch";
    case ErrorCode::kNameNotFound: return "name not found";
  }
  return "unknown";  // a number from a newer peer
}

std::string_view name(ErrorOrigin origin) {
  switch (origin) {
    case ErrorOrigin::kHere: return "here";
    case ErrorOrigin::kOnTheWay: return "on the way";
    case ErrorOrigin::kRequest: return "request";
    case ErrorOrigin::kFunction: return "function";
    case ErrorOrigin::kResult: return "result";
  }
  return "unknown";  // a number from a newer peer
}

ErrorOrigin usualOrigin(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnknownWorker:
    case ErrorCode::kSerialization:
    case ErrorCode::kFrameTooLarge:
    case ErrorCode::kRRefDeleted:
    case ErrorCode::kRendezvous:
    case ErrorCode::kNameNotFound: return ErrorOrigin::kHere;
    case ErrorCode::kNoSuchFunction:
    case ErrorCode::kNotAllowed:
    case ErrorCode::kQuotaExceeded:
    case ErrorCode::kArgumentMismatch: return ErrorOrigin::kRequest;
    case ErrorCode::kUserException:
    case ErrorCode::kBackward: return ErrorOrigin::kFunction;
    case ErrorCode::kResultMismatch: return ErrorOrigin::kResult;
    case ErrorCode::kUnknown:
    case ErrorCode::kTimeout:
    case ErrorCode::kWorkerLost:
    case ErrorCode::kProtocol:
    case ErrorCode::kShutdown:
    case ErrorCode::kRRefCreation:
    case ErrorCode::kRRefCreationTimeout:
    case ErrorCode::kCancelled: break;
  }
  return ErrorOrigin::kOnTheWay;
}

}  // namespace torchrpc
