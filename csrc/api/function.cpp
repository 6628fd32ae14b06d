// The untyped functions behind torchrpc/function.h: registered functions as the core's C++ handlers.

#include <unordered_map>

#include "api/access.h"
#include "api/future_state.h"
#include "base/exception.h"
#include "base/os/forced_unwind.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

namespace {

/// The names of registered functions, for calls that pass the function itself.
struct Names {
  Mutex mutex;
  std::unordered_map<const void*, std::string> by_address TORCHRPC_GUARDED_BY(mutex);
};

// Made on first use, because static initialisers of other files register functions.
Names& names() {
  static Names instance;
  return instance;
}

Result<c10::IValue> resultOf(FutureState& ready) {
  try {
    return ready.wait(kNoLimit);
  } catch (const os::ForcedUnwind&) {
    throw;
  } catch (...) {
    return errorFromException(std::current_exception(), ErrorCode::kUserException);
  }
}

/// Calls the function `name`. The text of an error starts with the worker and that name, because the error may pass
/// through several calls.
Outcome invoke(
    const std::string& name, const Handler& handler, const Call& call, const std::vector<c10::IValue>& args) {
  try {
    return handler(call, args);
  } catch (const os::ForcedUnwind&) {
    throw;
  } catch (...) {
    const auto self = call.node.self();
    throw errorFromException(
        std::current_exception(), ErrorCode::kUserException, self.name, "On " + toString(self) + ", in " + name + ": ");
  }
}

}  // namespace

void registerHandler(std::string name, Handler handler, const void* function) {
  if (name.empty()) throwInvalidArgument("a function cannot be registered under an empty name");
  registerCppHandler(
      name,
      [name, handler = std::move(handler)](
          const CppCall& call, const std::vector<c10::IValue>& args, const CallableRunner::ValueHandler& done) {
        auto outcome = invoke(name, handler, {NodeRef(std::weak_ptr<void>(call.node)), call.from}, args);
        if (!outcome.future) return done(std::move(outcome.value));
        whenReady(*outcome.future, [future = outcome.future, done] { done(resultOf(*future)); });
      });
  if (!function) return;
  auto& all = names();
  MutexLock lock(all.mutex);
  all.by_address.emplace(function, std::move(name));
}

Callable nameOf(const void* function) {
  auto& all = names();
  MutexLock lock(all.mutex);
  if (const auto it = all.by_address.find(function); it != all.by_address.end()) return it->second;
  throw Error(
      ErrorCode::kInvalidArgument,
      "this function is not registered here: write TORCHRPC_FUNCTION(its name) after it, or call it by name");
}

void expectArguments(size_t expected, size_t actual) {
  if (expected == actual) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      "it takes " + std::to_string(expected) + " arguments, the call has " + std::to_string(actual));
}

void rethrowForArgument(size_t index, const Error& error) {
  throw Error(error.code(), "argument " + std::to_string(index) + ": " + error.text(), error.worker());
}

}  // namespace detail
}  // namespace v1
}  // namespace torchrpc
