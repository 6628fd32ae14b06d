#include "node/named_objects.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <charconv>
#include <utility>
#include <vector>

#include "base/exception.h"
#include "base/sync/waiter.h"
#include "calls/current_call.h"
#include "calls/thread_record.h"
#include "rref/outgoing_forks.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

constexpr size_t kMostCharacters = 256;
constexpr size_t kMostBytes = 4 * kMostCharacters;  // of UTF-8
constexpr auto kKeys = "named/";                    // in the store
constexpr uint64_t kAnyNumber = 0;                  // in kNameFind

/// Counts the characters of UTF-8 text: the bytes that are not continuation bytes.
size_t countCharacters(std::string_view text) {
  return static_cast<size_t>(std::ranges::count_if(text, [](char byte) { return (byte & 0xc0) != 0x80; }));
}

bool isUsable(std::string_view name) {
  const auto characters = countCharacters(name);
  return characters >= 1 && characters <= kMostCharacters && name.size() <= kMostBytes;
}

std::string quoted(const std::string& name) { return "'" + name + "'"; }

std::vector<uint8_t> bytesOf(const std::string& text) { return {text.begin(), text.end()}; }

[[noreturn]] void throwMalformed(const char* what) {
  throw Error(ErrorCode::kProtocol, std::string("malformed message about a named object: ") + what);
}

Message findMessage(const std::string& name, uint64_t number) {
  return {.kind = Kind::kNameFind, .payload = encode(NameRequest{name, number})};
}

Message dropMessage(const std::string& name, uint64_t number) {
  return {.kind = Kind::kNameDrop, .payload = encode(NameRequest{name, number})};
}

Error unknownWorker(const std::string& name) {
  return {ErrorCode::kUnknownWorker, name + " is no worker of the group any more", name};
}

}  // namespace

std::string encode(const NameRequest& request) {
  std::string payload;
  Writer writer(payload);
  writer.putShort(request.name);
  writer.put(request.number);
  return payload;
}

NameRequest decodeNameRequest(std::string_view bytes) {
  Reader reader(bytes);
  NameRequest request;
  request.name = reader.getShort();
  request.number = reader.get<uint64_t>();
  reader.expectEnd();
  if (!isUsable(request.name)) throwMalformed("no name has that length");
  return request;
}

std::optional<NamedObjects::Registration> NamedObjects::Registration::parse(const std::string& value) {
  const auto space = value.find(' ');
  if (space == std::string::npos || space + 1 == value.size()) return std::nullopt;
  Registration registration{.owner = value.substr(space + 1)};
  const auto* const end = value.data() + space;
  const auto [at, error] = std::from_chars(value.data(), end, registration.number, 16);
  if (error != std::errc() || at != end || registration.number == 0) return std::nullopt;
  return registration;
}

std::string NamedObjects::Registration::text() const {
  constexpr size_t kDigits = 16;
  std::string digits(kDigits, '0');
  std::string significant(kDigits, '\0');
  const auto end = std::to_chars(significant.data(), significant.data() + kDigits, number, 16).ptr;
  significant.resize(static_cast<size_t>(end - significant.data()));
  digits.replace(kDigits - significant.size(), significant.size(), significant);
  return digits + " " + owner;
}

/// The reply to a request, for the thread that waits for it. If that thread stops waiting, the RRefs in the reply are
/// released.
class NamedObjects::Answer {
 public:
  Answer(NamedObjects& objects, WorkerInfo to) : objects_(objects), to_(std::move(to)) {}
  ~Answer() {
    if (waiter_) discard(objects_, waiter_->abandon());
  }
  Answer(Answer&& other) noexcept = default;
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;
  Answer& operator=(Answer&&) = delete;

  Messenger::ReplyHandler handler() {
    return [waiter = waiter_, &objects = objects_](Result<Message> reply) {
      discard(objects, waiter->set(std::move(reply)));
    };
  }
  const WorkerInfo& from() const { return to_; }
  void setCall(CallId call) { call_ = call; }

  Result<Message> wait() {
    const ThreadPool::BlockingScope blocking;
    objects_.agent_.poll([this] { return waiter_->hasValue(); });
    const WaitScope waiting(ThreadWait{.kind = ThreadWait::Kind::kReply, .to = to_.id, .call = call_});
    for (;; checkInterrupt()) {
      if (auto reply = waiter_->waitFor(kSignalCheckInterval)) return *std::move(reply);
    }
  }

 private:
  using Reply = Result<Message>;
  static void discard(NamedObjects& objects, const std::optional<Reply>& unused) {
    if (unused && *unused) objects.rrefs_.discard(unused->value());
  }

  NamedObjects& objects_;
  WorkerInfo to_;
  CallId call_ = 0;
  std::shared_ptr<Waiter<Reply>> waiter_ = std::make_shared<Waiter<Reply>>();
};

NamedObjects::NamedObjects(Agent& agent, RRefService& rrefs, StorePtr store, const std::string& secret)
    : agent_(agent), rrefs_(rrefs), store_(std::move(store)), seal_(secret) {
  const auto serve = [this](Kind kind, void (NamedObjects::*handler)(const Request&, const Responder&)) {
    // Not on the loop: the last reference to an object may be dropped here.
    agent_.on(kind, Messenger::Where::kPool, [this, handler](const Request& request, const Responder& responder) {
      runOrFail(
          [&] { (this->*handler)(request, responder); },
          [&responder](Error error) { responder.fail(std::move(error)); }, ErrorCode::kUnknown, agent_.self().name);
    });
  };
  serve(Kind::kNameHold, &NamedObjects::serveHold);
  serve(Kind::kNameFind, &NamedObjects::serveFind);
  serve(Kind::kNameDrop, &NamedObjects::serveDrop);
}

void NamedObjects::requireUsable(const std::string& name) const {
  if (agent_.isOnLoop()) {
    throwInvalidArgument(
        "a continuation that runs on Executor::inlined() asks for the named object " + quoted(name) +
        ", and would wait for a reply on the thread that receives it: let it run on the pool");
  }
  if (isUsable(name)) return;
  throwInvalidArgument(
      "the name of an object must have 1 to " + std::to_string(kMostCharacters) + " characters, but has " +
      std::to_string(countCharacters(name)));
}

void NamedObjects::add(const std::string& name, const RRefPtr& rref, Duration timeout) {
  agent_.requireCallsAllowed();
  requireUsable(name);
  rrefs_.requireOwn(*rref);
  for (const auto& worker : {agent_.self().name, rref->owner().name}) {
    if (mayOwn(worker)) continue;
    throw Error(
        ErrorCode::kNotAllowed,
        worker +
            " is a client: only members of the group may register objects or own registered ones. Give it an "
            "identity with the role member if it may",
        agent_.self().name);
  }
  requireFree(name, timeout);
  Registration mine{.owner = rref->owner().name};
  while (mine.number == 0) mine.number = numbers_.next();
  try {
    holdOnOwner(name, mine, rref, timeout);
    take(name, mine, timeout);
  } catch (...) {
    dropOnOwner(name, mine, timeout);
    throw;
  }
  MutexLock lock(mutex_);
  found_.insert_or_assign(name, mine);
}

RRefPtr NamedObjects::lookUp(const std::string& name, Duration timeout) {
  agent_.requireCallsAllowed();
  requireUsable(name);
  std::optional<Registration> known;
  {
    MutexLock lock(mutex_);
    if (const auto it = found_.find(name); it != found_.end()) known = it->second;
  }
  auto answer = known ? findOnOwner(name, *known, timeout) : Result<RRefPtr>(nullptr);
  if (answer && answer.value()) return std::move(answer).value();
  std::string stored;
  try {
    stored = replace(name, "", "");
  } catch (const Error&) {
    return findAnywhere(name, timeout);
  }
  const auto named = open(name, stored);
  // Who can write to the store, but does not know the secret, may have changed the value.
  if (!named && !stored.empty()) return findAnywhere(name, timeout);
  if (named && named != known) answer = findOnOwner(name, *named, timeout);
  const bool is_found = named && answer && answer.value();
  {
    MutexLock lock(mutex_);
    if (is_found) {
      found_.insert_or_assign(name, *named);
    } else {
      found_.erase(name);
    }
  }
  if (is_found) return std::move(answer).value();
  if (!named || answer || answer.error().code() == ErrorCode::kUnknownWorker) throw notFound(name);
  const auto& error = answer.error();
  if (!hasEnded(error) || error.worker() == agent_.self().name) throw error;
  throw Error(
      ErrorCode::kWorkerLost,
      "the object named " + quoted(name) + " is lost with its owner " + named->owner + ". Register another one.",
      named->owner);
}

void NamedObjects::remove(const std::string& name, Duration timeout) {
  requireUsable(name);
  const auto named = namedBy(name);
  const bool was_held = named && dropOnOwnerAndWait(name, *named, timeout);
  if (named) replace(name, sealed(name, *named), "");
  {
    MutexLock lock(mutex_);
    found_.erase(name);
  }
  if (!was_held) throw notFound(name);
}

void NamedObjects::close() {
  std::map<std::string, Held> dropped;  // destroyed after the lock
  MutexLock lock(mutex_);
  is_closed_ = true;
  held_.swap(dropped);
  found_.clear();
}

// --- on the owner ---

void NamedObjects::hold(const std::string& name, uint64_t number, const RRefPtr& rref) {
  const auto owned = std::dynamic_pointer_cast<OwnerRRef>(rref);
  if (!owned || number == 0) throwMalformed("not an object of the receiver");
  if (const auto failure = owned->creationFailure()) throw *failure;
  MutexLock lock(mutex_);
  if (is_closed_) throw Error(ErrorCode::kShutdown, "RPC has been shut down.", agent_.self().name);
  // A registration has one object, which cannot be replaced.
  if (!held_[name].try_emplace(number, rref).second) throwMalformed("the registration has an object");
}

RRefPtr NamedObjects::find(const std::string& name, uint64_t number) const {
  RRefPtr found;
  {
    MutexLock lock(mutex_);
    const auto held = held_.find(name);
    if (held == held_.end()) return nullptr;
    const auto it = number == 0 ? held->second.begin() : held->second.find(number);
    if (it == held->second.end()) return nullptr;
    found = it->second;
  }
  return static_cast<const OwnerRRef&>(*found).creationFailure() ? nullptr : found;
}

RRefPtr NamedObjects::drop(const std::string& name, uint64_t number) {
  MutexLock lock(mutex_);
  const auto held = held_.find(name);
  if (held == held_.end()) return nullptr;
  auto dropped = held->second.extract(number);
  if (held->second.empty()) held_.erase(held);
  return dropped ? std::move(dropped.mapped()) : nullptr;
}

void NamedObjects::serveHold(const Request& request, const Responder& responder) {
  const auto rrefs = rrefs_.adopt(forksIn(request.message));
  const auto [name, number] = decodeNameRequest(request.message.payload);
  if (rrefs.size() != 1) throwMalformed("not one RRef");
  hold(name, number, rrefs.front());
  responder.reply({.kind = Kind::kReply});
}

void NamedObjects::serveFind(const Request& request, const Responder& responder) {
  const auto [name, number] = decodeNameRequest(request.message.payload);
  Message reply{.kind = Kind::kReply};
  OutgoingForks forks(rrefs_, request.from.id);
  if (const auto rref = find(name, number)) forks.add(rref);
  forks.commit(reply);
  responder.reply(std::move(reply));
}

void NamedObjects::serveDrop(const Request& request, const Responder& responder) {
  const auto [name, number] = decodeNameRequest(request.message.payload);
  const auto dropped = drop(name, number);
  Message reply{.kind = Kind::kReply};
  Writer(reply.payload).put(dropped != nullptr);
  responder.reply(std::move(reply));  // first: a destructor may take long
}

// --- the store ---

std::string NamedObjects::replace(const std::string& name, const std::string& expected, const std::string& desired) {
  const ThreadPool::BlockingScope blocking;
  try {
    const auto value = store_->compareSet(kKeys + name, bytesOf(expected), bytesOf(desired));
    return {value.begin(), value.end()};
  } catch (const std::exception& error) {
    throw Error(
        ErrorCode::kRendezvous,
        "the group's store, which knows who owns the name " + quoted(name) + ", is lost: " + textOf(error));
  }
}

std::string NamedObjects::sealed(const std::string& name, const Registration& registration) const {
  return seal_.seal(kKeys + name, registration.text());
}

std::optional<NamedObjects::Registration> NamedObjects::open(const std::string& name, const std::string& stored) const
    try {
  auto registration = Registration::parse(seal_.open(kKeys + name, stored, "a registration"));
  if (registration && !mayOwn(registration->owner)) return std::nullopt;
  return registration;
} catch (const Error&) {
  return std::nullopt;
}

bool NamedObjects::mayOwn(const std::string& worker) const {
  const auto info = agent_.directory().info(worker);
  const auto record = info ? agent_.directory().find(info->id) : std::nullopt;
  return !record || record->is_member;
}

// take() replaces a value that no member has written. Someone who can write to the store may have put it in the place
// of a registration.
void NamedObjects::requireFree(const std::string& name, Duration timeout) {
  const auto stored = replace(name, "", "");
  if (stored.empty() || open(name, stored)) return;
  try {
    findAnywhere(name, timeout);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNameNotFound) return;
    throw;
  }
  throwInvalidArgument(
      "the name " + quoted(name) +
      " belongs to another object, but its entry in the store was changed by someone who " +
      "is not a member of the group: take another name.");
}

void NamedObjects::take(const std::string& name, const Registration& mine, Duration timeout) {
  std::string expected;
  const auto value_of_mine = sealed(name, mine);
  for (;; checkInterrupt()) {
    const auto value = replace(name, expected, value_of_mine);
    if (value == value_of_mine) return;
    if (const auto other = open(name, value)) {
      const auto answer = findOnOwner(name, *other, timeout);
      if (answer && answer.value()) {
        throwInvalidArgument(
            "the name " + quoted(name) + " belongs to an object of " + other->owner +
            ": unregister it first, or take another name.");
      }
      // An owner that has not answered may hold the object.
      if (!answer && !hasEnded(answer.error())) throw answer.error();
    }
    expected = value;
  }
}

// --- messages ---

NamedObjects::Answer NamedObjects::ask(
    const WorkerInfo& to, Message message, Duration timeout, std::vector<RRefFork> forks) {
  if (const auto deadline = currentDeadline(); deadline != kNever) {
    timeout = std::min(timeout, std::max<Duration>(timeUntil(deadline), Duration(1)));
  }
  Answer answer(*this, to);
  auto& thread = ThreadRecord::ofThisThread();
  thread.setLastCall(0);
  agent_.request(
      to.id, std::move(message), timeout,
      [this, forks = std::move(forks), done = answer.handler()](Result<Message> reply) {
        // Forks to their own owner need no protection, even if the owner has received them.
        if (!reply) rrefs_.abandon(forks);
        done(std::move(reply));
      });
  answer.setCall(thread.lastCall());
  return answer;
}

void NamedObjects::holdOnOwner(
    const std::string& name, const Registration& mine, const RRefPtr& rref, Duration timeout) {
  if (rref->isOwner()) return hold(name, mine.number, rref);
  awaitCreation(static_cast<UserRRef&>(*rref), timeout);
  Message message{.kind = Kind::kNameHold, .payload = encode(NameRequest{name, mine.number})};
  OutgoingForks forks(rrefs_, rref->owner().id);
  forks.add(rref);
  auto sent = forks.commit(message);
  ask(rref->owner(), std::move(message), timeout, std::move(sent)).wait().take();
}

// A call that makes an object ends with its caller if it has not begun, but a registered object outlives its creator.
void NamedObjects::awaitCreation(UserRRef& rref, Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  const auto settled = std::make_shared<Waiter<Status>>();
  rref.whenConfirmed([settled](const Status& failure) { settled->set(Status(failure)); });
  const ThreadPool::BlockingScope blocking;
  while (!settled->waitFor(std::min<Duration>(kSignalCheckInterval, timeUntil(deadline)))) {
    checkInterrupt();
    if (std::chrono::steady_clock::now() >= deadline) return;  // the owner is asked all the same
  }
}

void NamedObjects::dropOnOwner(const std::string& name, const Registration& mine, Duration timeout) {
  if (mine.owner == agent_.self().name) {
    drop(name, mine.number);
  } else if (const auto owner = agent_.directory().info(mine.owner)) {
    agent_.request(owner->id, dropMessage(name, mine.number), timeout, [](const Result<Message>&) {});
  }
}

bool NamedObjects::dropOnOwnerAndWait(const std::string& name, const Registration& named, Duration timeout) {
  if (named.owner == agent_.self().name) return drop(name, named.number) != nullptr;
  const auto owner = agent_.directory().info(named.owner);
  if (!owner) return true;
  const auto reply = ask(*owner, dropMessage(name, named.number), timeout).wait();
  if (!reply && hasEnded(reply.error())) return true;
  if (!reply) throw reply.error();
  Reader reader(reply.value().payload);
  const bool was_held = reader.get<uint8_t>() != 0;
  reader.expectEnd();
  return was_held;
}

Result<RRefPtr> NamedObjects::findOnOwner(const std::string& name, const Registration& named, Duration timeout) {
  if (named.owner == agent_.self().name) return find(name, named.number);
  const auto owner = agent_.directory().info(named.owner);
  if (!owner) return unknownWorker(named.owner);
  auto answer = ask(*owner, findMessage(name, named.number), timeout);
  return rrefIn(answer);
}

Result<RRefPtr> NamedObjects::rrefIn(Answer& answer) {
  const auto reply = answer.wait();
  if (!reply) return reply.error();
  try {
    const auto rrefs = rrefs_.adopt(forksIn(reply.value()));
    if (rrefs.empty()) return RRefPtr();
    if (rrefs.size() != 1 || rrefs.front()->owner() != answer.from()) throwMalformed("not an object of the sender");
    return rrefs.front();
  } catch (const Error& error) {
    return error;
  }
}

RRefPtr NamedObjects::findAnywhere(const std::string& name, Duration timeout) {
  if (auto rref = find(name, kAnyNumber)) return rref;
  std::vector<Answer> answers;
  for (const auto& worker : agent_.directory().all()) {
    if (worker.id != agent_.self().id && mayOwn(worker.name))
      answers.push_back(ask(worker, findMessage(name, kAnyNumber), timeout));
  }
  for (auto& answer : answers) {
    if (auto found = rrefIn(answer); found && found.value()) return std::move(found).value();
  }
  throw notFound(name);
}

bool NamedObjects::hasEnded(const Error& error) const {
  switch (error.code()) {
    case ErrorCode::kWorkerLost:
    case ErrorCode::kUnknownWorker: return true;
    case ErrorCode::kShutdown: return !agent_.isEnding();  // of the owner
    default: return false;
  }
}

Error NamedObjects::notFound(const std::string& name) const {
  return {
      ErrorCode::kNameNotFound,
      "no worker of the group of " + agent_.self().name + " has an object named " + quoted(name) +
          ". A worker registers one by torchrpc.register(name, rref), in C++ by registerObject(name, rref); a worker "
          "that was started again has none."};
}

}  // namespace torchrpc
