#pragma once

// The lies: legitimate frames, recorded or made by the encoders, in which one thing is wrong. A seed and a number
// decide a lie.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "security/honest_group.h"

namespace torchrpc::test {

// X(enumerator, name)
#define TORCHRPC_LIES(X)                                                       \
  X(kName, "name in HELLO")                                                    \
  X(kId, "id in HELLO")                                                        \
  X(kWorker, "name and id of another worker in HELLO")                         \
  X(kPlace, "place of another worker, which only a proof of names protects")   \
  X(kIncarnation, "incarnation in HELLO")                                      \
  X(kRank, "rank that the group does not have, or that nobody has")            \
  X(kRole, "role")                                                             \
  X(kVersion, "version in HELLO")                                              \
  X(kFirstFrame, "first frame")                                                \
  X(kOrder, "order of frames")                                                 \
  X(kJoined, "announcement of another worker")                                 \
  X(kNobodyJoined, "announcement of a worker or of members that do not exist") \
  X(kCount, "count of headers, tensors or segments")                           \
  X(kLength, "length of the payload, a header or a string")                    \
  X(kTruncated, "truncated frame")                                             \
  X(kExtended, "extended payload or frame")                                    \
  X(kFlipped, "flipped bytes")                                                 \
  X(kKind, "kind of the message")                                              \
  X(kUnknownKind, "kind that does not exist")                                  \
  X(kHeader, "kind of a header")                                               \
  X(kMemberMessage, "message of a member, from a client")                      \
  X(kRRef, "id or number of an RRef or fork")                                  \
  X(kForeignRRef, "RRef or fork of another worker")                            \
  X(kContext, "id of a context, a pass or a recorded message")                 \
  X(kForeignContext, "context of other workers")                               \
  X(kLiveSets, "live sets of contexts")                                        \
  X(kReply, "reply to a call of another worker, or to nobody")                 \
  X(kRepeated, "repeated message")                                             \
  X(kForeignCall, "cancellation or start of a call of another worker")         \
  X(kKey, "key or number of a call that may be repeated")                      \
  X(kNamedObject, "named object")                                              \
  X(kValue, "value")                                                           \
  X(kAnswer, "answer to a request of an honest worker")

enum class LieKind : uint8_t {
#define X(enumerator, name) enumerator,
  TORCHRPC_LIES(X)
#undef X
};
std::string_view name(LieKind kind);
size_t lieKinds();

/// Random choices that depend on one number only.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed) {}
  uint64_t next();
  uint64_t below(uint64_t n) { return next() % n; }
  bool chance(unsigned percent) { return below(100) < percent; }
  template <typename T>
  const T& any(const std::vector<T>& from) {
    return from[below(from.size())];
  }
  std::string bytes(size_t most);
  /// A number that a reader may handle wrongly.
  uint64_t number();

 private:
  uint64_t state_;
};

/// A frame that was sent, without segments.
struct RecordedFrame {
  WorkerId from = kNoWorker;
  WorkerId to = kNoWorker;
  Kind kind{};
  std::string head;
};

/// What the liar is, and what it knows.
struct Knowledge {
  GroupKind group;
  WorkerInfo self;
  uint64_t incarnation = 0;
  SimulatedNetwork::Handshake handshake;
  bool is_member = true;  ///< false: its connections prove that it is a client
  bool is_known = true;   ///< to the group
  std::string address;    ///< where it listens
  const std::map<WorkerId, WorkerRecord>* members = nullptr;
  std::vector<RecordedFrame> own{};          ///< frames of a worker with its name, id and incarnation
  std::vector<RecordedFrame> in_contexts{};  ///< calls between other workers, in a context that lives
  std::vector<RecordedFrame> overheard{};    ///< messages between other workers about RRefs that they hold
  std::vector<RecordedFrame> of_members{};   ///< frames that only members may send
  /// The ids of the calls for whose replies that worker waits.
  std::function<std::vector<CallId>(WorkerId)> awaited{};
};

struct Lie {
  LieKind kind{};
  WorkerId to = kNoWorker;
  bool is_over_new_connection = false;
  SimulatedNetwork::Handshake handshake{};  ///< of the new connection
  std::vector<std::string> frames{};
  bool has_own_call_ids = false;  ///< the frames keep their call ids
  bool must_be_refused = false;   ///< an answer other than an error breaks the rules
  /// The incarnation under which the lie takes its place, or that of the prey, if it is believed; 0: none.
  uint64_t claimed_incarnation = 0;
  WorkerId claimed_id = kNoWorker;
};

/// Makes a lie of that number. Returns nullopt if a lie of the kind that was chosen does not exist for this liar.
std::optional<Lie> makeLie(const Knowledge& known, Dice& dice);

/// Where a frame's head has its call id.
constexpr size_t kCallIdAt = 8;
std::string helloFrame(WorkerId id, const std::string& name, uint64_t incarnation, uint32_t version);
std::string frameOf(const Message& message);

}  // namespace torchrpc::test
