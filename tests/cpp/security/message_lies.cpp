// The lies about what a message means: RRefs, contexts, calls and values.

#include "autograd/context_table.h"
#include "autograd/pass_messages.h"
#include "calls/repeatable_header.h"
#include "security/lie_maker.h"
#include "wire/codec.h"
#include "wire/value_codec.h"

namespace torchrpc::test {

// --- RRefs ---

GloballyUniqueId LieMaker::tampered(GloballyUniqueId id) {
  switch (dice_.below(5)) {
    case 0: id.key = dice_.number(); break;
    case 1: id.key ^= uint64_t{1} << dice_.below(64); break;
    case 2: id.local_id += dice_.chance(50) ? 1 : dice_.number(); break;
    case 3: id.created_on = other().info.id; break;
    default: id.created_on = static_cast<WorkerId>(dice_.number());
  }
  return id;
}

void LieMaker::tamper(ForkRequest& request) {
  switch (dice_.below(4)) {
    case 0: return void(request.rref = tampered(request.rref));
    case 1: return void(request.fork = tampered(request.fork));
    case 2: return void(request.creation = anyNumber(request.creation));
    default: request.registration = anyNumber(request.registration);
  }
}

void LieMaker::tamper(RRefFork& fork) {
  switch (dice_.below(8)) {
    case 0: return void(fork.rref = tampered(fork.rref));
    case 1: return void(fork.fork = tampered(fork.fork));
    case 2:
      return void(fork.owner.worker = static_cast<WorkerId>(dice_.chance(70) ? dice_.below(kPlaces) : dice_.number()));
    case 3: return void(fork.owner.incarnation = dice_.number());
    case 4:
      return void(fork.parent.worker = static_cast<WorkerId>(dice_.chance(70) ? dice_.below(kPlaces) : dice_.number()));
    case 5: return void(fork.parent.incarnation = dice_.number());
    case 6: return void(fork.creation = anyNumber(fork.creation));
    default: fork.delivery = anyNumber(fork.delivery);
  }
}

namespace {
/// The kinds of the messages that have RRefs.
std::vector<Kind> rrefKinds() {
  return {Kind::kRRefFetch,      Kind::kRRefForkRequest, Kind::kRRefChildAccept,
          Kind::kRRefUserDelete, Kind::kCppRemote,       Kind::kCppCall};
}
}  // namespace

bool LieMaker::rref() {
  const auto* frame = anyFrame(known_.own, rrefKinds());
  if (!frame) return false;
  auto message = messageIn(*frame);
  lie_.to = frame->to;
  if (frame->kind == Kind::kRRefFetch || frame->kind == Kind::kRRefForkRequest) {
    auto request = decodeForkRequest(message.payload);
    tamper(request);
    message.payload = encode(request);
  } else if (frame->kind == Kind::kRRefChildAccept) {
    message.payload = encodeChildAccept(tampered(decodeChildAccept(message.payload)));
  } else if (frame->kind == Kind::kRRefUserDelete) {
    auto deletions = decodeUserDeletes(message.payload);
    auto& deletion = deletions.front();
    ForkRequest request{deletion.rref, deletion.fork, kNoNumber, deletion.registration};
    tamper(request);
    deletion = {request.rref, request.fork, request.registration};
    message.payload = encode(deletions);
  } else if (const auto* result = message.header(HeaderKind::kRRefResult)) {
    const auto old = decodeRemoteResult(*result);
    ForkRequest request{old.rref, old.fork, old.creation, old.creation};
    tamper(request);
    message.setHeader(HeaderKind::kRRefResult, encode(RemoteResult{request.rref, request.fork, request.creation}));
  } else if (const auto* header = message.header(HeaderKind::kRRefForks)) {
    auto forks = decodeForks(*header);
    tamper(forks.front());
    message.setHeader(HeaderKind::kRRefForks, encodeForks(forks));
  } else {
    return false;
  }
  return say(message);
}

bool LieMaker::foreignRRef() {
  const auto* frame = anyFrame(known_.overheard, rrefKinds());
  if (!frame) return false;
  lie_.to = frame->to;
  lie_.frames = {frame->head};
  lie_.must_be_refused = frame->kind == Kind::kRRefFetch || frame->kind == Kind::kCppRemote;
  if (frame->kind == Kind::kCppCall) {
    if (!messageIn(*frame).header(HeaderKind::kRRefForks)) return false;
    lie_.must_be_refused = true;
  }
  if (frame->kind != Kind::kRRefFetch || dice_.chance(50)) return true;
  // A deletion of the fork that its holder has just used.
  const auto fetch = decodeForkRequest(messageIn(*frame).payload);
  lie_.must_be_refused = false;
  const std::vector<UserDelete> deletions = {{fetch.rref, fetch.fork, fetch.registration}};
  return say({.kind = Kind::kRRefUserDelete, .payload = encode(deletions)});
}

// --- contexts ---

const std::vector<Kind>& LieMaker::passKinds() {
  static const std::vector<Kind> kinds = {Kind::kAutogradMark, Kind::kAutogradGradients, Kind::kAutogradAbort};
  return kinds;
}

bool LieMaker::context() {
  const auto* frame = anyFrame(known_.is_member ? known_.own : known_.of_members, passKinds());
  if (!frame) return false;
  lie_.to = frame->to;
  lie_.frames = {frame->head};
  lie_.must_be_refused = !known_.is_member;
  auto& head = lie_.frames[0];
  const auto payload = messageIn(*frame).payload.size();
  const auto ids = payload / sizeof(int64_t);
  const auto at = head.size() - payload + dice_.below(ids) * sizeof(int64_t);
  overwrite(head, at, dice_.chance(50) ? anyNumber(known_.incarnation) : dice_.number());
  return true;
}

std::optional<Message> LieMaker::overheardCall() {
  const auto* frame = anyFrame(known_.in_contexts);
  if (!frame) return std::nullopt;
  lie_.to = frame->to;
  return messageIn(*frame);
}

bool LieMaker::foreignContext() {
  const auto call = overheardCall();
  if (!call) return false;
  Reader reader(*call->header(HeaderKind::kAutogradContext));
  const auto context = reader.get<ContextId>();
  if (dice_.chance(60)) lie_.to = makerOf(context);
  const auto sent = reader.get<MessageId>();
  // A pass of the liar, or the one that the owner will begin.
  const auto number = dice_.chance(50) ? makeAutogradId(known_.self.id, 1) : sent + 1 + dice_.below(3);
  const PassHeader pass{.context = context, .pass = static_cast<PassId>(number), .mode = BackwardMode::kSmart};
  switch (dice_.below(5)) {
    case 0: lie_.must_be_refused = true; return say(encode(MarkRequest{pass, {sent}}));
    case 1: {
      lie_.must_be_refused = true;
      GradientRequest request{.pass = pass, .sends = {}, .gradients = {}};
      request.gradients.send = sent;
      request.gradients.gradients = {call->tensors.at(0)};
      return say(encode(request));
    }
    case 2: return say(encode(AbortRequest{pass, Error(ErrorCode::kBackward, "the liar aborts it")}));
    case 3: {
      Message held{.kind = Kind::kAutogradHeld};
      Writer(held.payload).put(context);
      return say(held);
    }
    default: return say(encode(RRefBackwardRequest{pass, dice_.bytes(60)}));
  }
}

bool LieMaker::liveSets() {
  std::string sets;
  Writer out(sets);
  out.put(static_cast<WorkerId>(dice_.chance(80) ? dice_.below(kPlaces) : dice_.number()));
  out.put(dice_.number());
  out.put(static_cast<int64_t>(dice_.number()));
  out.put(uint32_t{0});
  if (dice_.chance(20)) sets.resize(dice_.below(sets.size()));
  if (dice_.chance(50)) return say({.kind = Kind::kAutogradRelease, .payload = sets});
  auto message = HonestGroup::callOf(Function::kCompute, 1);
  message.headers.push_back({HeaderKind::kAutogradLiveSets, sets});
  return say(message);
}

// --- calls ---

std::string LieMaker::answerTo(WorkerId to) {
  const auto awaited = known_.awaited(to);
  const auto call = awaited.empty() || dice_.chance(10) ? dice_.number() : dice_.any(awaited);
  lie_.has_own_call_ids = true;
  Message message{.kind = Kind::kReply};
  Writer(message.payload).put(dice_.next());
  if (dice_.chance(30)) message = encodeError(Error(ErrorCode::kUserException, "the liar answers"));
  if (dice_.chance(10)) {
    if (const auto* frame = anyFrame(known_.own, {Kind::kCppCall})) message.headers = messageIn(*frame).headers;
    message.kind = Kind::kReply;
    std::erase_if(message.headers, [](const Header& each) { return each.kind == HeaderKind::kAutogradContext; });
  }
  if (dice_.chance(10)) message.payload = dice_.bytes(40);
  message.call = call;
  return frameOf(message);
}

bool LieMaker::reply() {
  lie_.frames = {answerTo(lie_.to)};
  return true;
}

bool LieMaker::repeated() {
  if (!alter([](const std::string&) {})) return false;
  lie_.has_own_call_ids = dice_.chance(50);
  for (auto n = 1 + dice_.below(3); n > 0; --n) lie_.frames.push_back(lie_.frames[0]);
  return true;
}

bool LieMaker::foreignCall() {
  Message message{.kind = dice_.chance(50) ? Kind::kCancel : Kind::kStarted};
  Writer out(message.payload);
  if (message.kind == Kind::kStarted) out.put(dice_.number());
  const auto calls = known_.awaited(static_cast<WorkerId>(dice_.below(kHonestWorkers)));
  for (auto n = 1 + dice_.below(2); n > 0; --n) out.put(calls.empty() ? dice_.number() : dice_.any(calls));
  if (message.kind == Kind::kCancel) out.put(static_cast<uint8_t>(dice_.below(3)));
  return say(message);
}

bool LieMaker::key() {
  auto message = HonestGroup::callOf(Function::kCompute, dice_.number());
  const auto guessed = dice_.below(2000);
  RepeatableHeader header{
      .key = dice_.chance(60) ? "key " + std::to_string(guessed) : std::string(),
      .number = dice_.number(),
      .oldest = dice_.number(),
      .incarnation = dice_.chance(50) ? 0 : dice_.number(),
      .digest = dice_.number(),
      .attempt = static_cast<uint32_t>(dice_.number())};
  if (dice_.chance(10)) header.key = std::string(dice_.below(400), 'k');
  message.headers.push_back({HeaderKind::kRepeatable, header.encode()});
  return say(message);
}

// --- values ---

bool LieMaker::namedObject() {
  const auto kinds = known_.is_member ? std::vector<Kind>{Kind::kNameHold, Kind::kNameDrop, Kind::kNameFind}
                                      : std::vector<Kind>{Kind::kNameHold, Kind::kNameDrop};
  Message message{.kind = dice_.any(kinds)};
  if (message.kind == Kind::kNameHold) {
    const auto* frame = anyFrame(known_.is_member ? known_.own : known_.of_members, {Kind::kNameHold});
    if (!frame) return false;
    message = messageIn(*frame);
    message.payload.clear();
    lie_.to = frame->to;
    if (dice_.chance(40)) message.headers.clear();
  }
  Writer out(message.payload);
  const auto owner = other().info.id;
  out.putShort(dice_.chance(80) ? HonestGroup::nameOfObject(owner) : anyName());
  out.put(message.kind == Kind::kNameFind ? dice_.next() : dice_.number());
  lie_.must_be_refused = !known_.is_member;
  return say(message);
}

bool LieMaker::value() {
  Message message{.kind = dice_.chance(80) ? Kind::kBuiltinCall : Kind::kBuiltinRemote};
  Writer out(message.payload);
  out.putString("aten::add");
  out.putString("Scalar");
  out.put(uint32_t{3});
  const auto wrong = dice_.below(3);
  for (uint64_t i = 0; i < 3; ++i) {
    if (i != wrong) {
      out.put(ValueTag::kInt);
      out.put(int64_t{1});
      continue;
    }
    out.put(static_cast<uint8_t>(dice_.chance(80) ? dice_.below(25) : dice_.below(256)));
    for (int part = 0; part < 2; ++part) {
      switch (dice_.below(4)) {
        case 0: out.put(static_cast<uint32_t>(dice_.number())); break;
        case 1: out.put(dice_.number()); break;
        case 2: {
          const auto noise = dice_.bytes(16);
          out.putBytes(noise.data(), noise.size());
          break;
        }
        default: break;
      }
    }
  }
  return say(message);
}

}  // namespace torchrpc::test
