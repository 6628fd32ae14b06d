#include "agent/announcer.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <utility>

#include "base/sync/mutex.h"
#include "wire/codec.h"

namespace torchrpc {

// Note [Announcements]
// A worker that has taken the place of a lost one announces its address along a tree. It sends MEMBER_JOINED to kFanOut
// members, each with the list of the members in its subtree. A member forwards the announcement in the same way, and
// replies when its whole subtree has replied. The reply lists the members that could not be reached. So each worker
// opens few connections, however large the group is. All trees divide the same list of ids, so different announcements
// use nearly the same connections.
// If the root of a subtree is lost, or does not reply in time, the next member of the subtree receives the message. A
// member ignores an announcement that it knows already. Members that were not reached get the announcement again from
// the announced worker only, so no other worker keeps any state.
// A worker that knows the group's secret can announce another one falsely; it could change the store as well. Where
// workers prove their names, a false announcement would cut another worker off. There each worker sends its own
// announcement to all members, and no member accepts it from another sender.

namespace {

constexpr size_t kFanOut = 8;
constexpr size_t kMaxOpen = 32;  // messages at a time: each may have to wait for a new connection
constexpr Duration kReplyTimeout = std::chrono::seconds(2);       // of a reply, for each level of the subtree
constexpr Duration kFirstPause = std::chrono::milliseconds(200);  // before the next attempt; doubled each time
constexpr int kMaxAttempts = 10;                                  // a worker may be unreachable for a while only

/// The payload of MEMBER_JOINED.
struct Announcement {
  std::string record;             ///< encoded
  std::vector<WorkerId> members;  ///< of the receiver's subtree

  std::string encode() const {
    std::string out;
    Writer(out).putString(record);
    putIds(out, members);
    return out;
  }
  /// Throws Error(kProtocol).
  static Announcement decode(std::string_view bytes) {
    Reader reader(bytes);
    Announcement announcement;
    announcement.record = reader.getString();
    announcement.members = readIds(reader);
    return announcement;
  }

  static void putIds(std::string& out, const std::vector<WorkerId>& ids) {
    Writer writer(out);
    for (const auto id : ids) writer.put(id);
  }
  /// Reads all ids that are left.
  static std::vector<WorkerId> readIds(Reader& reader) {
    std::vector<WorkerId> ids(reader.remaining() / sizeof(WorkerId));
    for (auto& id : ids) id = reader.get<WorkerId>();
    reader.expectEnd();
    return ids;
  }
};

/// How long the root of a subtree with that many members may take to reply.
Duration replyTimeout(size_t members) {
  auto timeout = kReplyTimeout;
  for (auto rest = members - 1; rest > 0; rest /= kFanOut) timeout += kReplyTimeout;
  return timeout;
}

}  // namespace

/// One announcement, as this worker sends it.
class Announcer::Broadcast : public std::enable_shared_from_this<Broadcast> {
 public:
  Broadcast(Agent& agent, std::string record, Done done)
      : agent_(agent), record_(std::move(record)), done_(std::move(done)) {}

  void start(const std::vector<WorkerId>& members, size_t subtrees) {
    {
      MutexLock lock(mutex_);
      for (size_t i = 0; i < subtrees; ++i) {
        const auto begin = members.begin() + static_cast<std::ptrdiff_t>(i * members.size() / subtrees);
        const auto end = members.begin() + static_cast<std::ptrdiff_t>((i + 1) * members.size() / subtrees);
        if (begin != end) queue_.emplace_back(begin, end);
      }
    }
    sendQueued();
  }

 private:
  using Subtree = std::vector<WorkerId>;  ///< the first one is its root

  void sendQueued() {
    for (;;) {
      Subtree subtree;
      {
        MutexLock lock(mutex_);
        // The sending thread checks the queue again before it returns, so a reply that arrives at once does not
        // recurse.
        if (is_sending_) return;
        if (queue_.empty() || open_ == kMaxOpen) break;
        subtree = std::move(queue_.front());
        queue_.pop_front();
        ++open_;
        is_sending_ = true;
      }
      send(subtree);
      MutexLock lock(mutex_);
      is_sending_ = false;
    }
    Done done;
    Result<std::vector<WorkerId>> outcome = std::vector<WorkerId>();
    {
      MutexLock lock(mutex_);
      if (open_ > 0 || !queue_.empty()) return;
      done = std::exchange(done_, nullptr);
      outcome = std::exchange(unreached_, {});
      if (refusal_) outcome = *refusal_;
    }
    if (done) done(std::move(outcome));
  }

  void send(const Subtree& subtree) {
    const auto is_settled = std::make_shared<std::atomic<bool>>(false);
    const auto self = shared_from_this();
    const Announcement announcement{record_, {subtree.begin() + 1, subtree.end()}};
    agent_.request(
        subtree.front(), {.kind = Kind::kMemberJoined, .payload = announcement.encode()}, kNoLimit,
        [self, subtree, is_settled](const Result<Message>& reply) {
          if (!is_settled->exchange(true)) self->onReply(subtree, reply);
        });
    // A stopped process still receives the message when it continues.
    agent_.postAfter(replyTimeout(subtree.size()), [self, subtree, is_settled] {
      if (!is_settled->exchange(true)) self->onUnreached(subtree);
    });
  }

  void onReply(const Subtree& subtree, const Result<Message>& reply) {
    if (!reply && reply.error().code() == ErrorCode::kRendezvous) {
      MutexLock lock(mutex_);
      refusal_ = reply.error();
      --open_;
    } else if (auto unreached = reply ? unreachedIn(reply.value()) : std::nullopt) {
      std::erase_if(*unreached, [&subtree](WorkerId id) { return std::ranges::find(subtree, id) == subtree.end(); });
      MutexLock lock(mutex_);
      unreached_.insert(unreached_.end(), unreached->begin(), unreached->end());
      --open_;
    } else {
      return onUnreached(subtree);
    }
    sendQueued();
  }

  static std::optional<std::vector<WorkerId>> unreachedIn(const Message& reply) try {
    Reader reader(reply.payload);
    return Announcement::readIds(reader);
  } catch (const Error&) {
    return std::nullopt;
  }

  void onUnreached(const Subtree& subtree) {
    {
      MutexLock lock(mutex_);
      unreached_.push_back(subtree.front());
      if (subtree.size() > 1) queue_.emplace_back(subtree.begin() + 1, subtree.end());
      --open_;
    }
    sendQueued();
  }

  Agent& agent_;
  const std::string record_;
  Mutex mutex_;
  std::deque<Subtree> queue_ TORCHRPC_GUARDED_BY(mutex_);
  size_t open_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  bool is_sending_ TORCHRPC_GUARDED_BY(mutex_) = false;
  std::vector<WorkerId> unreached_ TORCHRPC_GUARDED_BY(mutex_);
  Status refusal_ TORCHRPC_GUARDED_BY(mutex_);
  Done done_ TORCHRPC_GUARDED_BY(mutex_);
};

void Announcer::spread(const std::string& record, const std::vector<WorkerId>& members, Done done) {
  const auto subtrees = options_.is_direct ? members.size() : std::min(members.size(), kFanOut);
  std::make_shared<Broadcast>(agent_, record, std::move(done))->start(members, subtrees);
}

void Announcer::announce(const WorkerRecord& self, const std::vector<WorkerId>& members, Done done) {
  auto record = encodeRecord(self);
  spread(record, members, [this, record, done = std::move(done)](Result<std::vector<WorkerId>> unreached) {
    if (unreached && !unreached.value().empty()) repeat(record, unreached.value(), 1);
    done(std::move(unreached));
  });
}

void Announcer::repeat(const std::string& record, const std::vector<WorkerId>& members, int attempt) {
  if (attempt == kMaxAttempts) return;
  agent_.postAfter(kFirstPause * (1 << (attempt - 1)), [this, record, members, attempt] {
    spread(record, members, [this, record, attempt](const Result<std::vector<WorkerId>>& unreached) {
      if (unreached && !unreached.value().empty()) repeat(record, unreached.value(), attempt + 1);
    });
  });
}

void Announcer::check(const WorkerRecord& record, const Request& request) {
  if (options_.is_direct) return request.from.requireOwn(record, agent_.self().name);
  const bool is_own = record.isOf(request.from);
  auto& directory = agent_.directory();
  const auto known = directory.find(record.info.id);
  const auto named = directory.info(record.info.name);
  const bool is_another = (known && known->info != record.info) || (named && *named != record.info);
  const bool is_allowed = is_own || (!is_another && record.info != agent_.self());
  if (is_allowed) return;
  throw Error(ErrorCode::kProtocol, "the record of another worker", request.from.name);
}

void Announcer::serve(const Request& request, const Responder& responder) {
  auto announcement = Announcement::decode(request.message.payload);
  const auto record = decodeRecord(announcement.record);
  auto& members = announcement.members;
  check(record, request);
  if (members.size() > (options_.is_direct ? 0 : agent_.directory().all().size())) {
    throw Error(ErrorCode::kProtocol, "more members than the group has", request.from.name);
  }
  if (auto refusal = options_.accept(record)) return responder.fail(*std::move(refusal));
  std::erase_if(members, [&](WorkerId id) { return id == agent_.self().id || id == record.info.id; });
  spread(announcement.record, members, [responder](Result<std::vector<WorkerId>> unreached) {
    if (!unreached) return responder.fail(unreached.error());
    Message reply{.kind = Kind::kReply};
    Announcement::putIds(reply.payload, unreached.value());
    responder.reply(std::move(reply));
  });
}

}  // namespace torchrpc
