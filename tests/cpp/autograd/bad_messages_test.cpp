// Malformed and unexpected messages: requests get an error or take effect, nothing crashes or hangs, and all that they
// have created ends with the context.

#include <random>

#include "autograd/autograd_group.h"
#include "wire/codec.h"

using namespace torchrpc;
using namespace torchrpc::test;
using Catch::Matchers::Contains;
using namespace std::chrono_literals;

namespace {

/// The headers as in wire/PROTOCOL.md.
std::string contextHeader(ContextId context, MessageId message, uint32_t tensors) {
  std::string out;
  Writer writer(out);
  writer.put(context);
  writer.put(message);
  writer.put(tensors);
  writer.put(true);
  writer.put(makeAutogradId(1, 1));
  return out;
}

std::string snapshotOf0(uint64_t version, std::initializer_list<ContextId> alive) {
  std::string out;
  Writer writer(out);
  writer.put<WorkerId>(0);
  writer.put(version);
  writer.put<int64_t>(1);
  writer.put(static_cast<uint32_t>(alive.size()));
  for (const auto id : alive) writer.put(id);
  return out;
}

/// The error that `sender` gets for the message; "no error" if it gets none.
std::string textOfReply(AutogradWorker& sender, int to, Message message) {
  const auto reply = sender.requestRaw(to, std::move(message));
  return reply ? "no error" : reply.error().text();
}

/// Worker 0 has called worker 1 once in a context; the tests send messages of their own from worker 0.
struct MessagesFixture {
  MessagesFixture() {
    group.setProgressTimeout(5ms);
    result = group[0].callOne(1, "double", {x});
    for (const auto& send : contextOf1().sends()) send_of_1 = send->id();
    setCurrentContext(nullptr);
  }

  AutogradContext& contextOf1() { return *group[1].autograd().context(id); }
  PassHeader pass(BackwardMode mode = BackwardMode::kSmart) {
    return {id, makeAutogradId(0, 1000 + next_pass++), mode, /*retain_graph=*/true};
  }
  std::string errorOfReply(Message message) { return textOfReply(group[0], 1, std::move(message)); }

  /// A valid message of each kind, and a call with each header.
  static constexpr int kMessages = 7;
  Message valid(int which) {
    switch (which) {
      case 0: return encode(MarkRequest{pass(), {send_of_1}});
      case 1: return encode(GradientRequest{pass(), {send_of_1}, {send_of_1, {at::ones({2})}}});
      case 2: return encode(AbortRequest{pass(), Error(ErrorCode::kBackward, "it failed", "worker0")});
      case 3: return {.kind = Kind::kAutogradRelease, .payload = snapshotOf0(1, {id})};
      case 4: return encode(RRefBackwardRequest{pass(), rref_name});
      case 5:
        return callWith(
            HeaderKind::kAutogradContext, contextHeader(id, makeAutogradId(0, 2000), 1),
            at::ones({2}).requires_grad_());
      default: return callWith(HeaderKind::kAutogradLiveSets, snapshotOf0(1, {id}), at::ones({2}));
    }
  }
  static Message callWith(HeaderKind header, std::string bytes, const at::Tensor& arg) {
    return {.kind = Kind::kCppCall, .headers = {{header, std::move(bytes)}}, .payload = "double", .tensors = {arg}};
  }
  /// The bytes of the message that the autograd layer reads.
  static std::string& bytesOf(Message& message) {
    return message.headers.empty() ? message.payload : message.headers[0].bytes;
  }

  bool stillServes() { return holds(group[0].callOne(1, "double", {at::ones({2})}), 2); }
  /// Whether all contexts and passes end with the context.
  bool endsWithContext() {
    group[0].autograd().release(id);
    return eventually([&] { return group.contexts() == 0; }) && group.passes() == 0;
  }

  AutogradGroup group{2, {{"double", [](AutogradWorker&, Tensors args) -> Tensors { return {args.at(0) * 2}; }}}};
  ContextId id = group[0].autograd().newContext()->id();
  at::Tensor x = leaf(1), result;
  MessageId send_of_1 = kNoAutogradId;
  int next_pass = 0;
  RRefPtr rref = group.give(1, (leaf(1) * 2).sum(), 0);
  std::string rref_name = RRefService::encodeName(static_cast<const UserRRef&>(*rref));
};

}  // namespace

TEST_CASE("a truncated message is rejected") {
  MessagesFixture t;
  const auto which = GENERATE(range(0, MessagesFixture::kMessages));
  INFO("message " << which);
  const auto whole = t.valid(which);
  auto copy = whole;
  for (size_t size = 0; size < MessagesFixture::bytesOf(copy).size(); ++size) {
    auto part = whole;
    MessagesFixture::bytesOf(part).resize(size);
    INFO("cut to " << size << " bytes");
    // Valid as well: a shorter list that extends to the end of the payload, and no snapshot at all.
    const bool list = which == 0 && size == 18;
    const bool empty = size == 0 && (which == 3 || which == 6);
    const bool fewer = which == 5 && size == 21;
    CHECK((t.errorOfReply(part) != "no error") == !(list || empty || fewer));
  }
  CHECK(t.contextOf1().send(t.send_of_1));
  CHECK(t.stillServes());
  CHECK(t.endsWithContext());
}

TEST_CASE("messages with random byte changes do no harm") {
  MessagesFixture t;
  const auto which = GENERATE(range(0, MessagesFixture::kMessages));
  const auto seed = GENERATE(1u, 2u);
  INFO("message " << which << ", seed " << seed);
  std::mt19937 random(seed);
  const bool has_snapshots = which == 3 || which == 6;
  // The context id is left out: a context of another owner would end only with a snapshot of that owner.
  const size_t first = which == 5 ? sizeof(ContextId) : 0;
  // So are the RRef's numbers: the pass could wait for a value that is never set.
  const size_t past = which == 4 ? 2 * sizeof(uint64_t) : 0;
  for (int round = 0; round < 1000; ++round) {
    auto message = t.valid(which);
    auto& bytes = MessagesFixture::bytesOf(message);
    for (auto changes = 1 + random() % 3; changes > 0; --changes) {
      bytes[first + random() % (bytes.size() - first - past)] = static_cast<char>(random());
    }
    if (which == 1 && random() % 2) {
      const at::Tensor odd[] = {
          at::ones({3}), at::ones({2}, at::kLong), at::empty({2}, at::device(at::kMeta)), at::ones({2}).to_sparse()};
      message.tensors[0] = odd[random() % std::size(odd)];
    }
    static_cast<void>(t.group[0].requestRaw(1, std::move(message)));  // any reply
  }
  CHECK(t.stillServes());
  if (!has_snapshots) CHECK(t.endsWithContext());  // a changed snapshot may have ended it, and later ones
}

TEST_CASE("gradients that do not fit are rejected, and their pass ends") {
  MessagesFixture t;
  const auto errorOfReply = [&](MessageId send, const variable_list& gradients) {
    return t.errorOfReply(encode(GradientRequest{t.pass(), {t.send_of_1}, {send, gradients}}));
  };
  CHECK_THAT(errorOfReply(t.send_of_1, {}), Contains("does not wait for"));
  CHECK_THAT(errorOfReply(t.send_of_1, {at::ones({2}), at::ones({2})}), Contains("does not wait for"));
  CHECK_THAT(errorOfReply(t.send_of_1 + 1, {at::ones({2})}), Contains("does not wait for"));
  CHECK_THAT(errorOfReply(t.send_of_1, {at::ones({3})}), Contains("Error on Node 1") && Contains("invalid gradient"));
  CHECK_THAT(errorOfReply(t.send_of_1, {at::ones({2}, at::kComplexFloat)}), Contains("Error on Node 1"));
  CHECK_THAT(errorOfReply(t.send_of_1, {at::ones({2}, at::device(at::kMeta))}), Contains("Error on Node 1"));
  CHECK_THAT(
      t.errorOfReply(encode(GradientRequest{t.pass(), {t.send_of_1 + 1}, {t.send_of_1, {at::ones({2})}}})),
      Contains("not recorded"));
  auto fewer = encode(GradientRequest{t.pass(), {t.send_of_1}, {t.send_of_1, {at::ones({2})}}});
  fewer.tensors.clear();
  CHECK_THAT(t.errorOfReply(fewer), Contains("fewer gradients than it says"));
  CHECK(t.group[1].autograd().gradients(t.id).empty());
  CHECK(t.endsWithContext());
}

TEST_CASE("a pass of an unknown context, mode or message is rejected") {
  MessagesFixture t;
  auto pass = t.pass();
  CHECK_THAT(t.errorOfReply(encode(MarkRequest{pass, {t.send_of_1 + 1}})), Contains("not recorded"));
  pass.context = makeAutogradId(0, 4242);
  CHECK_THAT(t.errorOfReply(encode(MarkRequest{pass, {}})), Contains("Could not find autograd context"));
  pass = t.pass(static_cast<BackwardMode>(7));
  CHECK_THAT(t.errorOfReply(encode(MarkRequest{pass, {}})), Contains("no known mode"));
  CHECK_THAT(t.errorOfReply(encode(RRefBackwardRequest{pass, t.rref_name})), Contains("no known mode"));
  CHECK_THAT(t.errorOfReply(encode(RRefBackwardRequest{t.pass(), "?"})), Contains("malformed"));
  CHECK(t.endsWithContext());
}

TEST_CASE("a started pass rejects marks, and a failed one rejects marks and gradients") {
  MessagesFixture t;
  // The pass waits for the gradients of the second message, which are never sent.
  setCurrentContext(t.group[0].autograd().context(t.id));
  const auto other = t.group[0].callOne(1, "double", {t.x});
  setCurrentContext(nullptr);
  MessageId second = kNoAutogradId;
  for (const auto& send : t.contextOf1().sends()) second = send->id();
  REQUIRE(second != t.send_of_1);
  const auto pass = t.pass();
  REQUIRE(t.errorOfReply(encode(MarkRequest{pass, {t.send_of_1, second}})) == "no error");
  Pending started;
  t.group.agent(0).request(
      1, encode(GradientRequest{pass, {}, {t.send_of_1, {at::ones({2})}}}), 20s, started.handler());
  REQUIRE(eventually([&] { return t.errorOfReply(encode(MarkRequest{pass, {second}})) != "no error"; }));
  CHECK_THAT(t.errorOfReply(encode(MarkRequest{pass, {second}})), Contains("cannot grow"));
  CHECK_THAT(
      t.errorOfReply(encode(GradientRequest{pass, {}, {t.send_of_1, {at::ones({2})}}})), Contains("does not wait for"));
  CHECK_FALSE(started.done());

  REQUIRE(t.errorOfReply(encode(AbortRequest{pass, Error(ErrorCode::kBackward, "it failed")})) == "no error");
  CHECK(started.get().error().text() == "it failed");
  CHECK_THAT(t.errorOfReply(encode(MarkRequest{pass, {second}})), Contains("it failed"));
  CHECK_THAT(t.errorOfReply(encode(GradientRequest{pass, {}, {second, {at::ones({2})}}})), Contains("it failed"));
  CHECK(t.group[1].autograd().gradients(t.id).empty());
  CHECK(t.endsWithContext());
}

TEST_CASE("a worker that takes no part in a context finds none, and changes nothing") {
  AutogradGroup group(3, {{"double", [](AutogradWorker&, Tensors args) -> Tensors { return {args.at(0) * 2}; }}});
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  const auto result = group[0].callOne(1, "double", {x});
  const auto send = group[1].autograd().context(context.id())->sends().at(0)->id();
  const PassHeader pass{context.id(), makeAutogradId(0, 2), BackwardMode::kSmart, false};
  const auto mark = encode(MarkRequest{pass, {send}});
  const auto gradients = encode(GradientRequest{pass, {send}, {send, {at::ones({2})}}});
  CHECK_THAT(textOfReply(group[2], 1, mark), Contains("Could not find autograd context"));
  CHECK_THAT(textOfReply(group[2], 1, gradients), Contains("Could not find autograd context"));
  // The next passes of the owner, which would fail when they begin.
  for (int64_t next = 1; next < 20; ++next) {
    auto forged = pass;
    forged.pass = makeAutogradId(0, next);
    for (const int to : {0, 1}) {
      textOfReply(group[2], to, encode(AbortRequest{forged, Error(ErrorCode::kBackward, "forged")}));
    }
  }
  CHECK(group.passes() == 0);
  group[0].autograd().backward(context.id(), {result.sum()}, false, BackwardMode::kSmart);
  CHECK(holds(gradientOf(group[0], context.id(), x), 2));
}

TEST_CASE("a worker that takes part in a context cannot send gradients for the messages of others") {
  AutogradGroup group(3, {{"double", [](AutogradWorker&, Tensors args) -> Tensors { return {args.at(0) * 2}; }}});
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  const auto result = group[0].callOne(1, "double", {x});
  const auto of_1 = group[1].autograd().context(context.id())->sends().at(0)->id();
  const auto of_0 = group[0].autograd().context(context.id())->sends().at(0)->id();
  group[0].callOne(2, "double", {leaf(1)});
  setCurrentContext(group[2].autograd().context(context.id()));
  group[2].callOne(1, "double", {leaf(1)});
  setCurrentContext(nullptr);
  const PassHeader pass{context.id(), makeAutogradId(2, 77), BackwardMode::kSmart, false};
  for (const auto& [to, send] : {std::pair{0, of_0}, std::pair{1, of_1}}) {
    CHECK_THAT(textOfReply(group[2], to, encode(MarkRequest{pass, {send}})), Contains("not recorded"));
    CHECK_THAT(
        textOfReply(group[2], to, encode(GradientRequest{pass, {send}, {send, {at::ones({2})}}})),
        Contains("not recorded"));
  }
  CHECK_FALSE(gradientOf(group[0], context.id(), x).defined());
  group[0].autograd().backward(context.id(), {result.sum()}, false, BackwardMode::kSmart);
  CHECK(holds(gradientOf(group[0], context.id(), x), 2));
}

TEST_CASE("a pass does not begin at a value that the worker which asks for it does not hold") {
  AutogradGroup group(3);
  const auto rref = group.give(1, (leaf(1) * 2).sum(), 0);
  const OwnContext context(group[2]);
  const PassHeader pass{context.id(), kNoAutogradId, BackwardMode::kSmart, false};
  const auto name = RRefService::encodeName(static_cast<const UserRRef&>(*rref));
  const auto reply = group[2].requestRaw(1, encode(RRefBackwardRequest{pass, name}));
  REQUIRE_FALSE(reply.ok());
  CHECK(reply.error().code() == ErrorCode::kRRefDeleted);
}

TEST_CASE("an abort that arrives before its pass prevents the pass") {
  MessagesFixture t;
  const auto pass = t.pass();
  REQUIRE(t.errorOfReply(encode(AbortRequest{pass, Error(ErrorCode::kBackward, "it failed")})) == "no error");
  CHECK_THAT(t.errorOfReply(encode(MarkRequest{pass, {t.send_of_1}})), Contains("it failed"));
  CHECK(t.group.passes() == 0);
  CHECK(t.endsWithContext());
}

TEST_CASE("a snapshot that is malformed after its beginning ends no context") {
  MessagesFixture t;
  const auto both = snapshotOf0(9, {}) + snapshotOf0(9, {}).substr(0, 10);
  CHECK_THAT(t.errorOfReply({.kind = Kind::kAutogradRelease, .payload = both}), Contains("malformed"));
  CHECK(t.contextOf1().send(t.send_of_1));
  CHECK(t.endsWithContext());
}

TEST_CASE("the number of tensors that require grad must be the one in the header") {
  MessagesFixture t;
  const auto errorOfReply = [&](uint32_t tensors, const at::Tensor& arg) {
    return t.errorOfReply(MessagesFixture::callWith(
        HeaderKind::kAutogradContext, contextHeader(t.id, makeAutogradId(0, 3000), tensors), arg));
  };
  CHECK_THAT(errorOfReply(0, leaf(1)), Contains("require grad and are not recorded"));
  CHECK_THAT(errorOfReply(2, leaf(1)), Contains("require grad and are not recorded"));
  CHECK_THAT(errorOfReply(1, at::ones({2})), Contains("require grad and are not recorded"));
  CHECK(t.contextOf1().recvs().size() == 1);
  CHECK(t.endsWithContext());
}

TEST_CASE("a reply with truncated gradients is rejected, an empty one has no gradients") {
  const auto whole = encode(GradientReply{MessageGradients{7, {at::ones({2}), at::Tensor(), at::ones({3})}}});
  CHECK(decodeGradientReply(whole).gradients->gradients.size() == 3);
  CHECK_FALSE(decodeGradientReply({.kind = Kind::kReply}).gradients);
  auto fewer = whole;
  fewer.tensors.pop_back();
  CHECK_THROWS_WITH(decodeGradientReply(fewer), Contains("fewer gradients than it says"));
  for (size_t size = 1; size < sizeof(MessageId); ++size) {
    auto part = whole;
    part.payload.resize(size);
    CHECK_THROWS_WITH(decodeGradientReply(part), Contains("malformed"));
  }
}
