#include "security/lies.h"

#include <array>
#include <iterator>

#include "autograd/ids.h"
#include "security/lie_maker.h"
#include "wire/codec.h"

namespace torchrpc::test {

namespace {

constexpr std::array<std::string_view, 33> kNames = {
#define X(enumerator, name) name,
    TORCHRPC_LIES(X)
#undef X
};

constexpr Kind kKinds[] = {
#define X(enumerator, number, role, delivery, sender, operation, callable, name) Kind::enumerator,
    TORCHRPC_KINDS(X)
#undef X
};

}  // namespace

std::string_view name(LieKind kind) { return kNames.at(static_cast<size_t>(kind)); }
size_t lieKinds() { return kNames.size(); }

uint64_t Dice::next() {
  // splitmix64
  state_ += 0x9E3779B97F4A7C15ull;
  auto mixed = state_;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
  return mixed ^ (mixed >> 31);
}

std::string Dice::bytes(size_t most) {
  std::string out(1 + below(most), '\0');
  for (auto& byte : out) byte = static_cast<char>(next());
  return out;
}

uint64_t Dice::number() {
  constexpr uint64_t kNumbers[] = {0,          1,    2,          3,          7,
                                   63,         255,  256,        65535,      1 << 20,
                                   1ull << 31, ~0u,  1ull << 48, 1ull << 62, (1ull << 63) - 1,
                                   1ull << 63, ~0ull};
  return chance(70) ? kNumbers[below(std::size(kNumbers))] : next() >> below(64);
}

std::string helloFrame(WorkerId id, const std::string& name, uint64_t incarnation, uint32_t version) {
  Message message{.kind = Kind::kHello};
  Writer out(message.payload);
  out.put(version);
  out.put(id);
  out.putString(name);
  out.put(incarnation);
  return frameOf(message);
}

std::string frameOf(const Message& message) { return encodeFrame(message).head; }

bool LieMaker::hasKnownEffect(const std::string& head) const {
  uint32_t headers = 0;
  if (head.size() < kFixedBytes) return false;
  const auto kind = peekFrame(head)->kind;
  if (known_.is_member && lie_.kind != LieKind::kNamedObject && kind == Kind::kNameDrop) return true;
  std::memcpy(&headers, head.data() + kHeadersAt, sizeof(headers));
  if (headers == 0 && kind != Kind::kMemberJoined) return false;
  try {
    const auto message = decodeFrame({.head = head});
    if (kind == Kind::kMemberJoined) {
      const auto record = decodeRecord(Reader(message.payload).getString());
      return record.info == known_.self && known_.is_member && !record.is_member;
    }
    const auto* context = message.header(HeaderKind::kAutogradContext);
    if (known_.is_member && context && context->size() >= sizeof(ContextId)) {
      const auto owner = makerOf(Reader(*context).get<ContextId>());
      if (owner != known_.self.id && known_.members->contains(owner)) return true;
    }
    const auto* forks = message.header(HeaderKind::kRRefForks);
    return forks && std::ranges::any_of(decodeForks(*forks), [this](const RRefFork& each) {
             return each.parent.worker == known_.self.id && each.rref.created_on != known_.self.id;
           });
  } catch (const Error&) {
    return false;
  }
}

bool LieMaker::fill() {
  switch (lie_.kind) {
    case LieKind::kName: return hello(known_.self.id, anyName(), known_.incarnation);
    case LieKind::kId: return hello(other().info.id, known_.self.name, anyIncarnation());
    case LieKind::kWorker: return anotherWorker();
    case LieKind::kPlace: return place();
    case LieKind::kIncarnation:
      // A greater one is that of another start of this worker, and no lie.
      return known_.is_known && hello(known_.self.id, known_.self.name, dice_.number() % known_.incarnation);
    case LieKind::kRank: return rank();
    case LieKind::kRole: return role();
    case LieKind::kVersion:
      return hello(known_.self.id, known_.self.name, known_.incarnation, static_cast<uint32_t>(dice_.number() % 100));
    case LieKind::kFirstFrame: return firstFrame();
    case LieKind::kOrder: return order();
    case LieKind::kJoined: return joined();
    case LieKind::kNobodyJoined: return nobodyJoined();
    case LieKind::kCount:
      return withField<uint32_t>(dice_.any(std::vector<size_t>{kHeadersAt, kTensorsAt, kSegmentsAt}));
    case LieKind::kLength: return length();
    case LieKind::kTruncated: return alter([&](std::string& head) { head.resize(dice_.below(head.size())); });
    case LieKind::kExtended:
      return alter([&](std::string& head) {
        const auto more = dice_.bytes(32);
        if (dice_.chance(60)) addTo(head, kPayloadSizeAt, more.size());
        head += more;
      });
    case LieKind::kFlipped:
      return alter([&](std::string& head) {
        for (auto n = 1 + dice_.below(3); n > 0; --n) {
          head[dice_.below(head.size())] ^= static_cast<char>(1 << dice_.below(8));
        }
      });
    case LieKind::kKind: return anotherKind();
    case LieKind::kUnknownKind: return unknownKind();
    case LieKind::kHeader: return header();
    case LieKind::kMemberMessage: return memberMessage();
    case LieKind::kRRef: return rref();
    case LieKind::kForeignRRef: return foreignRRef();
    case LieKind::kContext: return context();
    case LieKind::kForeignContext: return foreignContext();
    case LieKind::kLiveSets: return liveSets();
    case LieKind::kReply: return reply();
    case LieKind::kRepeated: return repeated();
    case LieKind::kForeignCall: return foreignCall();
    case LieKind::kKey: return key();
    case LieKind::kNamedObject: return namedObject();
    case LieKind::kValue: return value();
    case LieKind::kAnswer: return false;  // told when an honest worker asks
  }
  return false;
}

// --- what the liar knows ---

std::string LieMaker::anyName() {
  switch (dice_.below(6)) {
    case 0: return {};
    case 1: return std::string(1 + dice_.below(3000), 'x');
    case 2: return dice_.bytes(12);
    default: return other().info.name;
  }
}

const RecordedFrame* LieMaker::anyFrame(const std::vector<RecordedFrame>& frames, const std::vector<Kind>& kinds) {
  if (frames.empty()) return nullptr;
  const auto start = dice_.below(frames.size());
  for (size_t i = 0; i < frames.size(); ++i) {
    const auto& frame = frames[(start + i) % frames.size()];
    if (kinds.empty() || std::ranges::find(kinds, frame.kind) != kinds.end()) return &frame;
  }
  return nullptr;
}

// --- how a lie is told ---

bool LieMaker::hello(WorkerId id, const std::string& name, uint64_t incarnation, uint32_t version) {
  lie_.is_over_new_connection = true;
  if (id == known_.self.id && name == known_.self.name && incarnation == known_.incarnation &&
      version == kProtocolVersion) {
    return false;
  }
  lie_.frames = {helloFrame(id, name, incarnation, version)};
  // What a worker that takes another one's place would send.
  if (dice_.chance(50)) lie_.frames.push_back(frameOf(HonestGroup::callOf(Function::kCompute, 1)));
  if (dice_.chance(20)) lie_.frames.push_back(answerTo(lie_.to));
  return true;
}

bool LieMaker::say(const Message& message) {
  lie_.frames = {frameOf(message)};
  return true;
}

void LieMaker::addTo(std::string& head, size_t at, uint64_t more) {
  uint64_t value = 0;
  std::memcpy(&value, head.data() + at, sizeof(value));
  overwrite(head, at, value + more);
}

// --- who the liar is ---

bool LieMaker::anotherWorker() {
  const auto record = other();
  if (known_.group.provesNames()) return hello(record.info.id, record.info.name, dice_.number());
  // Without a proof of names only an earlier incarnation than the known one is refused, so the lie claims that.
  if (dice_.chance(50)) {
    lie_.handshake.name = known_.group.proof == GroupKind::Proof::kSecret ? record.info.name : std::string();
  }
  return hello(record.info.id, record.info.name, dice_.number() % record.incarnation);
}

bool LieMaker::place() {
  const auto& prey = known_.members->at(kPrey);
  if (known_.group.provesNames()) return hello(kPrey, prey.info.name, prey.incarnation + dice_.number() % 2);
  if (!dice_.chance(3)) return false;  // the group has to restore it
  lie_.claimed_id = kPrey;
  lie_.claimed_incarnation = prey.incarnation + dice_.below(kIncarnationStep);
  if (known_.group.proof == GroupKind::Proof::kSecret) lie_.handshake.name = prey.info.name;
  if (!known_.group.grows && dice_.chance(50)) {
    auto record = prey;
    record.incarnation = lie_.claimed_incarnation;
    record.address = known_.address;
    lie_.handshake = known_.handshake;
    return say(announcement(record, {}));
  }
  return hello(kPrey, prey.info.name, lie_.claimed_incarnation);
}

bool LieMaker::rank() {
  const std::vector<WorkerId> ranks = {
      -2147483648,
      -2,
      -1,
      kPlaces,
      kPlaces + 1,
      63,
      64,
      32767,
      32768,
      65536,
      1 << 20,
      2147483647,
      static_cast<WorkerId>(dice_.below(1 << 15)) + kPlaces};
  const auto id = dice_.any(ranks);
  if (known_.group.grows && !known_.group.provesNames() && dice_.chance(50)) {
    const auto name = "nobody" + std::to_string(dice_.below(1000));
    if (known_.group.proof == GroupKind::Proof::kSecret) lie_.handshake.name = name;
    return hello(id, name, dice_.number());
  }
  return hello(id, known_.self.name, known_.incarnation);
}

bool LieMaker::role() {
  if (!known_.group.provesNames()) return false;
  if (dice_.chance(50)) {
    lie_.handshake.identity->roles = {dice_.chance(50) ? "client" : PeerIdentity::kObserverRole};
    // A client that says that it is the member of its name.
    if (known_.is_known && known_.is_member) return takesRole();
    return hello(kLiar, known_.members->at(kLiar).info.name, known_.incarnation);
  }
  auto record = ownRecord();
  record.is_member = !known_.is_member;
  if (known_.is_member) record.incarnation += 1;  // a member may say that it is a client, but only of this start
  lie_.must_be_refused = true;
  return say(announcement(record, {}));
}

bool LieMaker::takesRole() {
  lie_.is_over_new_connection = true;
  lie_.frames = {helloFrame(known_.self.id, known_.self.name, known_.incarnation, kProtocolVersion)};
  lie_.frames.push_back(frameOf(HonestGroup::callOf(Function::kCompute, 1)));
  lie_.must_be_refused = true;
  return true;
}

bool LieMaker::firstFrame() {
  lie_.is_over_new_connection = true;
  switch (dice_.below(5)) {
    case 0: lie_.frames = {frameOf({.kind = Kind::kPing})}; break;
    case 1: lie_.frames = {dice_.bytes(80)}; break;
    case 2: lie_.frames = {frameOf({.kind = Kind::kInspect, .payload = dice_.bytes(2)})}; break;
    default:
      const auto* frame = anyFrame(known_.own);
      if (!frame || frame->kind == Kind::kHello) return false;
      lie_.must_be_refused = roleOf(frame->kind) == Role::kRequest;
      lie_.frames = {frame->head};
  }
  if (dice_.chance(30)) {
    lie_.frames.push_back(helloFrame(known_.self.id, known_.self.name, known_.incarnation, kProtocolVersion));
  }
  return true;
}

bool LieMaker::order() {
  std::vector<std::string> frames;
  WorkerId to = kNoWorker;
  for (int i = 0; i < 4; ++i) {
    const auto* frame = anyFrame(known_.own);
    if (!frame || (to != kNoWorker && frame->to != to)) continue;
    to = frame->to;
    frames.push_back(frame->head);
  }
  if (frames.empty()) return false;
  if (dice_.chance(30)) {
    const auto& record = other();
    frames.push_back(helloFrame(record.info.id, record.info.name, dice_.number(), kProtocolVersion));
  }
  lie_.to = to;
  lie_.frames = std::move(frames);
  // GOODBYE ends this worker, over whichever connection it comes.
  if (dice_.chance(1)) lie_.frames.insert(lie_.frames.begin(), frameOf({.kind = Kind::kGoodbye}));
  return true;
}

// --- announcements ---

Message LieMaker::announcement(const WorkerRecord& record, const std::vector<WorkerId>& members) {
  Message message{.kind = Kind::kMemberJoined};
  Writer out(message.payload);
  out.putString(encodeRecord(record));
  for (const auto id : members) out.put(id);
  return message;
}

WorkerRecord LieMaker::ownRecord() const {
  return {
      .info = known_.self,
      .address = known_.address,
      .world_size = known_.group.grows ? 0 : kPlaces,
      .incarnation = known_.incarnation,
      .metadata = {},
      .is_member = known_.is_member};
}

bool LieMaker::joined() {
  auto record = other();
  record.address = known_.address;
  record.is_member = dice_.chance(80);
  switch (dice_.below(3)) {
    case 0: record.info = {record.info.name, known_.self.id}; break;
    case 1: record.info = {known_.self.name, record.info.id}; break;
    default:
      // Where names are not proved, an announcement of a later start is believed.
      if (!known_.group.provesNames() && !known_.group.grows) return false;
  }
  record.incarnation = anyIncarnation();
  lie_.must_be_refused = true;
  return say(announcement(record, {}));
}

bool LieMaker::nobodyJoined() {
  auto record = ownRecord();
  std::vector<WorkerId> members;
  switch (dice_.below(4)) {
    case 0:
      record.info.id = static_cast<WorkerId>(dice_.number());
      if (record.info.id == known_.self.id) return false;
      lie_.must_be_refused = true;
      break;
    case 1:
      record.info.name = anyName();
      if (record.info.name == known_.self.name) return false;
      lie_.must_be_refused = true;
      break;
    case 2:
      record.world_size = static_cast<int32_t>(dice_.number());
      if (record.world_size == kPlaces) return false;
      lie_.must_be_refused = true;
      break;
    default:
      for (auto n = 1 + dice_.below(12); n > 0; --n) members.push_back(static_cast<WorkerId>(dice_.number() % 70));
      lie_.must_be_refused = known_.group.provesNames() || known_.group.grows || members.size() > kPlaces;
  }
  return say(announcement(record, members));
}

// --- the form of frames ---

bool LieMaker::unknownKind() {
  const auto kind = static_cast<Kind>(dice_.number());
  if (roleOf(kind)) return false;
  return alter([&](std::string& head) { overwrite(head, 0, kind); });
}

bool LieMaker::anotherKind() {
  const auto kind = kKinds[dice_.below(std::size(kKinds))];
  return alter([&](std::string& head) { overwrite(head, 0, kind); });
}

bool LieMaker::length() {
  if (dice_.chance(30)) return withField<uint64_t>(kPayloadSizeAt);
  // A u64 that is as small as the length of a string.
  return alter([&](std::string& head) {
    std::vector<size_t> lengths;
    for (size_t at = kFixedBytes; at + sizeof(uint64_t) <= head.size(); ++at) {
      uint64_t length = 0;
      std::memcpy(&length, head.data() + at, sizeof(length));
      if (length > 0 && length <= head.size()) lengths.push_back(at);
    }
    overwrite(head, lengths.empty() ? kPayloadSizeAt : dice_.any(lengths), dice_.number());
  });
}

bool LieMaker::header() {
  const auto* frame = anyFrame(known_.own);
  if (!frame) return false;
  auto message = messageIn(*frame);
  lie_.to = frame->to;
  const auto kind = static_cast<HeaderKind>(1 + dice_.below(17));
  // A member may join a context whose number it guesses.
  if (kind == HeaderKind::kAutogradContext && known_.is_member) return false;
  if (message.headers.empty() || dice_.chance(50)) {
    message.headers.push_back({kind, dice_.chance(50) ? dice_.bytes(40) : message.payload});
  } else {
    auto& chosen = message.headers[dice_.below(message.headers.size())];
    if (chosen.kind == HeaderKind::kAutogradContext && known_.is_member) return false;
    dice_.chance(50) ? void(chosen.kind = kind) : void(chosen.bytes = dice_.bytes(40));
  }
  return say(message);
}

bool LieMaker::memberMessage() {
  if (known_.is_member || known_.of_members.empty()) return false;
  const auto& frame = dice_.any(known_.of_members);
  lie_.to = frame.to;
  lie_.frames = {frame.head};
  lie_.must_be_refused = true;
  return true;
}

std::optional<Lie> makeLie(const Knowledge& known, Dice& dice) { return LieMaker(known, dice).make(); }

}  // namespace torchrpc::test
