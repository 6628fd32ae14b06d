#include "device/lent_memory.h"

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include "wire/codec.h"
#include "wire/shared_storage.h"

namespace torchrpc {
namespace {

constexpr PeerId kReceiver{.worker = 1, .incarnation = 7};

c10::Storage memoryOf(int64_t bytes) { return at::zeros({bytes}, at::kByte).storage(); }

Message messageWith(const LentTensors& lent, const std::vector<at::Tensor>& tensors) {
  Message message{.kind = Kind::kPythonCall, .tensors = tensors};
  setLentTensors(message, lent);
  return message;
}

at::Tensor geometry(at::IntArrayRef sizes) { return geometryOf(at::empty(sizes, at::kFloat)); }

LentTensors oneTensor() {
  return {
      .receiver = 7,
      .pieces =
          {{.number = 5,
            .device = c10::Device(c10::kPrivateUse1, 2),
            .bytes = 64,
            .access = LoanAccess::kMap,
            .device_id = "the device",
            .handle = std::string("\0handle", 7),
            .offset = 512}},
      .views = {{.tensor = 0, .piece = 0, .offset = 16}}};
}

bool isMalformed(const Message& message) {
  try {
    lentTensorsOf(message);
    return false;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kProtocol;
  }
}

// --- loans ---

TEST_CASE("a loan keeps its memory until its receiver returns it", "[lent_memory]") {
  LentMemory lent;
  auto memory = memoryOf(100);
  const auto number = lent.lend(kReceiver, memory);
  CHECK(memory.use_count() == 2);
  CHECK(lent.bytes() == 100);

  CHECK(lent.takeBack(LoanNumbers{number}, WorkerId{2}).empty());  // another worker guesses the number
  CHECK(lent.takeBack(LoanNumbers{number + 1}, kReceiver.worker).empty());
  CHECK(memory.use_count() == 2);

  CHECK(lent.stillLent(kReceiver.worker, LoanNumbers{number, number + 1}) == LoanNumbers{number});
  CHECK(lent.takeBack(LoanNumbers{number}, kReceiver.worker).size() == 1);
  CHECK(lent.takeBack(LoanNumbers{number}, kReceiver.worker).empty());
  CHECK(memory.use_count() == 1);
  CHECK(lent.bytes() == 0);
}

TEST_CASE("the loss of a receiver ends its loans, and a restart those to its earlier incarnations", "[lent_memory]") {
  LentMemory lent;
  lent.lend(kReceiver, memoryOf(10));
  lent.lend({.worker = 1, .incarnation = 8}, memoryOf(20));
  lent.lend({.worker = 2, .incarnation = 1}, memoryOf(40));
  lent.takeBackAll(1, {1, 8});
  CHECK(lent.bytes() == 60);
  lent.takeBackAll(1);
  CHECK(lent.bytes() == 40);
}

TEST_CASE("memory that is lent is limited", "[lent_memory]") {
  LentMemory lent;
  CHECK(lent.hasRoom(LentMemory::kMaxBytes + 1));  // one message may lend as much as it has
  lent.lend(kReceiver, memoryOf(1));
  CHECK(lent.hasRoom(LentMemory::kMaxBytes - 1));
  CHECK_FALSE(lent.hasRoom(LentMemory::kMaxBytes));
  CHECK_FALSE(lent.hasRoom(~uint64_t{0}));
}

TEST_CASE("a worker of the same process takes a loan over, once", "[lent_memory]") {
  LentMemory lent;
  auto memory = memoryOf(8);
  const auto number = lent.lend(kReceiver, memory);
  CHECK(LentMemory::takeOver(number).unsafeGetStorageImpl() == memory.unsafeGetStorageImpl());
  CHECK(lent.bytes() == 0);
  CHECK_THROWS_AS(LentMemory::takeOver(number), Error);
}

ErrorCode refusalOfRead(LentMemory& lent, uint64_t number, WorkerId reader, uint64_t offset, uint64_t bytes) {
  try {
    lent.read(number, reader, offset, bytes);
  } catch (const Error& error) {
    return error.code();
  }
  FAIL("it has been read");
  return {};
}

TEST_CASE("a loan is read by its receiver only, inside it, and once", "[lent_memory]") {
  LentMemory lent;
  const auto number = lent.lend(kReceiver, memoryOf(100));
  CHECK(refusalOfRead(lent, number, 2, 0, 10) == ErrorCode::kInvalidArgument);
  CHECK(refusalOfRead(lent, number + 1, 1, 0, 10) == ErrorCode::kInvalidArgument);
  LentMemory other;
  CHECK(refusalOfRead(other, number, 1, 0, 10) == ErrorCode::kInvalidArgument);
  for (const auto& [offset, bytes] :
       std::vector<std::pair<uint64_t, uint64_t>>{{0, 101}, {100, 1}, {91, 10}, {~uint64_t{0}, 2}, {2, ~uint64_t{0}}}) {
    CHECK(refusalOfRead(lent, number, 1, offset, bytes) == ErrorCode::kProtocol);
  }
  CHECK(lent.read(number, 1, 40, 60).nbytes() == 100);
  CHECK(lent.read(number, 1, 0, 40).nbytes() == 100);
  CHECK(refusalOfRead(lent, number, 1, 0, 1) == ErrorCode::kProtocol);
  lent.takeBack(LoanNumbers{number});
  CHECK(refusalOfRead(lent, number, 1, 0, 1) == ErrorCode::kInvalidArgument);
}

TEST_CASE("a worker knows who needs memory that belongs to an answer", "[lent_memory]") {
  LentMemory lent;
  lent.lend({.worker = 2, .incarnation = 1}, memoryOf(8));
  const auto number = lent.lend(kReceiver, memoryOf(8), /*is_awaited=*/true);
  CHECK(lent.isAwaited(1));
  CHECK_FALSE(lent.isAwaited(2));
  CHECK_FALSE(LentMemory().isAwaited(1));
  lent.takeBack(LoanNumbers{number}, 1);
  CHECK_FALSE(lent.isAwaited(1));
}

TEST_CASE("a lender that ends takes its memory back, and no other's", "[lent_memory]") {
  LentMemory other;
  const auto kept = other.lend(kReceiver, memoryOf(8));
  auto memory = memoryOf(8);
  {
    LentMemory().lend(kReceiver, memory);
  }
  CHECK(memory.use_count() == 1);
  CHECK(other.stillLent(kReceiver.worker, LoanNumbers{kept}).size() == 1);
}

TEST_CASE("a receiver gives up loans that it is not reading, and does not read them later", "[lent_memory]") {
  BorrowedMemory borrowed;
  CHECK(borrowed.begin(1, LoanNumbers{10, 11}));
  CHECK(borrowed.giveUp(1, LoanNumbers{10, 12}) == LoanNumbers{12});
  CHECK_FALSE(borrowed.begin(1, LoanNumbers{12}));
  CHECK_FALSE(borrowed.begin(1, LoanNumbers{13, 12}));
  CHECK(borrowed.begin(2, LoanNumbers{12}));  // another lender's number

  borrowed.end(1, LoanNumbers{10, 11});
  CHECK(borrowed.giveUp(1, LoanNumbers{10}) == LoanNumbers{10});
  CHECK(borrowed.giveUp(1, LoanNumbers{10}) == LoanNumbers{10});  // the question may come twice
  borrowed.forget(1);
  CHECK(borrowed.begin(1, LoanNumbers{10}));
}

// --- the header ---

TEST_CASE("the header of lent memory is read as it was written", "[lent_memory]") {
  const auto written = oneTensor();
  const auto message = messageWith(written, {geometry({4})});
  const auto read = lentTensorsOf(message);
  REQUIRE(read);
  REQUIRE(read->pieces.size() == 1);
  CHECK(read->receiver == 7);
  CHECK(read->pieces[0].number == 5);
  CHECK(read->pieces[0].device == written.pieces[0].device);
  CHECK(read->pieces[0].bytes == 64);
  CHECK(read->pieces[0].device_id == "the device");
  CHECK(read->pieces[0].handle == written.pieces[0].handle);
  CHECK(read->pieces[0].offset == 512);
  REQUIRE(read->views.size() == 1);
  CHECK(read->views[0].offset == 16);
  CHECK(read->numbers() == LoanNumbers{5});
  CHECK(read->bytes() == 64);
  CHECK_FALSE(lentTensorsOf(Message{.kind = Kind::kPythonCall}));
}

TEST_CASE("a malformed header of lent memory is refused", "[lent_memory]") {
  auto lent = oneTensor();
  SECTION("a tensor that has data") { CHECK(isMalformed(messageWith(lent, {at::ones({4})}))); }
  SECTION("an undefined tensor") { CHECK(isMalformed(messageWith(lent, {at::Tensor()}))); }
  SECTION("no such tensor") { CHECK(isMalformed(messageWith(lent, {}))); }
  SECTION("no such piece") {
    lent.views[0].piece = 1;
    CHECK(isMalformed(messageWith(lent, {geometry({4})})));
  }
  SECTION("a tensor twice") {
    lent.views.push_back(lent.views[0]);
    CHECK(isMalformed(messageWith(lent, {geometry({4}), geometry({4})})));
  }
  SECTION("every shorter header") {
    const auto whole = messageWith(lent, {geometry({4})});
    for (size_t size = 0; size < whole.header(HeaderKind::kLentMemory)->size(); ++size) {
      auto cut = whole;
      cut.setHeader(HeaderKind::kLentMemory, whole.header(HeaderKind::kLentMemory)->substr(0, size));
      const bool has_no_views =
          size + sizeof(uint32_t) * 2 + sizeof(uint64_t) == whole.header(HeaderKind::kLentMemory)->size();
      CHECK(isMalformed(cut) == !has_no_views);
      CHECK(lentHeaderOf(cut).has_value() == has_no_views);
    }
  }
}

TEST_CASE("numbers of loans are read as they were written", "[lent_memory]") {
  const LoanNumbers numbers{1, ~uint64_t{0}, 3};
  CHECK(decodeLoanNumbers(encodeLoanNumbers(numbers)) == numbers);
  CHECK_THROWS_AS(decodeLoanNumbers("abc"), Error);
}

// --- tensors in lent memory ---

TEST_CASE("a tensor in lent memory has the geometry and bits of the one that was sent", "[lent_memory]") {
  auto memory = at::arange(8, at::kFloat);
  auto tensor = memory.narrow(0, 2, 6).view({3, 2}).t();
  tensor = tensor.detach().set_requires_grad(true);
  const auto arrived = viewInMemory(geometryOf(tensor), memory.storage(), 2 * sizeof(float));
  CHECK(arrived.strides() == tensor.strides());
  CHECK(arrived.requires_grad());
  CHECK(at::equal(arrived, tensor));
  CHECK(arrived.storage().unsafeGetStorageImpl() == memory.storage().unsafeGetStorageImpl());
}

TEST_CASE("a tensor that is not inside its lent memory is refused", "[lent_memory]") {
  const auto memory = at::zeros({8}, at::kFloat).storage();
  const auto view = [&](const at::Tensor& geometry, uint64_t offset) { viewInMemory(geometry, memory, offset); };
  CHECK_NOTHROW(view(geometry({8}), 0));
  CHECK_NOTHROW(view(geometry({0}), 32));
  CHECK_THROWS_AS(view(geometry({9}), 0), Error);
  CHECK_THROWS_AS(view(geometry({8}), 4), Error);
  CHECK_THROWS_AS(view(geometry({1}), 2), Error);   // not aligned
  CHECK_THROWS_AS(view(geometry({1}), 36), Error);  // behind the end
  CHECK_THROWS_AS(view(geometry({1}), ~uint64_t{3}), Error);
  const auto strided = [](int64_t stride) { return at::empty_strided({2}, {stride}, at::device(at::kMeta)); };
  CHECK_NOTHROW(view(strided(7), 0));
  CHECK_THROWS_AS(view(strided(8), 0), Error);
  CHECK_THROWS_AS(view(strided(int64_t{1} << 62), 0), Error);
}

}  // namespace
}  // namespace torchrpc
