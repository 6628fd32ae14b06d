#include "agent/announcer.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <utility>

#include "base/sync/mutex.h"
#include "wire/codec.h"

namespace torchrpc {

// Note [Announcements]
// A worker that has taken the place of a lost one tells few others where it is. Each of them has a part of the group,
// tells it in the same way, and answers when all of the part know, with those that it could not reach. So nobody dials
// more than a few workers, however large the group is. The parts are those of the list of all ids: the workers tell
// each other over nearly the same links for every announcement.
// If the worker that was asked is lost, or keeps the answer for longer than its part can need, the next of the part is
// asked. A worker that is told twice is told nothing new. The announced worker alone is responsible for those that were
// not reached: it goes on telling them.
// Anybody who knows the group's secret can announce anybody: he can change the store just as well. Where workers prove
// who they are, that would let one worker cut off another, so there each worker tells all others itself.

namespace {

constexpr size_t kFanOut = 8;
constexpr size_t kMaxOpen = 32;  // that a worker tells at a time: each may have to be dialled first
constexpr Duration kPatience = std::chrono::seconds(2);           // for an answer, for each level of workers below
constexpr Duration kFirstPause = std::chrono::milliseconds(200);  // before the next attempt; doubled each time
constexpr int kMaxAttempts = 10;                                  // a worker may be cut off for a while only

/// Which worker is announced, and whom the receiver is to tell.
struct Announcement {
  std::string record;  ///< encoded
  std::vector<WorkerId> members;

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
  /// All that is left to read.
  static std::vector<WorkerId> readIds(Reader& reader) {
    std::vector<WorkerId> ids(reader.remaining() / sizeof(WorkerId));
    for (auto& id : ids) id = reader.get<WorkerId>();
    reader.expectEnd();
    return ids;
  }
};

/// How long a worker may take to tell so many others.
Duration patienceFor(size_t members) {
  auto patience = kPatience;
  for (auto rest = members - 1; rest > 0; rest /= kFanOut) patience += kPatience;
  return patience;
}

}  // namespace

/// The members that this worker tells of one announcement.
class Announcer::Round : public std::enable_shared_from_this<Round> {
 public:
  Round(Agent& agent, std::string record, Done done)
      : agent_(agent), record_(std::move(record)), done_(std::move(done)) {}

  void tell(const std::vector<WorkerId>& members, size_t parts) {
    {
      MutexLock lock(mutex_);
      for (size_t i = 0; i < parts; ++i) {
        const auto begin = members.begin() + static_cast<std::ptrdiff_t>(i * members.size() / parts);
        const auto end = members.begin() + static_cast<std::ptrdiff_t>((i + 1) * members.size() / parts);
        if (begin != end) queue_.emplace_back(begin, end);
      }
    }
    openQueued();
  }

 private:
  using Part = std::vector<WorkerId>;  ///< the first is the one that is asked to tell the others

  void openQueued() {
    for (;;) {
      Part part;
      {
        MutexLock lock(mutex_);
        // The thread that is here looks again before it leaves, so an answer that comes at once does not recurse.
        if (is_opening_) return;
        if (queue_.empty() || open_ == kMaxOpen) break;
        part = std::move(queue_.front());
        queue_.pop_front();
        ++open_;
        is_opening_ = true;
      }
      ask(part);
      MutexLock lock(mutex_);
      is_opening_ = false;
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

  void ask(const Part& part) {
    const auto is_settled = std::make_shared<std::atomic<bool>>(false);
    const auto self = shared_from_this();
    const Announcement announcement{record_, {part.begin() + 1, part.end()}};
    agent_.request(
        part.front(), {.kind = Kind::kMemberJoined, .payload = announcement.encode()}, kNoLimit,
        [self, part, is_settled](const Result<Message>& reply) {
          if (!is_settled->exchange(true)) self->onAnswer(part, reply);
        });
    // One that is stopped hears of it when it goes on.
    agent_.postAfter(patienceFor(part.size()), [self, part, is_settled] {
      if (!is_settled->exchange(true)) self->onUnreached(part);
    });
  }

  void onAnswer(const Part& part, const Result<Message>& reply) {
    if (!reply && reply.error().code() == ErrorCode::kRendezvous) {
      MutexLock lock(mutex_);
      refusal_ = reply.error();
      --open_;
    } else if (auto unreached = reply ? unreachedIn(reply.value()) : std::nullopt) {
      std::erase_if(*unreached, [&part](WorkerId id) { return std::ranges::find(part, id) == part.end(); });
      MutexLock lock(mutex_);
      unreached_.insert(unreached_.end(), unreached->begin(), unreached->end());
      --open_;
    } else {
      return onUnreached(part);
    }
    openQueued();
  }

  static std::optional<std::vector<WorkerId>> unreachedIn(const Message& reply) try {
    Reader reader(reply.payload);
    return Announcement::readIds(reader);
  } catch (const Error&) {
    return std::nullopt;
  }

  void onUnreached(const Part& part) {
    {
      MutexLock lock(mutex_);
      unreached_.push_back(part.front());
      if (part.size() > 1) queue_.emplace_back(part.begin() + 1, part.end());
      --open_;
    }
    openQueued();
  }

  Agent& agent_;
  const std::string record_;
  Mutex mutex_;
  std::deque<Part> queue_ TORCHRPC_GUARDED_BY(mutex_);
  size_t open_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  bool is_opening_ TORCHRPC_GUARDED_BY(mutex_) = false;
  std::vector<WorkerId> unreached_ TORCHRPC_GUARDED_BY(mutex_);
  Status refusal_ TORCHRPC_GUARDED_BY(mutex_);
  Done done_ TORCHRPC_GUARDED_BY(mutex_);
};

void Announcer::spread(const std::string& record, std::vector<WorkerId> members, Done done) {
  const auto parts = options_.is_direct ? members.size() : std::min(members.size(), kFanOut);
  std::make_shared<Round>(agent_, record, std::move(done))->tell(members, parts);
}

void Announcer::announce(const WorkerRecord& self, std::vector<WorkerId> members, Done done) {
  auto record = encodeRecord(self);
  spread(record, std::move(members), [this, record, done = std::move(done)](Result<std::vector<WorkerId>> unreached) {
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
  const bool is_own = record.info == request.from && record.incarnation == request.incarnation;
  auto& directory = agent_.directory();
  const auto known = directory.find(record.info.id);
  const auto named = directory.info(record.info.name);
  const bool is_another = (known && known->info != record.info) || (named && *named != record.info);
  const bool is_allowed = is_own || (!options_.is_direct && !is_another && record.info != agent_.self());
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
  spread(announcement.record, std::move(members), [responder](Result<std::vector<WorkerId>> unreached) {
    if (!unreached) return responder.fail(unreached.error());
    Message reply{.kind = Kind::kReply};
    Announcement::putIds(reply.payload, unreached.value());
    responder.reply(std::move(reply));
  });
}

}  // namespace torchrpc
