#include "calls/keyed_calls.h"

#include <algorithm>
#include <cstdlib>
#include <tuple>
#include <utility>

#include "peers/audit_log.h"

namespace torchrpc {

namespace {

/// The number of searches for old calls per window.
constexpr int kExpiriesPerWindow = 16;

/// An answer that needs more than 1 / kLargestPart of the memory for answers is not kept.
constexpr size_t kLargestPart = 4;

size_t bytesOfReply(const Result<Message>& result) {
  if (!result) return result.error().text().size() + result.error().detail().size();
  const auto& message = result.value();
  size_t bytes = message.payload.size() + message.tensorBytes();
  for (const auto& header : message.headers) bytes += header.bytes.size();
  return bytes;
}

std::string nameOfCall(const RepeatableHeader& header) {
  if (header.key.empty()) return "the call that is repeated";
  const auto is_text = std::ranges::all_of(header.key, [](char c) { return c >= ' ' && c <= '~'; });
  return "the call with the idempotency key " + (is_text ? "\"" + header.key + "\"" : std::string("(bytes)"));
}

}  // namespace

/// A call that has arrived at least once.
struct KeyedCalls::Entry {
  const std::string caller;
  const RepeatableHeader header;
  const bool keeps_value;  ///< its result belongs to an RRef
  // Guarded by KeyedCalls::mutex_:
  bool is_done = false;
  TimePoint done_at{};
  std::shared_ptr<const Result<Message>> reply{};  ///< null: not kept
  const char* not_kept = "";                       ///< why it is not kept
  size_t reply_bytes = 0;
  std::optional<std::list<Entry*>::iterator> kept_at{};  ///< in Caller::kept
  std::vector<Responder> waiting{};
  std::vector<std::weak_ptr<void>> values{};  ///< of a call that keeps its result: the RRefs that have it
  std::shared_ptr<AuditedCall> audit{};       ///< of the first arrival: knows the function's name
};

struct KeyedCalls::Caller {
  uint64_t incarnation = 0;  ///< of the caller to which the numbers belong
  uint64_t oldest = 0;       ///< smaller numbers are refused
  std::unordered_map<std::string, EntryPtr> by_key{};
  std::map<uint64_t, EntryPtr> by_number{};
  std::list<EntryPtr> done_keys{};  ///< the done entries of by_key, the oldest first
  std::list<Entry*> kept{};         ///< the entries whose answers are kept, the oldest first
  size_t kept_bytes = 0;

  size_t size() const { return by_key.size() + by_number.size(); }
};

Duration defaultIdempotencyWindow() {
  const char* text = std::getenv("TORCHRPC_IDEMPOTENCY_WINDOW");
  if (!text || !*text) return KeyedCalls::kDefaultWindow;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds > 0) || seconds > 3e9) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "TORCHRPC_IDEMPOTENCY_WINDOW must be a positive number of seconds, but is '" + std::string(text) + "'");
  }
  return durationFromSeconds(seconds);
}

KeyedCalls::KeyedCalls(Options options, Timer& timer) : options_(std::move(options)), timer_(timer) {}

KeyedCalls::~KeyedCalls() = default;

Error KeyedCalls::unrepeatable(const Entry& entry) const {
  return {
      ErrorCode::kInvalidArgument,
      options_.self + " has run " + nameOfCall(entry.header) + ", and does not run it again, but its result " +
          entry.not_kept,
      options_.self};
}

void KeyedCalls::requireUsable(const Request& request, const RepeatableHeader& header) const {
  if (header.incarnation == 0 || header.incarnation == options_.incarnation) return;
  throw Error(
      ErrorCode::kWorkerLost,
      options_.self + " has been started again since " + request.from.name + " has first sent " + nameOfCall(header) +
          ", and may have run it before: it is not run again. Call with after_restart if that does no harm",
      options_.self);
}

void KeyedCalls::dropReply(Caller& caller, Entry& entry) {
  if (!entry.kept_at) return;
  caller.kept.erase(*std::exchange(entry.kept_at, std::nullopt));
  caller.kept_bytes -= entry.reply_bytes;
  reply_bytes_ -= entry.reply_bytes;
  dropped_.push_back(std::exchange(entry.reply, nullptr));
}

void KeyedCalls::dropNumbersBelow(Caller& caller, uint64_t oldest) {
  caller.oldest = std::max(caller.oldest, oldest);
  auto& numbers = caller.by_number;
  while (!numbers.empty() && numbers.begin()->first < caller.oldest) {
    const auto entry = numbers.begin()->second;
    numbers.erase(numbers.begin());
    dropReply(caller, *entry);
    dropped_.push_back(entry);
  }
}

void KeyedCalls::expire(Caller& caller, TimePoint now) {
  const auto is_old = [&](const Entry& entry) { return deadlineAfter(options_.window, entry.done_at) <= now; };
  while (!caller.done_keys.empty() && is_old(*caller.done_keys.front())) {
    const auto entry = std::move(caller.done_keys.front());
    caller.done_keys.pop_front();
    caller.by_key.erase(entry->header.key);
    dropReply(caller, *entry);
    dropped_.push_back(entry);
  }
  // Callers drop their numbers themselves, unless they have died.
  std::erase_if(caller.by_number, [&](const auto& each) TORCHRPC_REQUIRES(mutex_) {
    if (!each.second->is_done || !is_old(*each.second)) return false;
    dropReply(caller, *each.second);
    dropped_.push_back(each.second);
    return true;
  });
}

void KeyedCalls::expire(TimePoint now) {
  if (now < next_expiry_) return;
  next_expiry_ = deadlineAfter(options_.window / kExpiriesPerWindow, now);
  for (auto it = callers_.begin(); it != callers_.end();) {
    expire(it->second, now);
    // A caller that has dropped numbers stays: without `oldest`, a late copy of an old attempt would run again.
    it = it->second.size() == 0 && it->second.oldest == 0 ? callers_.erase(it) : std::next(it);
  }
}

void KeyedCalls::dropReplies() {
  while (reply_bytes_ > options_.max_reply_bytes) {
    const auto most = std::ranges::max_element(callers_, {}, [](const auto& each) { return each.second.kept_bytes; });
    auto& caller = most->second;
    auto* const oldest = caller.kept.front();
    dropReply(caller, *oldest);
    oldest->not_kept = "has been dropped, because there was no room for more results: repeat calls earlier";
  }
}

KeyedCalls::EntryPtr KeyedCalls::findOrAdd(
    const Request& request, const RepeatableHeader& header, const EntryPtr& added) {
  const auto now = timer_.now();
  expire(now);
  auto& caller = callers_[request.from.name];
  EntryPtr* place = nullptr;
  if (!header.key.empty()) {
    const auto it = caller.by_key.find(header.key);
    if (it != caller.by_key.end()) place = &it->second;
    // An old call that has not been removed yet may run again, because its window has passed.
    if (place && (*place)->is_done && deadlineAfter(options_.window, (*place)->done_at) <= now) {
      expire(caller, now);
      place = nullptr;
    }
  } else {
    if (request.from.incarnation > caller.incarnation) {
      dropNumbersBelow(caller, ~uint64_t{0});
      caller.oldest = 0;
      caller.incarnation = request.from.incarnation;
    }
    dropNumbersBelow(caller, header.oldest);
    if (request.from.incarnation < caller.incarnation || header.number < caller.oldest) {
      throw Error(
          ErrorCode::kProtocol, request.from.name + " has ended this call before it arrived at " + options_.self,
          options_.self);
    }
    const auto it = caller.by_number.find(header.number);
    if (it != caller.by_number.end()) place = &it->second;
  }
  if (place) {
    ++repeats_;
    const auto& entry = **place;
    if (entry.header.digest == header.digest && entry.keeps_value == added->keeps_value) return *place;
    throw Error(
        ErrorCode::kInvalidArgument,
        nameOfCall(header) + " of " + request.from.name + " is not the one that " + options_.self +
            " has had with it: another function, or other arguments. Use one key for one call",
        options_.self)
        .withOrigin(ErrorOrigin::kRequest);
  }
  if (caller.size() >= options_.max_calls) {
    throw Error(
        ErrorCode::kQuotaExceeded,
        options_.self + " keeps " + std::to_string(caller.size()) + " calls of " + request.from.name +
            " that may be repeated, and takes no more: keys are kept for " +
            std::to_string(std::chrono::duration_cast<std::chrono::seconds>(options_.window).count()) +
            " s. Use fewer keys, or a shorter idempotency_window",
        options_.self);
  }
  if (header.key.empty()) {
    caller.by_number.emplace(header.number, added);
  } else {
    caller.by_key.emplace(header.key, added);
  }
  return nullptr;
}

std::optional<Responder> KeyedCalls::begin(
    const Request& request, const RepeatableHeader& header, const Responder& responder) try {
  requireUsable(request, header);
  auto entry = std::make_shared<Entry>(Entry{.caller = request.from.name, .header = header, .keeps_value = false});
  entry->audit = request.audit;
  std::shared_ptr<const Result<Message>> reply;
  std::shared_ptr<AuditedCall> first;
  Status failure;
  bool is_first = false;
  std::vector<std::shared_ptr<const void>> dropped;
  {
    MutexLock lock(mutex_);
    const auto earlier = findOrAdd(request, header, entry);
    dropped.swap(dropped_);
    is_first = !earlier;
    if (earlier) {
      first = earlier->audit;
      reply = earlier->reply;
      if (!earlier->is_done) {
        if (earlier->waiting.size() < options_.max_waiting) {
          earlier->waiting.push_back(responder);
        } else {
          failure = Error(
              ErrorCode::kQuotaExceeded,
              options_.self + " runs " + nameOfCall(header) + ", which has been repeated " +
                  "too often meanwhile: wait for its answer",
              options_.self);
        }
      } else if (!reply) {
        failure = unrepeatable(*earlier);
      }
    }
  }
  if (is_first) {
    if (request.audit) request.audit->setKey(header.key, header.attempt, /*is_repeat=*/false);
    return Responder([this, entry, responder](Result<Message> result) { finish(entry, responder, std::move(result)); });
  }
  if (request.audit) {
    request.audit->setKey(header.key, header.attempt, /*is_repeat=*/true);
    if (first) request.audit->setFunction(first->function());
  }
  if (failure) {
    responder.fail(*std::move(failure));
  } else if (reply) {
    responder.complete(Result<Message>(*reply));
  }
  return std::nullopt;
} catch (const Error& error) {
  responder.fail(error);
  return std::nullopt;
}

std::shared_ptr<void> KeyedCalls::beginValue(
    const Request& request, const RepeatableHeader& header, const std::shared_ptr<void>& value) {
  requireUsable(request, header);
  auto entry = std::make_shared<Entry>(Entry{.caller = request.from.name, .header = header, .keeps_value = true});
  entry->audit = request.audit;
  entry->values = {value};
  entry->is_done = true;
  entry->done_at = timer_.now();
  entry->not_kept = "has been dropped, because nobody had an RRef to it any more: make the object with a new key";
  std::vector<std::shared_ptr<const void>> dropped;
  std::shared_ptr<void> found;
  std::shared_ptr<AuditedCall> first;
  Status failure;
  {
    MutexLock lock(mutex_);
    const auto earlier = findOrAdd(request, header, entry);
    dropped.swap(dropped_);
    if (!earlier) {
      if (!header.key.empty()) callers_[request.from.name].done_keys.push_back(entry);
    } else {
      first = earlier->audit;
      auto& values = earlier->values;
      std::erase_if(values, [](const auto& each) { return each.expired(); });
      if (!values.empty()) found = values.front().lock();
      if (!found) {
        failure = unrepeatable(*earlier);
      } else {
        values.push_back(value);
      }
    }
  }
  if (request.audit) {
    request.audit->setKey(header.key, header.attempt, found || failure);
    if (first) request.audit->setFunction(first->function());
  }
  if (failure) throw *failure;
  return found;
}

void KeyedCalls::finish(const EntryPtr& entry, const Responder& responder, Result<Message> result) {
  const auto bytes = bytesOfReply(result);
  std::shared_ptr<const Result<Message>> kept;
  const char* not_kept = "";
  if (result && result.value().header(HeaderKind::kRRefForks)) {
    not_kept = "contains RRefs, which belong to the connection over which it was sent: return plain values";
  } else if (result && result.value().header(HeaderKind::kAutogradContext)) {
    not_kept = "takes part in the backward pass of a context: repeat calls outside of contexts";
  } else if (bytes > options_.max_reply_bytes / kLargestPart) {
    not_kept = "is too large to be kept: return less, or keep it in an RRef";
  } else {
    try {
      // Keeps a copy, because the function may have returned tensors that go on changing.
      auto copy = result ? Result<Message>(copyMessage(result.value())) : result;
      if (copy) {  // a profile is reported once
        std::erase_if(copy.value().headers, [](const Header& each) { return each.kind == HeaderKind::kProfiling; });
      }
      kept = std::make_shared<const Result<Message>>(std::move(copy));
    } catch (const Error&) {  // the reply cannot be sent: the first answer is an error that says so
      not_kept = "cannot be sent";
    }
  }
  std::vector<Responder> waiting;
  std::vector<std::shared_ptr<const void>> dropped;
  Status failure;
  {
    MutexLock lock(mutex_);
    const auto found = callers_.find(entry->caller);
    // The caller may have ended the call meanwhile.
    const auto is_known = [&](const Caller& caller) {
      const auto& [key, number] = std::tie(entry->header.key, entry->header.number);
      if (key.empty()) return caller.by_number.contains(number) && caller.by_number.at(number) == entry;
      return caller.by_key.contains(key) && caller.by_key.at(key) == entry;
    };
    entry->is_done = true;
    entry->done_at = timer_.now();
    entry->not_kept = not_kept;
    waiting.swap(entry->waiting);
    if (found != callers_.end() && is_known(found->second)) {
      auto& caller = found->second;
      if (!entry->header.key.empty()) caller.done_keys.push_back(entry);
      if (kept) {
        entry->reply = kept;
        entry->reply_bytes = bytes;
        entry->kept_at = caller.kept.insert(caller.kept.end(), entry.get());
        caller.kept_bytes += bytes;
        reply_bytes_ += bytes;
        dropReplies();
      }
    }
    if (!kept) failure = unrepeatable(*entry);
    dropped.swap(dropped_);
  }
  responder.complete(std::move(result));
  for (const auto& each : waiting) each.complete(kept ? Result<Message>(*kept) : Result<Message>(*failure));
}

KeyedCalls::Counts KeyedCalls::counts() const {
  MutexLock lock(mutex_);
  Counts counts{.reply_bytes = reply_bytes_, .repeats = repeats_};
  for (const auto& [name, caller] : callers_) counts.calls += caller.size();
  return counts;
}

}  // namespace torchrpc
