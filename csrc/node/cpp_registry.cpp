#include "node/cpp_registry.h"

#include <algorithm>

#include "base/log.h"
#include "node/node.h"
#include "node/rref_value.h"
#include "wire/metadata.h"

namespace torchrpc {

namespace {

/// The errors of registrations that could not be thrown.
struct RegistrationErrors {
  ForkSafeMutex mutex;
  std::string text TORCHRPC_GUARDED_BY(mutex);
  bool are_checked TORCHRPC_GUARDED_BY(mutex) = false;
};

// Both are made on first use, because static initialisers of other files register functions.
RegistrationErrors& registrationErrors() {
  static RegistrationErrors instance;
  return instance;
}

}  // namespace

CppFunctions& CppFunctions::ofProcess() {
  static CppFunctions instance;
  return instance;
}

void CppFunctions::add(const std::string& name, Function function) {
  const auto added = std::make_shared<const Function>(std::move(function));
  MutexLock lock(mutex_);
  const auto [it, is_new] = functions_.try_emplace(name, added);
  const auto& known = *it->second;
  // The address of a static function in a header differs in each file that includes it.
  const bool is_same = !added->location.empty() && !known.location.empty() &&
      (known.location == added->location || (!known.key.empty() && known.key == added->key));
  if (!is_new && !is_same) {
    if (added->location.empty()) {
      throw Error(ErrorCode::kInvalidArgument, "a C++ function named " + name + " is registered already");
    }
    throw Error(
        ErrorCode::kInvalidArgument,
        "two C++ functions are registered as " + name + ", " +
            (known.location.empty() ? "by registerFunction()" : "at " + known.location) + " and at " + added->location +
            ": give one of them another name, or register it with registerFunction()");
  }
  if (!added->key.empty()) names_.emplace(added->key, name);
}

bool CppFunctions::remove(const std::string& name) {
  std::shared_ptr<const Function> removed;  // destroyed without the lock
  MutexLock lock(mutex_);
  const auto it = functions_.find(name);
  if (it == functions_.end()) return false;
  removed = std::move(it->second);
  functions_.erase(it);
  std::erase_if(names_, [&name](const auto& entry) { return entry.second == name; });
  lock.unlock();
  return true;
}

std::shared_ptr<const CppFunctions::Function> CppFunctions::find(const std::string& name) const {
  MutexLock lock(mutex_);
  const auto it = functions_.find(name);
  return it == functions_.end() ? nullptr : it->second;
}

std::optional<std::string> CppFunctions::nameOf(const std::string& key) const {
  MutexLock lock(mutex_);
  const auto it = names_.find(key);
  return it == names_.end() ? std::nullopt : std::optional(it->second);
}

std::vector<CppFunctions::Row> CppFunctions::rows() const {
  std::vector<Row> rows;
  {
    MutexLock lock(mutex_);
    for (const auto& [name, function] : functions_) {
      if (function->type) rows.push_back({name, function->type});
    }
  }
  std::ranges::sort(rows, {}, &Row::name);
  return rows;
}

void addRegistrationError(const std::string& text) {
  auto& errors = registrationErrors();
  MutexLock lock(errors.mutex);
  errors.text += (errors.text.empty() ? "" : "\n") + text;
  const bool is_late = errors.are_checked;
  lock.unlock();
  if (is_late) log(LogLevel::kError, text);
}

void checkRegistrations() {
  auto& errors = registrationErrors();
  MutexLock lock(errors.mutex);
  errors.are_checked = true;
  if (!errors.text.empty()) throw Error(ErrorCode::kInvalidArgument, errors.text);
}

void registerCppFunction(const std::string& name, CppFunction function) {
  CppFunctions::ofProcess().add(
      name,
      {.handler = [function = std::move(function)](
                      const CppCall&, std::vector<c10::IValue> args, const CallableRunner::ValueHandler& done) {
        done(function(std::move(args)));
      }});
}

Message encodeCppCall(
    Kind kind, const std::string& name, const std::vector<c10::IValue>& args, const RRefIndexOf& rrefs) {
  Message message{.kind = kind};
  Writer writer(message.payload);
  writer.putString(name);
  writer.put<uint32_t>(static_cast<uint32_t>(args.size()));
  for (const auto& value : args) encodeValue(value, writer, message.tensors, {}, rrefs);
  return message;
}

void CppRunner::call(Invocation&& invocation, const Responder& responder) {
  // The function may finish after its owner has dropped the node. The callback keeps the node alive, and destroys the
  // responder, which uses it, first.
  auto alive = node_.weak_from_this().lock();
  const auto to = invocation.from.id;
  evaluate(std::move(invocation), [alive = std::move(alive), this, to, responder](Result<c10::IValue> result) {
    if (!result) return responder.fail(result.error());
    try {
      responder.reply(node_.replyWith(result.value(), to));
    } catch (const Error& unsendable) {
      responder.fail(unsendable.withOrigin(ErrorOrigin::kResult));
    }
  });
}

std::shared_ptr<const CppFunctions::Function> CppRunner::find(const std::string& name) const {
  auto function = own_ ? own_->find(name) : nullptr;
  if (!function) function = CppFunctions::ofProcess().find(name);
  if (function) return function;
  throw Error(
      ErrorCode::kNoSuchFunction,
      "no C++ function named " + name +
          " here: the callee's program, or a library that it has loaded, must register it too");
}

void CppRunner::evaluate(Invocation&& invocation, ValueHandler done) {
  Reader reader(invocation.message.payload);
  const std::string name(reader.getString());
  AllowList::check(node_.allowed().of(invocation.from.name), "cpp_function(" + name + ")");
  const auto function = find(name);
  const auto node = node_.weak_from_this();
  const auto rrefs = rrefReader(invocation.rrefs, node);
  std::vector<c10::IValue> args;
  for (auto count = reader.get<uint32_t>(); count > 0; --count) {
    args.push_back(decodeValue(reader, invocation.message.tensors, nullptr, {}, rrefs));
  }
  reader.expectEnd();
  CppCall context{.node = node, .from = invocation.from, .id = invocation.id};
  if (auto metadata = metadataOf(invocation.message); !metadata.empty()) {
    context.metadata = std::make_shared<const Metadata>(std::move(metadata));
  }
  function->handler(context, std::move(args), std::move(done));
}

}  // namespace torchrpc
