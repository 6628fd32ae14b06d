#pragma once

// Makes one lie. The lies about the worker itself and about the form of frames are in lies.cpp, those about what a
// message means in message_lies.cpp.

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "peers/connection_pool.h"
#include "rref/fork_protocol.h"
#include "security/lies.h"

namespace torchrpc::test {

// Offsets in the head of a frame.
constexpr size_t kHeadersAt = 4;
constexpr size_t kTensorsAt = 16;
constexpr size_t kSegmentsAt = 20;
constexpr size_t kPayloadSizeAt = 24;
constexpr size_t kFixedBytes = 32;

template <typename T>
void overwrite(std::string& bytes, size_t at, T value) {
  if (at + sizeof(T) <= bytes.size()) std::memcpy(bytes.data() + at, &value, sizeof(T));
}

class LieMaker {
 public:
  LieMaker(const Knowledge& known, Dice& dice) : known_(known), dice_(dice) {}

  std::optional<Lie> make() {
    lie_.kind = static_cast<LieKind>(dice_.below(lieKinds()));
    lie_.to = static_cast<WorkerId>(dice_.below(kHonestWorkers));
    lie_.handshake = known_.handshake;
    if (!fill()) return std::nullopt;
    if (std::ranges::any_of(lie_.frames, [this](const auto& each) { return hasKnownEffect(each); }))
      return std::nullopt;
    return std::move(lie_);
  }

 private:
  /// Whether a frame does what it may do, although that outlives the liar:
  /// - A member may remove any name, and say that it is a client.
  /// - A member can join any context of a member whose number it guesses. If the context has never been, it stays until
  ///   that member is lost.
  /// - A worker that receives a fork of an RRef asks its owner for it, and the owner expects the call that makes the
  ///   value until its creator is lost. The creator in a false fork may be any worker, or none.
  bool hasKnownEffect(const std::string& head) const;
  bool fill();

  // --- what the liar knows ---

  /// A record of an honest worker whose place is not free for the taking.
  const WorkerRecord& other() { return known_.members->at(static_cast<WorkerId>(dice_.below(kHonestWorkers))); }
  std::string anyName();
  /// Where names are not proved, a later start of a worker is one of the places that anybody may take.
  uint64_t anyIncarnation() { return known_.incarnation + dice_.number() % kIncarnationStep; }
  const RecordedFrame* anyFrame(const std::vector<RecordedFrame>& frames, const std::vector<Kind>& kinds = {});
  static Message messageIn(const RecordedFrame& frame) { return decodeFrame({.head = frame.head}); }

  // --- how a lie is told ---

  bool hello(WorkerId id, const std::string& name, uint64_t incarnation, uint32_t version = kProtocolVersion);
  bool say(const Message& message);
  template <typename Change>
  bool alter(Change&& change, const std::vector<Kind>& kinds = {}) {
    const auto* frame = anyFrame(known_.own, kinds);
    if (!frame) return false;
    // Where names are not proved, an announcement with another incarnation is believed.
    if (frame->kind == Kind::kMemberJoined && !known_.group.provesNames()) return false;
    lie_.to = frame->to;
    lie_.frames = {frame->head};
    change(lie_.frames[0]);
    return true;
  }
  static void addTo(std::string& head, size_t at, uint64_t more);
  template <typename T>
  bool withField(size_t at) {
    return alter([&](std::string& head) { overwrite(head, at, static_cast<T>(dice_.number())); });
  }

  // --- who the liar is ---

  bool anotherWorker();
  bool place();
  bool rank();
  bool role();
  bool takesRole();
  bool firstFrame();
  bool order();

  // --- announcements ---

  static Message announcement(const WorkerRecord& record, const std::vector<WorkerId>& members);
  WorkerRecord ownRecord() const;
  bool joined();
  bool nobodyJoined();

  // --- the form of frames ---

  bool unknownKind();
  bool anotherKind();
  bool length();
  bool header();
  bool memberMessage();

  // --- RRefs ---

  GloballyUniqueId tampered(GloballyUniqueId id);
  void tamper(ForkRequest& request);
  /// One near the number, so that gaps of numbered streams are few, or any.
  uint64_t anyNumber(uint64_t number) { return dice_.chance(60) ? number + dice_.below(20) - 10 : dice_.number(); }
  void tamper(RRefFork& fork);
  bool rref();
  bool foreignRRef();

  // --- contexts ---

  static const std::vector<Kind>& passKinds();
  bool context();
  /// A context that lives, of other workers.
  std::optional<Message> overheardCall();
  bool foreignContext();
  bool liveSets();

  // --- calls ---

  /// A reply with the call id of a call of that worker, often of one that waits.
  std::string answerTo(WorkerId to);
  bool reply();
  bool repeated();
  bool foreignCall();
  bool key();

  // --- values ---

  bool namedObject();
  bool value();

  const Knowledge& known_;
  Dice& dice_;
  Lie lie_;
};

}  // namespace torchrpc::test
