// What no client of ours would send: requests are answered with an error or do what they say, nothing crashes or hangs,
// and with the context all that has come of them ends.

#include <random>

#include "autograd/autograd_group.h"
#include "wire/codec.h"

using namespace torchrpc;
using namespace torchrpc::test;
using Catch::Matchers::Contains;
using namespace std::chrono_literals;

namespace {

/// The headers as wire/PROTOCOL.md has them.
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

std::string rolls(uint64_t version, std::initializer_list<ContextId> alive) {
  std::string out;
  Writer writer(out);
  writer.put<WorkerId>(0);
  writer.put(version);
  writer.put<int64_t>(1);
  writer.put(static_cast<uint32_t>(alive.size()));
  for (const auto id : alive) writer.put(id);
  return out;
}

/// Worker 0 has called worker 1 in a context, once; it sends what a test makes.
struct Target {
  Target() {
    group.setPatience(5ms);
    result = group[0].callOne(1, "double", {x});
    for (const auto& send : at1().sends()) send_of_1 = send->id();
    setCurrentContext(nullptr);
  }

  AutogradContext& at1() { return *group[1].autograd().context(id); }
  PassHeader pass(BackwardMode mode = BackwardMode::kSmart) {
    return {id, makeAutogradId(0, 1000 + next_pass++), mode, /*retain_graph=*/true};
  }
  std::string refusal(Message message) {
    const auto reply = group[0].ask(1, std::move(message));
    return reply ? "no error" : reply.error().text();
  }

  /// A valid message of each kind, and calls with each header.
  static constexpr int kMessages = 7;
  Message valid(int which) {
    switch (which) {
      case 0: return encode(MarkRequest{pass(), {send_of_1}});
      case 1: return encode(GradientRequest{pass(), {send_of_1}, {send_of_1, {at::ones({2})}}});
      case 2: return encode(AbortRequest{pass(), Error(ErrorCode::kBackward, "it failed", "worker0")});
      case 3: return {.kind = Kind::kAutogradRelease, .payload = rolls(1, {id})};
      case 4: return encode(RRefBackwardRequest{pass(), rref_name});
      case 5:
        return callWith(
            HeaderKind::kAutogradContext, contextHeader(id, makeAutogradId(0, 2000), 1),
            at::ones({2}).requires_grad_());
      default: return callWith(HeaderKind::kAutogradLiveSets, rolls(1, {id}), at::ones({2}));
    }
  }
  static Message callWith(HeaderKind header, std::string bytes, const at::Tensor& arg) {
    return {.kind = Kind::kCppCall, .headers = {{header, std::move(bytes)}}, .payload = "double", .tensors = {arg}};
  }
  /// What the autograd layer reads of it.
  static std::string& bytesOf(Message& message) {
    return message.headers.empty() ? message.payload : message.headers[0].bytes;
  }

  bool serves() { return holds(group[0].callOne(1, "double", {at::ones({2})}), 2); }
  /// All that is left goes with the context.
  bool endsClean() {
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

TEST_CASE("a message that is cut short is refused") {
  Target t;
  const auto which = GENERATE(range(0, Target::kMessages));
  INFO("message " << which);
  const auto whole = t.valid(which);
  auto copy = whole;
  for (size_t size = 0; size < Target::bytesOf(copy).size(); ++size) {
    auto part = whole;
    Target::bytesOf(part).resize(size);
    INFO("cut to " << size << " bytes");
    // Lists that go on to the end may be shorter, and no news is none.
    const bool list = which == 0 && size == 18;
    const bool none = size == 0 && (which == 3 || which == 6);
    const bool fewer = which == 5 && size == 21;
    CHECK((t.refusal(part) != "no error") == !(list || none || fewer));
  }
  CHECK(t.at1().send(t.send_of_1));
  CHECK(t.serves());
  CHECK(t.endsClean());
}

TEST_CASE("bytes that have changed on their way do no harm") {
  Target t;
  const auto which = GENERATE(range(0, Target::kMessages));
  const auto seed = GENERATE(1u, 2u);
  INFO("message " << which << ", seed " << seed);
  std::mt19937 random(seed);
  const bool news = which == 3 || which == 6;
  // That a context of some owner's exists is the sender's word: such a one would go with the owner's news only.
  const size_t first = which == 5 ? sizeof(ContextId) : 0;
  // That an RRef's value is still to be made, too: the pass would wait for it.
  const size_t past = which == 4 ? sizeof(uint64_t) : 0;
  for (int round = 0; round < 1000; ++round) {
    auto message = t.valid(which);
    auto& bytes = Target::bytesOf(message);
    for (auto changes = 1 + random() % 3; changes > 0; --changes) {
      bytes[first + random() % (bytes.size() - first - past)] = static_cast<char>(random());
    }
    if (which == 1 && random() % 2) {
      const at::Tensor odd[] = {
          at::ones({3}), at::ones({2}, at::kLong), at::empty({2}, at::device(at::kMeta)), at::ones({2}).to_sparse()};
      message.tensors[0] = odd[random() % std::size(odd)];
    }
    static_cast<void>(t.group[0].ask(1, std::move(message)));  // any answer
  }
  CHECK(t.serves());
  if (!news) CHECK(t.endsClean());  // false news may have ended it, and all after it
}

TEST_CASE("gradients that do not fit are refused, and the pass goes with them") {
  Target t;
  const auto refusal = [&](MessageId send, const variable_list& gradients) {
    return t.refusal(encode(GradientRequest{t.pass(), {t.send_of_1}, {send, gradients}}));
  };
  CHECK_THAT(refusal(t.send_of_1, {}), Contains("does not wait for"));
  CHECK_THAT(refusal(t.send_of_1, {at::ones({2}), at::ones({2})}), Contains("does not wait for"));
  CHECK_THAT(refusal(t.send_of_1 + 1, {at::ones({2})}), Contains("does not wait for"));
  CHECK_THAT(refusal(t.send_of_1, {at::ones({3})}), Contains("Error on Node 1") && Contains("invalid gradient"));
  CHECK_THAT(refusal(t.send_of_1, {at::ones({2}, at::kComplexFloat)}), Contains("Error on Node 1"));
  CHECK_THAT(refusal(t.send_of_1, {at::ones({2}, at::device(at::kMeta))}), Contains("Error on Node 1"));
  CHECK_THAT(
      t.refusal(encode(GradientRequest{t.pass(), {t.send_of_1 + 1}, {t.send_of_1, {at::ones({2})}}})),
      Contains("not recorded"));
  auto fewer = encode(GradientRequest{t.pass(), {t.send_of_1}, {t.send_of_1, {at::ones({2})}}});
  fewer.tensors.clear();
  CHECK_THAT(t.refusal(fewer), Contains("fewer gradients than it says"));
  CHECK(t.group[1].autograd().gradients(t.id).empty());
  CHECK(t.endsClean());
}

TEST_CASE("a pass of an unknown context, mode, or message is refused") {
  Target t;
  auto pass = t.pass();
  CHECK_THAT(t.refusal(encode(MarkRequest{pass, {t.send_of_1 + 1}})), Contains("not recorded"));
  pass.context = makeAutogradId(0, 4242);
  CHECK_THAT(t.refusal(encode(MarkRequest{pass, {}})), Contains("Could not find autograd context"));
  pass = t.pass(static_cast<BackwardMode>(7));
  CHECK_THAT(t.refusal(encode(MarkRequest{pass, {}})), Contains("no known mode"));
  CHECK_THAT(t.refusal(encode(RRefBackwardRequest{pass, t.rref_name})), Contains("no known mode"));
  CHECK_THAT(t.refusal(encode(RRefBackwardRequest{t.pass(), "?"})), Contains("malformed"));
  CHECK(t.endsClean());
}

TEST_CASE("a pass that has begun takes no marks, and one that has failed neither marks nor gradients") {
  Target t;
  // It waits for the gradients of the second message, which do not come.
  setCurrentContext(t.group[0].autograd().context(t.id));
  const auto other = t.group[0].callOne(1, "double", {t.x});
  setCurrentContext(nullptr);
  MessageId second = kNoAutogradId;
  for (const auto& send : t.at1().sends()) second = send->id();
  REQUIRE(second != t.send_of_1);
  const auto pass = t.pass();
  REQUIRE(t.refusal(encode(MarkRequest{pass, {t.send_of_1, second}})) == "no error");
  Pending begun;
  t.group.agent(0).request(1, encode(GradientRequest{pass, {}, {t.send_of_1, {at::ones({2})}}}), 20s, begun.handler());
  REQUIRE(eventually([&] { return t.refusal(encode(MarkRequest{pass, {second}})) != "no error"; }));
  CHECK_THAT(t.refusal(encode(MarkRequest{pass, {second}})), Contains("cannot grow"));
  CHECK_THAT(
      t.refusal(encode(GradientRequest{pass, {}, {t.send_of_1, {at::ones({2})}}})), Contains("does not wait for"));
  CHECK_FALSE(begun.done());

  REQUIRE(t.refusal(encode(AbortRequest{pass, Error(ErrorCode::kBackward, "it failed")})) == "no error");
  CHECK(begun.get().error().text() == "it failed");
  CHECK_THAT(t.refusal(encode(MarkRequest{pass, {second}})), Contains("it failed"));
  CHECK_THAT(t.refusal(encode(GradientRequest{pass, {}, {second, {at::ones({2})}}})), Contains("it failed"));
  CHECK(t.group[1].autograd().gradients(t.id).empty());
  CHECK(t.endsClean());
}

TEST_CASE("an abort that comes before its pass keeps it from beginning") {
  Target t;
  const auto pass = t.pass();
  REQUIRE(t.refusal(encode(AbortRequest{pass, Error(ErrorCode::kBackward, "it failed")})) == "no error");
  CHECK_THAT(t.refusal(encode(MarkRequest{pass, {t.send_of_1}})), Contains("it failed"));
  CHECK(t.group.passes() == 0);
  CHECK(t.endsClean());
}

TEST_CASE("news that is malformed after its beginning ends nothing") {
  Target t;
  const auto both = rolls(9, {}) + rolls(9, {}).substr(0, 10);
  CHECK_THAT(t.refusal({.kind = Kind::kAutogradRelease, .payload = both}), Contains("malformed"));
  CHECK(t.at1().send(t.send_of_1));
  CHECK(t.endsClean());
}

TEST_CASE("tensors that require grad must be as many as the header says") {
  Target t;
  const auto refusal = [&](uint32_t tensors, const at::Tensor& arg) {
    return t.refusal(
        Target::callWith(HeaderKind::kAutogradContext, contextHeader(t.id, makeAutogradId(0, 3000), tensors), arg));
  };
  CHECK_THAT(refusal(0, leaf(1)), Contains("require grad and are not recorded"));
  CHECK_THAT(refusal(2, leaf(1)), Contains("require grad and are not recorded"));
  CHECK_THAT(refusal(1, at::ones({2})), Contains("require grad and are not recorded"));
  CHECK(t.at1().recvs().size() == 1);
  CHECK(t.endsClean());
}

TEST_CASE("an answer whose gradients are cut short is refused, an empty one brings none") {
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
