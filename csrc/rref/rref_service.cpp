#include "rref/rref_service.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "base/executor/drain_queue.h"
#include "base/executor/thread_pool.h"
#include "base/random.h"
#include "rref/pending.h"
#include "rref/recipes.h"
#include "rref/user_table.h"

namespace torchrpc {

struct RRefService::State {
  // constant:
  Messenger& messenger;
  const Options options;
  const std::shared_ptr<GroupMember> member;
  const WorkerInfo& self;
  // with locks of their own:
  OwnerTable owners;
  UserTable users;
  DeletionQueues deletions{};
  Recipes recipes{};
  DrainQueue<OwnerTable::Ended> to_release{};
  SecureNumbers random{};
  /// The forks that workers have sent and whose acceptance they, or the owners, have not answered yet. Counted for each
  /// RRef that arrives, so without a mutex: workers whose ids differ by a multiple of the size share a count.
  std::array<std::atomic<uint32_t>, 256> unanswered_forks{};
  std::atomic<uint32_t>& unansweredForks(WorkerId sender) {
    return unanswered_forks[static_cast<uint32_t>(sender) % unanswered_forks.size()];
  }
  std::atomic<uint64_t> next_id{0};  ///< the numbers in ids, by which people tell them apart
  std::atomic<bool> closed{false};
};

namespace {

constexpr size_t kReleaseBatch = 256;

Message message(Kind kind, std::string payload = {}) { return {.kind = kind, .payload = std::move(payload)}; }

/// Sets the errors of the entries that have failed.
void settleFailed(const OwnerTable::EndedList& ended) {
  for (const auto& [rref, failure] : ended) {
    if (failure) rref->setError(*failure);
  }
}

/// Whether the destructor of the value may run user code, which may wait until other values are released.
bool runsForeignCode(const OwnerRRef& rref) {
  const auto result = rref.result();
  if (!result || !result->ok()) return false;
  const auto& value = result->value();
  return value.isPyObject() || value.isCustomClass() || value.isCapsule() || value.isObject();
}

Status failureOf(const Result<Message>& reply) { return reply.ok() ? Status() : Status(reply.error()); }

}  // namespace

std::shared_ptr<RRefService> RRefService::create(Messenger& messenger, const Options& options) {
  std::shared_ptr<RRefService> service(new RRefService);
  const std::shared_ptr<GroupMember> member(new GroupMember{messenger.self(), options.group});
  service->state_.reset(new State{
      messenger, options, member, member->self, OwnerTable(member),
      UserTable(member, service->weak_from_this(), options.first_number)});
  service->serve();
  return service;
}

RRefService::~RRefService() = default;

PeerId RRefService::ownPeerId() const { return state_->messenger.peerId(state_->self.id); }

GloballyUniqueId RRefService::newId() {
  const auto& next = state_->options.next_random;
  return {state_->self.id, state_->next_id++, next ? next() : state_->random.next()};
}

// --- making RRefs ---

std::shared_ptr<OwnerRRef> RRefService::createOwner() { return std::make_shared<OwnerRRef>(newId(), state_->member); }

bool RRefService::neverUsed(const Error& error) {
  switch (error.origin()) {
    case ErrorOrigin::kRequest: return true;  // the callee has refused it, perhaps before it read the forks
    case ErrorOrigin::kFunction:
    case ErrorOrigin::kResult: return false;  // the function had the forks
    case ErrorOrigin::kHere:
      if (usualOrigin(error.code()) != ErrorOrigin::kHere) return true;  // an interceptor of this node
      break;
    case ErrorOrigin::kOnTheWay: break;
  }
  switch (error.code()) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnknownWorker:
    case ErrorCode::kWorkerLost:
    case ErrorCode::kFrameTooLarge:
    case ErrorCode::kSerialization:
    case ErrorCode::kShutdown: return true;
    default: return false;
  }
}

RRefPtr RRefService::remote(const WorkerInfo& to, Message call, Duration timeout, bool is_restorable) {
  if (to.id == state_->self.id) return remoteToSelf(std::move(call), timeout);
  auto id = newId();
  if (is_restorable) {
    if (const auto forks = forksIn(call); !forks.empty()) {
      abandon(forks);
      throwInvalidArgument(
          "the arguments of a restorable function contain an RRef, so the call could not be repeated: pass no RRefs");
    }
    id.local_id |= kRestorableBit;
  }
  const auto user = state_->users.create(id, newId(), to, state_->messenger.peerId(to.id));
  call.headers.push_back({HeaderKind::kRRefResult, encode(RemoteResult{id, user->forkId(), user->numbers().creation})});
  if (is_restorable) state_->recipes.add(id, call, timeout);
  auto forks = forksIn(call);
  state_->messenger.request(
      to.id, std::move(call), timeout,
      [weak = weak_from_this(), user, forks = std::move(forks)](Result<Message> reply) {
        auto self = weak.lock();
        if (!self) return;
        self->settle(user, reply.ok() ? Status() : creationError(user->owner(), reply.error()));
        if (reply.ok() || !neverUsed(reply.error())) return;
        self->abandon(forks);
        // Calls that were sent after the refused one may wait at the owner for its value.
        if (reply.error().origin() == ErrorOrigin::kRequest) self->deleteAtOwner(*user);
      });
  return user;
}

/// Until the call is answered, the table has a fork with the id of the RRef, held by the owner itself.
RRefPtr RRefService::remoteToSelf(Message call, Duration timeout) {
  auto rref = createOwner();
  const RemoteResult result{rref->id(), rref->id(), state_->users.numberRegistration(state_->self.id)};
  state_->owners.expect(rref, result);
  call.headers.push_back({HeaderKind::kRRefResult, encode(result)});
  auto forks = forksIn(call);
  state_->messenger.request(
      state_->self.id, std::move(call), timeout,
      [weak = weak_from_this(), rref, result, forks = std::move(forks)](Result<Message> reply) mutable {
        auto self = weak.lock();
        if (!self) return;
        // Not on the pool: the failure must be visible before the call counts as ended.
        if (!reply.ok()) {
          const auto failure = creationError(rref->owner(), reply.error());
          // A message to this worker may be lost, but the worker itself is not, so the error is not kWorkerLost.
          const bool is_timeout = failure.code() == ErrorCode::kRRefCreationTimeout;
          const auto code = is_timeout ? failure.code() : ErrorCode::kRRefCreation;
          rref->setError(Error(code, failure.text(), failure.worker()));
          if (neverUsed(reply.error())) self->abandon(forks);
        }
        OwnerTable::EndedList ended{{std::move(rref), std::nullopt}};
        self->state_->owners.removeForks(self->ownPeerId(), {{result.rref, result.fork, result.creation}}, ended);
        self->releaseOnPool(std::move(ended));
      });
  return rref;
}

RRefService::Hosted RRefService::host(const Request& request) {
  const auto* header = request.message.header(HeaderKind::kRRefResult);
  if (!header) throw Error(ErrorCode::kProtocol, "a remote call without the header RRefResult", request.from.name);
  const auto call = decodeRemoteResult(*header);
  if (call.rref.created_on != request.from.id || call.creation == kNoNumber) {
    throw Error(ErrorCode::kProtocol, "a remote call with ids of another worker", request.from.name);
  }
  return state_->owners.host(request.from.peerId(), call);
}

// --- RRefs in messages ---

void RRefService::requireOwn(const RRef& rref) const {
  if (rref.member() != state_->member) throw foreignError(rref, *state_->member);
}

RRefFork RRefService::fork(const RRefPtr& rref, WorkerId to) {
  requireOwn(*rref);
  RRefFork child{.rref = rref->id(), .fork = {}, .owner = {}, .parent = ownPeerId()};
  if (auto owner = std::dynamic_pointer_cast<OwnerRRef>(rref)) {
    if (auto failure = owner->creationFailure()) throw *failure;
    child.fork = newId();
    child.owner = child.parent;
    state_->owners.addFork(owner, child.fork, to);
  } else {
    auto user = std::static_pointer_cast<UserRRef>(rref);
    if (user->deleted()) throw deletedError(*user, "fork an UserRRef");
    if (auto failure = user->failure()) throw *failure;
    child.fork = newId();
    child.creation = user->numbers().creation;
    child.owner = user->numbers().owner;
    state_->users.addChild(child.fork, user, to);
  }
  if (to != kNoWorker && to != child.owner.worker) child.delivery = state_->users.numberDelivery(to);
  return child;
}

void RRefService::abandon(const std::vector<RRefFork>& forks) {
  OwnerTable::EndedList ended;
  for (const auto& fork : forks) {
    if (fork.owner.worker == state_->self.id) {
      state_->owners.abandonFork(fork.rref, fork.fork, ended);
    } else {
      state_->users.removeChild(fork.fork);
    }
  }
  releaseOnPool(std::move(ended));
}

void RRefService::adopt(const std::vector<RRefFork>& forks, bool wait_for_owner, Adopted done) {
  std::vector<RRefPtr> rrefs;
  Status failure;
  for (const auto& fork : forks) {  // all of them, even if one fails
    auto rref = adoptOne(fork);
    if (rref.ok()) {
      rrefs.push_back(std::move(rref).value());
    } else if (!failure) {
      failure = rref.error();
    }
  }
  if (failure) return done(*failure);
  if (!wait_for_owner) return done(std::move(rrefs));
  std::make_shared<Confirmation>(std::move(rrefs), std::move(done))->start();
}

std::vector<RRefPtr> RRefService::adopt(const std::vector<RRefFork>& forks) {
  if (forks.empty()) return {};
  Result<std::vector<RRefPtr>> rrefs = std::vector<RRefPtr>();
  adopt(forks, /*wait_for_owner=*/false, [&](auto adopted) { rrefs = std::move(adopted); });  // calls back at once
  return std::move(rrefs).take();
}

void RRefService::discard(const Message& message) {
  try {
    adopt(forksIn(message), /*wait_for_owner=*/false, [](const auto&) {});
  } catch (const Error&) {
  }
}

bool RRefService::beginAdoption(const RRefFork& fork) {
  if (fork.registered()) {
    // It takes a request only when it is deleted.
    const auto& deletions = state_->deletions;
    const auto limit = state_->options.max_waiting_deletions;
    if (deletions.waiting() < limit) return true;
    return deletions.waitingFor(state_->messenger.peerId(fork.owner.worker)) < limit;
  }
  auto& unanswered = state_->unansweredForks(fork.parent.worker);
  if (unanswered.fetch_add(1, std::memory_order_relaxed) < state_->options.max_unanswered_forks) return true;
  unanswered.fetch_sub(1, std::memory_order_relaxed);
  return false;
}

void RRefService::endAdoption(const RRefFork& fork) {
  if (!fork.registered()) state_->unansweredForks(fork.parent.worker).fetch_sub(1, std::memory_order_relaxed);
}

Result<RRefPtr> RRefService::adoptOne(const RRefFork& fork) {
  if (!beginAdoption(fork)) {
    return Error(
        ErrorCode::kQuotaExceeded,
        "worker " + std::to_string(fork.parent.worker) + " has sent too many RRefs to " + state_->self.name +
            " about which workers have not answered: send fewer at a time",
        state_->self.name);
  }
  const auto latest = state_->messenger.peerId(fork.owner.worker);
  const bool is_replaced = fork.owner.isReplacedBy(latest);
  if (fork.owner.worker == state_->self.id) {
    if (is_replaced) {
      acceptChild(fork);
      return ownerLostError(fork.rref, state_->self);
    }
    OwnerTable::EndedList ended;
    auto rref = state_->owners.adopt(fork, ended);
    releaseOnPool(std::move(ended));
    acceptChild(fork);
    if (!rref.ok()) return rref.error();
    return RRefPtr(std::move(rref).value());
  }
  auto adopted = state_->users.adopt(fork, state_->messenger.worker(fork.owner.worker));
  if (!adopted.ok() || !adopted.value().fresh) endAdoption(fork);
  if (!adopted.ok()) return adopted.error();
  const auto& [user, fresh] = adopted.value();
  if (fresh && is_replaced) {
    settle(user, ownerLostError(user->id(), user->owner()));
    acceptChild(fork);
    if (isRestorable(user->id())) restoreUser(user, latest);
  } else if (fresh) {
    registerUser(user, fork);
  }
  return RRefPtr(user);
}

/// Registers a new user with the owner, then notifies the parent.
void RRefService::registerUser(const std::shared_ptr<UserRRef>& user, const RRefFork& fork) {
  if (fork.registered()) {
    const bool lost = state_->users.lost(fork.owner.worker);
    return settle(user, lost ? Status(ownerLostError(user->id(), user->owner())) : Status());
  }
  const ForkRequest request{fork.rref, fork.fork, fork.creation, user->numbers().registration};
  state_->messenger.requestReliably(
      fork.owner.worker, message(Kind::kRRefForkRequest, encode(request)),
      [weak = weak_from_this(), user, fork](Result<Message> reply) {
        auto self = weak.lock();
        if (!self) return;
        self->settle(user, failureOf(reply));
        self->acceptChild(fork);
      });
}

/// Notifies the parent. A parent that is the owner keeps nothing alive for the child, so it needs no message.
void RRefService::acceptChild(const RRefFork& fork) {
  if (fork.parent.worker == fork.owner.worker) return endAdoption(fork);
  // The result is ignored: onWorkerLost handles the loss of the parent.
  state_->messenger.requestReliably(
      fork.parent.worker, message(Kind::kRRefChildAccept, encodeChildAccept(fork.fork)),
      [weak = weak_from_this(), fork](const Result<Message>&) {
        if (const auto self = weak.lock()) self->endAdoption(fork);
      });
}

void RRefService::fetch(
    const std::shared_ptr<UserRRef>& rref, Kind kind, Duration timeout, Messenger::ReplyHandler done) {
  if (rref->member() != state_->member) return done(foreignError(*rref, *state_->member));
  if (rref->deleted()) return done(deletedError(*rref, "to_here() on it"));
  if (auto failure = rref->failure()) return done(*failure);
  auto request = message(kind, encodeName(*rref));
  auto fetch = std::make_shared<PendingFetch>(rref, std::move(done));
  rref->whenConfirmed([fetch](const Status& failure) {
    if (failure) fetch->complete(*failure);
  });
  state_->messenger.request(
      rref->owner().id, std::move(request), timeout, [weak = weak_from_this(), fetch](Result<Message> reply) {
        // complete() leaves the reply unchanged if it returns false. NOLINTNEXTLINE(bugprone-use-after-move)
        if (fetch->complete(std::move(reply)) || !reply.ok()) return;
        if (auto self = weak.lock()) self->discard(reply.value());
      });
}

std::string RRefService::encodeName(const UserRRef& rref) {
  const auto& numbers = rref.numbers();
  return encode(Fetch{rref.id(), rref.forkId(), numbers.creation, numbers.registration});
}

Result<std::shared_ptr<OwnerRRef>> RRefService::findNamed(const Request& request, std::string_view name) {
  try {
    return state_->owners.find(request.from.peerId(), decodeForkRequest(name));
  } catch (const Error& malformed) {
    return malformed;
  }
}

// --- the end ---

bool RRefService::deleteAllUsers(Duration timeout) {
  ThreadPool::BlockingScope blocking;
  const auto deadline = deadlineAfter(timeout);
  const bool idle = state_->users.waitIdle(deadline);
  for (const auto& user : state_->users.live()) release(*user);
  return state_->owners.waitEmpty(deadline) && idle;
}

std::vector<std::string> RRefService::destroy() {
  state_->closed = true;
  state_->member->has_left = true;
  const Error shutdown(ErrorCode::kShutdown, "RPC has been shut down on " + state_->self.name + ".");
  for (const auto& user : state_->users.live()) {
    user->markDeleted();
    if (!user->confirmed()) settle(user, shutdown);
  }
  state_->users.clear();
  settleFailed(state_->to_release.clear());
  std::vector<std::string> leaks;
  for (const auto& held : state_->owners.clear()) {
    for (const auto& [fork, holder] : held.forks) {
      const auto by = holder.worker == kNoWorker ? "no worker yet" : state_->messenger.worker(holder.worker).name;
      leaks.push_back(
          "Leaking RRef " + toString(held.rref->id()) + " with fork Id " + toString(fork) + ", held by " + by + ".");
    }
    held.rref->setError(shutdown);
  }
  return leaks;
}

void RRefService::onWorkerLost(const WorkerInfo& worker) {
  state_->users.loseWorker(worker.id);
  failUsersOf({worker, std::numeric_limits<uint64_t>::max()});
  releaseOnPool(state_->owners.loseWorker(worker.id));
}

void RRefService::onWorkerJoined(const Peer& peer) {
  state_->users.onWorkerJoined(peer.peerId());
  failUsersOf(peer);  // a third worker may have sent RRefs of the later start already
  releaseOnPool(state_->owners.onWorkerJoined(peer.peerId()));
}

void RRefService::restore(const Peer& owner) {
  for (const auto& user : state_->users.live()) {
    const bool is_lost = user->numbers().owner.isReplacedBy(owner.peerId());
    if (is_lost && isRestorable(user->id())) restoreUser(user, owner.peerId());
  }
}

void RRefService::restoreUser(const std::shared_ptr<UserRRef>& user, const PeerId& owner_peer) {
  const auto owner = user->owner();
  const auto creation = user->numbers().creation;
  const bool is_creator = user->id().created_on == state_->self.id && user->numbers().registration == creation;
  const auto registration = is_creator ? creation : state_->users.numberRegistration(owner.id);
  Message call;
  Duration timeout = state_->options.restore_timeout();
  if (is_creator) {
    auto recipe = state_->recipes.find(user->id());
    if (!recipe) return;
    call = std::move(recipe->call);
    timeout = recipe->timeout;
  } else {
    call = message(Kind::kRRefForkRequest, encode(ForkRequest{user->id(), user->forkId(), creation, registration}));
  }
  if (!user->reopen(registration, owner_peer)) return;
  state_->users.reopen(user);
  state_->messenger.request(
      owner.id, std::move(call), timeout, [weak = weak_from_this(), user](const Result<Message>& reply) {
        const auto self = weak.lock();
        if (!self) return;
        self->settle(user, reply.ok() ? Status() : creationError(user->owner(), reply.error()));
      });
}

void RRefService::failUsersOf(const Peer& owner) {
  for (const auto& user : state_->users.live()) {
    if (user->numbers().owner.isReplacedBy(owner.peerId())) settle(user, ownerLostError(user->id(), owner));
  }
}

void RRefService::release(UserRRef& rref) {
  if (!maker_.isThisOne()) return;  // a forked process: the RRef belongs to its parent process
  state_->users.remove(rref);
  state_->recipes.forget(rref);
  if (!rref.markDeleted() || state_->closed) return;
  deleteAtOwner(rref);
}

void RRefService::deleteAtOwner(const UserRRef& rref) {
  const auto to = state_->messenger.peerId(rref.owner().id);
  sendDeletions(to, state_->deletions.add(to, {rref.id(), rref.forkId(), rref.numbers().registration}));
}

void RRefService::addOutstanding(std::set<WorkerId>& workers) const {
  state_->owners.addHolders(workers);
  state_->users.addOwners(workers);
}

std::vector<OwnerTable::Row> RRefService::ownedRows(size_t most) const { return state_->owners.rows(most); }

std::vector<std::shared_ptr<UserRRef>> RRefService::heldRRefs() const { return state_->users.live(); }

RRefService::DebugInfo RRefService::debugInfo() const {
  const auto owners = state_->owners.counts();
  const auto users = state_->users.counts();
  return {owners.rrefs, owners.forks, users.pending_users, users.pending_children, owners.runs + users.runs};
}

// --- shared helpers ---

void RRefService::settle(const std::shared_ptr<UserRRef>& user, const Status& failure) {
  user->settle(failure);
  state_->users.settled(*user);
}

/// Releases on the pool, because the destructor of a value may run long or need the GIL. Values that run no foreign
/// code are released in batches, one task at a time, so that calls do not queue behind one task for each of a million
/// values.
void RRefService::releaseOnPool(OwnerTable::EndedList ended) {
  const auto foreign = std::ranges::partition(ended, [](const auto& each) { return !runsForeignCode(*each.rref); });
  for (auto& each : foreign) {
    // The task's destructor releases the value.
    state_->messenger.post([one = OwnerTable::EndedList{std::move(each)}] { settleFailed(one); });
  }
  ended.erase(foreign.begin(), foreign.end());
  if (state_->to_release.add(std::move(ended))) postReleaseBatch();
}

void RRefService::postReleaseBatch() {
  state_->messenger.post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->releaseBatch();
  });
}

void RRefService::releaseBatch() {
  auto batch = state_->to_release.take(kReleaseBatch);
  if (batch.empty()) return;
  settleFailed(batch);
  batch.clear();
  postReleaseBatch();
}

void RRefService::sendDeletions(const PeerId& to, const DeletionQueues::Deletions& deletions) {
  if (deletions.empty()) return;
  state_->messenger.requestReliably(
      to.worker, message(Kind::kRRefUserDelete, encode(deletions)),
      [weak = weak_from_this(), to](const Result<Message>& reply) {
        const auto self = weak.lock();
        if (!self) return;
        auto& state = *self->state_;
        const bool is_lost = !reply.ok() && reply.error().code() == ErrorCode::kWorkerLost;
        // onWorkerLost handles the loss of the owner: its values are lost with it.
        if (is_lost || state.closed || state.messenger.peerId(to.worker) != to) {
          return state.deletions.drop(to);
        }
        self->sendDeletions(to, state.deletions.takeNext(to));
      });
}

// --- handlers ---

void RRefService::serve() {
  serve(Kind::kRRefForkRequest, &RRefService::serveForkRequest);
  serve(Kind::kRRefChildAccept, &RRefService::serveChildAccept);
  serve(Kind::kRRefUserDelete, &RRefService::serveUserDelete);
  serve(Kind::kRRefFetch, &RRefService::serveFetch);
  serve(Kind::kPythonRRefFetch, &RRefService::serveFetch);
}

void RRefService::serve(Kind kind, void (RRefService::*handler)(const Request&, const Responder&)) {
  state_->messenger.on(
      kind, Messenger::Where::kLoop,
      [weak = weak_from_this(), handler](const Request& request, const Responder& responder) {
        auto self = weak.lock();
        if (!self || self->state_->closed)
          return responder.fail(Error(ErrorCode::kShutdown, "RPC has been shut down."));
        try {
          (self.get()->*handler)(request, responder);
        } catch (const Error& error) {
          responder.fail(error);
        }
      });
}

void RRefService::serveForkRequest(const Request& request, const Responder& responder) {
  if (auto refused = state_->owners.registerFork(request.from.peerId(), decodeForkRequest(request.message.payload))) {
    responder.fail(*refused);
  } else {
    responder.reply(message(Kind::kReply));
  }
}

void RRefService::serveChildAccept(const Request& request, const Responder& responder) {
  state_->users.acceptChild(decodeChildAccept(request.message.payload), request.from.id);
  responder.reply(message(Kind::kReply));
}

void RRefService::serveUserDelete(const Request& request, const Responder& responder) {
  OwnerTable::EndedList ended;
  const auto refused =
      state_->owners.removeForks(request.from.peerId(), decodeUserDeletes(request.message.payload), ended);
  releaseOnPool(std::move(ended));
  if (refused) return responder.fail(*refused);
  responder.reply(message(Kind::kReply));
}

void RRefService::serveFetch(const Request& request, const Responder& responder) {
  auto rref = findNamed(request, request.message.payload);
  if (!rref.ok()) return responder.fail(rref.error());
  rref.value()->whenReady([weak = weak_from_this(), to = request.from, responder](const Result<c10::IValue>& value) {
    if (!value.ok()) return responder.fail(value.error());
    const auto self = weak.lock();
    if (!self) return;
    auto& messenger = self->state_->messenger;
    auto answer = [self, to, responder, value = value.value()] { self->answerFetch(value, to, responder); };
    value.value().isPyObject() ? messenger.postToStrand(std::move(answer)) : messenger.post(std::move(answer));
  });
}

void RRefService::answerFetch(const c10::IValue& value, const WorkerInfo& to, const Responder& responder) {
  try {
    responder.reply(state_->options.encode_value(value, to));
  } catch (const Error& error) {
    responder.fail(error);
  }
}

}  // namespace torchrpc
