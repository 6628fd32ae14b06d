#include "node/interceptors.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "base/exception.h"
#include "base/log.h"
#include "base/os/forced_unwind.h"
#include "wire/callable_name.h"
#include "wire/codec.h"
#include "wire/metadata.h"

namespace torchrpc {

namespace {

bool isRemote(const Message& message) { return traitsOf(message.kind).operation == Operation::kRemote; }

FunctionKind kindOfFunction(const Message& message) {
  switch (traitsOf(message.kind).callable) {
    case CallableType::kOperator: return FunctionKind::kOperator;
    case CallableType::kScript: return FunctionKind::kScript;
    case CallableType::kCpp: return FunctionKind::kCpp;
    case CallableType::kPython:
    case CallableType::kNone: break;
  }
  return FunctionKind::kPython;
}

/// Shows a call to each interceptor, by `show`. If one of them throws, calls the end functions of the earlier ones with
/// the error.
template <typename Show>
Interceptors::End showToAll(const Interceptors::List& interceptors, const WorkerInfo& self, const Show& show) {
  auto ends = std::make_shared<std::vector<Interceptor::End>>();
  for (const auto& interceptor : interceptors) {
    try {
      if (auto end = show(*interceptor)) ends->push_back(std::move(end));
    } catch (const os::ForcedUnwind&) {
      throw;
    } catch (...) {
      const auto error = errorFromException(std::current_exception(), ErrorCode::kUserException, self.name);
      Interceptors::end(ends, &error);
      throw error;
    }
  }
  return ends->empty() ? nullptr : ends;
}

}  // namespace

std::string functionName(const Message& message) try {
  Reader reader(message.payload);
  switch (traitsOf(message.kind).callable) {
    case CallableType::kOperator:
    case CallableType::kScript: return std::string(reader.getString());
    case CallableType::kCpp: return "cpp_function(" + std::string(reader.getString()) + ")";
    case CallableType::kPython: return callableName(message.kind, message.payload);
    case CallableType::kNone: break;
  }
  return {};
} catch (const Error&) {  // malformed: the runner reports it
  return {};
}

Interceptors::Interceptors(Messenger& next, List interceptors)
    : ForwardingMessenger(next),
      is_empty_(interceptors.empty()),
      list_(std::make_shared<const List>(std::move(interceptors))) {
  const auto all = list();
  if (std::ranges::find(*all, nullptr) != all->end()) throwInvalidArgument("one of the interceptors is null");
}

std::shared_ptr<const Interceptors::List> Interceptors::list() const {
  MutexLock lock(mutex_);
  return list_;
}

void Interceptors::add(std::shared_ptr<Interceptor> interceptor) {
  MutexLock lock(mutex_);
  auto longer = std::make_shared<List>(*list_);
  longer->push_back(std::move(interceptor));
  list_ = std::move(longer);
  is_empty_ = false;
}

void Interceptors::end(const End& end, const Error* error) {
  if (!end) return;
  for (const auto& each : std::views::reverse(*end)) {
    try {
      each(error);
    } catch (const os::ForcedUnwind&) {
      throw;
    } catch (...) {
      const auto thrown = errorFromException(std::current_exception(), ErrorCode::kUserException, "");
      log(LogLevel::kError, "an interceptor threw at the end of a call, which has no effect: " + thrown.text());
    }
  }
}

void Interceptors::request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) {
  if (isEmpty() || !isCall(message.kind)) {
    return ForwardingMessenger::request(to, std::move(message), timeout, std::move(handler));
  }
  try {
    const auto callee = worker(to);
    const auto function = functionName(message);
    auto metadata = metadataOf(message);
    OutgoingCall call{callee, kindOfFunction(message), function, isRemote(message), metadata};
    const auto ends = showToAll(*list(), self(), [&](Interceptor& each) { return each.onSend(call); });
    if (ends) {
      handler = [ends, handler = std::move(handler)](Result<Message> reply) {
        end(ends, reply ? nullptr : &reply.error());
        handler(std::move(reply));
      };
    }
    setMetadata(message, metadata);
  } catch (const Error& error) {
    return handler(error.withOrigin(ErrorOrigin::kHere));
  }
  ForwardingMessenger::request(to, std::move(message), timeout, std::move(handler));
}

Interceptors::End Interceptors::serve(const Request& request) const {
  if (isEmpty()) return nullptr;
  try {
    const auto function = functionName(request.message);
    const auto metadata = metadataOf(request.message);
    const IncomingCall call{
        request.from, kindOfFunction(request.message), function, isRemote(request.message), metadata};
    return showToAll(*list(), self(), [&](Interceptor& each) { return each.onServe(call); });
  } catch (const Error& error) {
    throw error.withOrigin(ErrorOrigin::kRequest);
  }
}

}  // namespace torchrpc
