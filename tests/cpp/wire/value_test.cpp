// Plain values: as they were sent, and as the types of an operator's arguments.

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <catch2/catch.hpp>

#include "wire/samples.h"
#include "wire/value_codec.h"
#include "wire/value_forms.h"

namespace torchrpc {

namespace {

using c10::IValue;

IValue tupleOf(std::vector<IValue> values) { return c10::ivalue::Tuple::create(std::move(values)); }

IValue listOf(std::vector<IValue> values) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (auto& value : values) list.push_back(std::move(value));
  return list;
}

IValue nested(uint32_t depth) {
  IValue value = 1;
  for (uint32_t i = 0; i < depth; ++i) value = listOf({value});
  return value;
}

template <typename Call>
Error errorOf(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::kUnknown, "no error");
}

c10::TypePtr optional(c10::TypePtr type) { return c10::OptionalType::create(std::move(type)); }
c10::TypePtr list(c10::TypePtr type) { return c10::ListType::create(std::move(type)); }

}  // namespace

TEST_CASE("random values arrive as they were sent") {
  const auto seed = GENERATE(1u, 2u, 3u);
  INFO("seed " << seed);
  std::mt19937 random(seed);
  std::vector<at::Tensor> tensors;
  for (const auto& sample : sampleTensors()) tensors.push_back(sample.tensor);
  for (int i = 0; i < 300; ++i) {
    const auto value = randomValue(random, tensors, 4);
    INFO(value.tagKind());
    CHECK(arrivedSame(value, roundTrip(value)));
  }
}

TEST_CASE("a list of values of one type arrives as a list of that type") {
  CHECK(roundTrip(std::vector<int64_t>{1, 2}).isIntList());
  CHECK(roundTrip(std::vector<double>{1, 2}).isDoubleList());
  CHECK(roundTrip(c10::List<bool>({true, false})).isBoolList());
  CHECK(roundTrip(std::vector<at::Tensor>{at::ones({1})}).isTensorList());
  CHECK(roundTrip(listOf({1, 2.0})).toList().elementType()->kind() == c10::TypeKind::AnyType);
  CHECK(roundTrip(listOf({})).toList().elementType()->kind() == c10::TypeKind::AnyType);
}

TEST_CASE("a dict keeps its order and the types of its keys") {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const IValue& key : {IValue("z"), IValue(1), IValue(1.0), IValue(true), IValue("a")}) dict.insert(key, 0);
  const auto arrived = roundTrip(dict).toGenericDict();
  std::vector<std::string> kinds;
  for (const auto& entry : arrived) kinds.push_back(entry.key().tagKind());
  CHECK(kinds == std::vector<std::string>{"String", "Int", "Double", "Bool", "String"});
}

TEST_CASE("a tensor that occurs many times is sent once and arrives as one tensor") {
  const auto copies = GENERATE(2u, 100u);
  std::vector<IValue> values;
  for (size_t i = 0; i < copies; ++i) values.push_back(at::ones({2}));
  for (size_t i = 0; i < copies; ++i) values.push_back(values[i]);

  std::string bytes;
  Writer out(bytes);
  std::vector<at::Tensor> tensors;
  encodeValue(tupleOf(values), out, tensors);
  encodeValue(tupleOf(values), out, tensors);
  CHECK(tensors.size() == copies);

  Reader in(bytes);
  const auto elements = decodeValue(in, tensors).toTupleRef().elements().vec();
  for (size_t i = 0; i < copies; ++i) CHECK(elements[i].is(elements[copies + i]));
}

TEST_CASE("a value without a plain form is refused with its type") {
  const auto send = [](const IValue& value) { return errorOf([&] { roundTrip(value); }); };
  const auto future = send(c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get()));
  CHECK(future.code() == ErrorCode::kSerialization);
  CHECK_THAT(future.text(), Catch::Contains("Future"));
  CHECK(
      send(listOf({c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get())})).code() ==
      ErrorCode::kSerialization);
}

TEST_CASE("values nested deeper than the limit are refused on both sides") {
  CHECK(arrivedSame(nested(1000), roundTrip(nested(1000))));
  CHECK(errorOf([] { roundTrip(nested(1001)); }).code() == ErrorCode::kSerialization);

  std::string bytes;
  Writer out(bytes);
  std::vector<at::Tensor> tensors;
  encodeValue(nested(1001), out, tensors, {.depth = 1001});
  Reader in(bytes);
  CHECK(errorOf([&] { decodeValue(in, tensors); }).code() == ErrorCode::kProtocol);
}

TEST_CASE("lists, tuples, dicts, their keys, and structs count alike towards the limit on nesting") {
  // Each is one container in another one.
  const std::vector<IValue> values = {
      listOf({listOf({1})}),
      tupleOf({tupleOf({1})}),
      makeDict({{1, makeDict({{1, 1}})}}),
      makeDict({{tupleOf({1}), 1}}),
      makeDict({{tupleOf({}), tupleOf({1})}}),
      makeForm<StructValue>("Point", StructValue::Fields{{"x", tupleOf({1})}}),
  };
  for (size_t i = 0; i < values.size(); ++i) {
    CAPTURE(i);
    std::string bytes;
    Writer out(bytes);
    std::vector<at::Tensor> tensors;
    encodeValue(values[i], out, tensors, {.depth = 2});
    const auto decoded = [&](uint32_t depth) {
      Reader in(bytes);
      return decodeValue(in, tensors, nullptr, {.depth = depth});
    };
    CHECK(arrivedSame(values[i], decoded(2)));
    CHECK(errorOf([&] { decoded(1); }).code() == ErrorCode::kProtocol);
    CHECK(errorOf([&] { encodeValue(values[i], out, tensors, {.depth = 1}); }).code() == ErrorCode::kSerialization);
  }
}

TEST_CASE("a value is converted to the type of the argument") {
  CHECK(roundTrip(2, c10::FloatType::get()).isDouble());
  CHECK(roundTrip(2, c10::ComplexType::get()).toComplexDouble() == c10::complex<double>(2, 0));
  CHECK(roundTrip(2, c10::NumberType::get()).isInt());
  CHECK(roundTrip(2.5, c10::NumberType::get()).isDouble());
  CHECK(roundTrip(true, c10::NumberType::get()).isBool());
  CHECK(roundTrip(2, c10::SymIntType::get()).toInt() == 2);
  CHECK(roundTrip(6, c10::ScalarTypeType::get()).toInt() == 6);
  CHECK(roundTrip(0, c10::LayoutType::get()).toInt() == 0);
  CHECK(roundTrip(1, c10::MemoryFormatType::get()).toInt() == 1);
  CHECK(roundTrip("cpu", c10::DeviceObjType::get()).toDevice() == at::Device(at::kCPU));
  CHECK(roundTrip(at::Device("cuda:1"), c10::DeviceObjType::get()).toDevice() == at::Device("cuda:1"));
  CHECK(roundTrip(IValue(), optional(c10::GeneratorType::get())).isNone());
  CHECK(roundTrip(IValue(), optional(c10::IntType::get())).isNone());
  CHECK(roundTrip(3, optional(c10::IntType::get())).toInt() == 3);
  CHECK(roundTrip(IValue(), c10::AnyType::get()).isNone());
}

TEST_CASE("a sequence becomes a list of the argument's element type, even if it is empty") {
  CHECK(roundTrip(tupleOf({1, 2}), list(c10::IntType::get())).toIntVector() == std::vector<int64_t>{1, 2});
  CHECK(roundTrip(listOf({1, 2.5}), list(c10::FloatType::get())).toDoubleVector() == std::vector<double>{1, 2.5});
  CHECK(roundTrip(listOf({}), list(c10::FloatType::get())).isDoubleList());
  CHECK(roundTrip(listOf({}), list(c10::TensorType::get())).isTensorList());
  CHECK(roundTrip(tupleOf({3, 4}), list(c10::SymIntType::get())).toSymIntVector().size() == 2);
  CHECK(roundTrip(listOf({true}), list(c10::BoolType::get())).isBoolList());

  const auto maybe = roundTrip(listOf({IValue(), at::ones({1})}), list(optional(c10::TensorType::get())));
  CHECK(maybe.toList().elementType()->annotation_str() == "Optional[Tensor]");
  CHECK(maybe.toListRef()[0].isNone());
}

TEST_CASE("torch's operators accept the values decoded for their arguments") {
  const auto call = [](const char* name, const char* overload, const std::vector<IValue>& arguments) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    torch::jit::Stack stack;
    for (size_t i = 0; i < arguments.size(); ++i) {
      stack.push_back(roundTrip(arguments[i], op.schema().arguments()[i].type()));
    }
    op.callBoxed(stack);
    return stack.at(0).isTensorList() ? stack[0].toTensorVector().at(0) : stack[0].toTensor();
  };
  const auto x = at::arange(12, at::kFloat).reshape({3, 4});
  const auto rows = at::tensor({2, 0}, at::kLong);

  CHECK(call("aten::add", "Tensor", {x, x, 2}).equal(x * 3));
  CHECK(call("aten::add", "Scalar", {x, 1.5, 1}).equal(x + 1.5));
  CHECK(call("aten::index", "Tensor", {x, listOf({rows})}).equal(x.index_select(0, rows)));
  CHECK(call("aten::index", "Tensor", {x, listOf({IValue(), rows})}).equal(x.index_select(1, rows)));
  CHECK(call("aten::cat", "", {tupleOf({x, x}), 1}).equal(at::cat({x, x}, 1)));
  CHECK(call("aten::view", "", {x, tupleOf({4, 3})}).equal(x.view({4, 3})));
  CHECK(call("aten::split_with_sizes", "", {x, listOf({1, 2}), 0}).equal(x.slice(0, 0, 1)));
  CHECK(call("aten::sum", "dim_IntList", {x, listOf({0}), false, 7}).equal(x.sum(0, false, at::kDouble)));
  CHECK(call("aten::clamp", "", {x, IValue(), 3}).equal(x.clamp_max(3)));
  CHECK(call("aten::full", "", {listOf({2, 2}), 7, 6, 0, "cpu", false}).equal(at::full({2, 2}, 7, at::kFloat)));
  CHECK(call("aten::upsample_nearest2d", "vec", {x.reshape({1, 1, 3, 4}), IValue(), listOf({2, 2.0})}).numel() == 48);
  CHECK(call("aten::rand", "generator", {listOf({2}), IValue(), 6, 0, "cpu", false}).numel() == 2);
}

TEST_CASE("the elements of tuples and dicts are converted to their types") {
  const auto pair = c10::TupleType::create({c10::FloatType::get(), c10::StringType::get()});
  CHECK(roundTrip(tupleOf({1, "x"}), pair).toTupleRef().elements()[0].isDouble());

  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  dict.insert("a", 1);
  const auto type = c10::DictType::create(c10::StringType::get(), c10::FloatType::get());
  const auto arrived = roundTrip(dict, type);
  CHECK(c10::impl::toTypedDict<std::string, double>(arrived.toGenericDict()).at("a") == 1.0);
}

TEST_CASE("a value that does not match the argument's type is an invalid argument, and is named") {
  const auto send = [](const IValue& value, const c10::TypePtr& type) {
    return errorOf([&] { roundTrip(value, type); });
  };
  const auto error = send("x", list(c10::IntType::get()));
  CHECK(error.code() == ErrorCode::kInvalidArgument);
  CHECK(error.text() == "expected a value of type List[int] but got a str");

  const std::vector<std::pair<IValue, c10::TypePtr>> mismatches = {
      {1.5, c10::IntType::get()},
      {true, c10::IntType::get()},
      {true, c10::FloatType::get()},
      {1, c10::BoolType::get()},
      {"1", c10::NumberType::get()},
      {IValue(), c10::TensorType::get()},
      {1, c10::TensorType::get()},
      {1, c10::StringType::get()},
      {"no such device", c10::DeviceObjType::get()},
      {1, c10::GeneratorType::get()},
      {listOf({1, IValue()}), list(c10::IntType::get())},
      {tupleOf({1}), c10::TupleType::create({c10::IntType::get(), c10::IntType::get()})},
      {"x", optional(c10::IntType::get())},
  };
  for (const auto& [value, type] : mismatches) {
    INFO(value.tagKind() << " for " << type->annotation_str());
    CHECK(send(value, type).code() == ErrorCode::kInvalidArgument);
  }
}

TEST_CASE("a dtype, a layout and a memory format are enumerators of torch") {
  const auto read = [](int64_t number, const c10::TypePtr& type) { return roundTrip(number, type).toInt(); };
  const std::vector<std::pair<c10::TypePtr, int64_t>> ends = {
      {c10::ScalarTypeType::get(), static_cast<int64_t>(at::ScalarType::Undefined)},
      {c10::LayoutType::get(), static_cast<int64_t>(at::Layout::NumOptions)},
      {c10::MemoryFormatType::get(), static_cast<int64_t>(at::MemoryFormat::NumOptions)}};
  for (const auto& [type, end] : ends) {
    CHECK(read(0, type) == 0);
    CHECK(read(end - 1, optional(type)) == end - 1);
    CHECK(roundTrip(listOf({0}), list(type)).toIntVector() == std::vector<int64_t>{0});
    for (const int64_t number : {end, int64_t{-1}, int64_t{-5}, int64_t{100}, int64_t{120}, int64_t{256}, INT64_MIN}) {
      const auto error = errorOf([&] { read(number, type); });
      CHECK(error.code() == ErrorCode::kInvalidArgument);
      CHECK_THAT(error.text(), Catch::Contains(type->annotation_str()) && Catch::Contains(std::to_string(number)));
      CHECK_THROWS_AS(roundTrip(listOf({number}), list(type)), Error);
    }
  }
}

TEST_CASE("the index of a device is not read as another one") {
  const auto read = [](const std::string& name) { return roundTrip(name, c10::DeviceObjType::get()).toDevice(); };
  CHECK(read("cuda:127") == at::Device(at::kCUDA, 127));
  CHECK(read("cuda") == at::Device(at::kCUDA));
  for (const char* name :
       {"cuda:128", "cuda:200", "cuda:256", "cuda:4294967296", "cuda:99999999999999999999", "cuda:-1",
        "cuda:", "cuda:01", "", ":0", "nothing:0"}) {
    INFO(name);
    CHECK(errorOf([&] { read(name); }).code() == ErrorCode::kInvalidArgument);
  }
}

TEST_CASE("an int for a float must fit exactly") {
  constexpr int64_t kLimit = int64_t{1} << 53;
  CHECK(roundTrip(kLimit, c10::FloatType::get()).toDouble() == 0x1p53);
  CHECK(roundTrip(INT64_MIN, c10::FloatType::get()).toDouble() == -0x1p63);
  for (const int64_t number : {kLimit + 1, -kLimit - 1, INT64_MAX}) {
    CHECK(errorOf([&] { roundTrip(number, c10::FloatType::get()); }).code() == ErrorCode::kInvalidArgument);
    CHECK_THROWS_AS(roundTrip(number, c10::ComplexType::get()), Error);
  }
}

TEST_CASE("a text that is not UTF-8 is neither sent nor read") {
  const auto bytesOf = [](const std::string& text) {
    std::string bytes;
    Writer out(bytes);
    std::vector<at::Tensor> tensors;
    encodeValue(text, out, tensors);
    return bytes;
  };
  for (const std::string text : {"\xff", "12345678\x80", "\xc3", "\u00e9\xed\xa0\x80"}) {
    const auto error = errorOf([&] { bytesOf(text); });
    CHECK(error.code() == ErrorCode::kSerialization);
    CHECK_THAT(error.text(), Catch::Contains("std::vector<std::byte>"));
    auto bytes = bytesOf(std::string(text.size(), 'x'));
    bytes.replace(bytes.size() - text.size(), text.size(), text);
    Reader in(bytes);
    CHECK(errorOf([&] { decodeValue(in, {}); }).code() == ErrorCode::kProtocol);
  }
  for (const std::string text :
       {"", "1234567", "12345678", "12345678\u00e9",
        "\u00e9"
        "12345678\U0001F600"}) {
    const auto bytes = bytesOf(text);
    Reader in(bytes);
    CHECK(decodeValue(in, {}).toStringRef() == text);
  }
}

TEST_CASE("tags that only Python writes can be read where C++ has such values") {
  const auto read = [](std::string bytes, const c10::TypePtr& type = nullptr) {
    Reader in(bytes);
    return decodeValue(in, {}, type);
  };
  CHECK(read({13, 6}, c10::ScalarTypeType::get()).toInt() == 6);
  CHECK(read({13, 6}, c10::IntType::get()).toInt() == 6);
  CHECK(errorOf([&] { read({13, 100}); }).code() == ErrorCode::kProtocol);
  CHECK(arrivedSame(read(std::string("\x07\x02\0\0\0\0\0\0\0ab", 11)), makeBytes("ab")));
  CHECK(errorOf([&] { read(std::string("\x0e\0\0\0\0", 5)); }).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("bytes travel in the head or, if they are many, as a tensor") {
  for (const size_t size : {0u, 1u, 4096u, 4097u, 100'000u}) {
    CAPTURE(size);
    const auto sent = makeBytes(std::string(size, '\xff'));
    CHECK(arrivedSame(sent, roundTrip(sent)));
    std::string bytes;
    Writer out(bytes);
    std::vector<at::Tensor> tensors;
    encodeValue(sent, out, tensors);
    CHECK(tensors.size() == (size > 4096 ? 1 : 0));
  }
}

TEST_CASE("a list of numbers in one tensor becomes a list of the argument's element type") {
  const auto numbers = [](const at::Tensor& tensor) { return makeForm<NumberList>(tensor); };
  const auto ints = numbers(at::arange(300));
  CHECK(roundTrip(ints, list(c10::IntType::get())).toIntVector().at(299) == 299);
  CHECK(roundTrip(ints, list(c10::FloatType::get())).toDoubleVector().at(299) == 299.0);
  CHECK(roundTrip(ints, list(c10::ComplexType::get())).toList().size() == 300);
  CHECK(roundTrip(ints, list(c10::SymIntType::get())).toIntVector().size() == 300);
  const auto floats = numbers(at::arange(300, at::kFloat));
  const auto mismatch = [](const IValue& value, const c10::TypePtr& type) {
    return errorOf([&] { roundTrip(value, type); }).code();
  };
  CHECK(mismatch(floats, list(c10::IntType::get())) == ErrorCode::kInvalidArgument);
  CHECK(mismatch(floats, list(c10::StringType::get())) == ErrorCode::kInvalidArgument);
  CHECK(mismatch(floats, c10::FloatType::get()) == ErrorCode::kInvalidArgument);
  CHECK(
      mismatch(numbers(at::ones({3}, at::kComplexFloat)), list(c10::FloatType::get())) == ErrorCode::kInvalidArgument);
  CHECK(unpacked(floats).toDoubleVector().size() == 300);
  CHECK(unpacked(tupleOf({1, listOf({floats})})).toTupleRef().elements()[1].toListRef()[0].isDoubleList());
}

TEST_CASE("the numbers of a tensor do not become lists again and again") {
  const auto numbers = makeForm<NumberList>(at::zeros({1 << 18}, at::kByte));
  const auto type = list(list(c10::IntType::get()));
  CHECK(roundTrip(listOf({numbers, numbers}), type).toListRef().size() == 2);
  const auto again = listOf({numbers, numbers, numbers});
  CHECK(errorOf([&] { roundTrip(again, type); }).code() == ErrorCode::kProtocol);
  CHECK(errorOf([&] { roundTrip(again); }).code() == ErrorCode::kProtocol);
}

TEST_CASE("what a writer would not have written for the new forms is malformed") {
  const auto code = [](ValueTag tag, uint32_t index, std::vector<at::Tensor> tensors) {
    std::string bytes;
    Writer out(bytes);
    out.put(tag);
    out.put(index);
    Reader in(bytes);
    return errorOf([&] { decodeValue(in, tensors); }).code();
  };
  const auto wide = at::ones({1}).expand({int64_t{1} << 40});  // would take 4 TiB
  for (const auto tag : {ValueTag::kNumbers, ValueTag::kLongBytes}) {
    CHECK(code(tag, 1, {at::ones({2})}) == ErrorCode::kProtocol);
    CHECK(code(tag, 0, {wide}) == ErrorCode::kProtocol);
    CHECK(code(tag, 0, {at::ones({2, 2})}) == ErrorCode::kProtocol);
    CHECK(code(tag, 0, {at::ones({4}).slice(0, 0, 4, 2)}) == ErrorCode::kProtocol);
    CHECK(code(tag, 0, {at::ones({2}, at::kBool)}) == ErrorCode::kProtocol);
    CHECK(code(tag, 0, {at::ones({2}, at::kHalf)}) == ErrorCode::kProtocol);
    CHECK(code(tag, 0, {at::ones({2}, at::device(at::kMeta))}) == ErrorCode::kProtocol);
    CHECK(code(tag, 0, {at::ones({2}).to_sparse()}) == ErrorCode::kProtocol);
    CHECK(code(tag, 0, {at::Tensor()}) == ErrorCode::kProtocol);
  }
  CHECK(code(ValueTag::kLongBytes, 0, {at::ones({2})}) == ErrorCode::kProtocol);
  std::string small("\x10\x05\0\0\0\0\0\0\0", 9);  // the unsigned integer 5
  Reader in(small);
  CHECK(errorOf([&] { decodeValue(in, {}); }).code() == ErrorCode::kProtocol);
}

namespace {

/// Keys whose products with torch's hash factor are consecutive, so that they are in one bucket of any table.
DictEntries::Entries collidingEntries(int count) {
  uint64_t inverse = 1;  // of the factor, modulo 2^64
  for (int i = 0; i < 6; ++i) inverse *= 2 - 11400714819323198485ull * inverse;
  DictEntries::Entries entries;
  for (int i = 0; i < count; ++i) entries.emplace_back(static_cast<int64_t>(inverse * static_cast<uint64_t>(i)), 0);
  return entries;
}

}  // namespace

TEST_CASE("a dict with keys that are chosen to collide is a list of entries until it is used, and no typed dict") {
  const auto dict = makeDict(collidingEntries(24));
  REQUIRE(formAs<DictEntries>(dict));
  CHECK(arrivedSame(dict, roundTrip(dict)));
  const auto type = c10::DictType::create(c10::IntType::get(), c10::IntType::get());
  CHECK_THROWS_WITH(roundTrip(dict, type), Catch::Contains("chosen to collide"));
  CHECK(makeDict(collidingEntries(4)).isGenericDict());
}

TEST_CASE("dicts with the keys that programs have are torch's dicts") {
  std::mt19937_64 random(1);
  for (const int count : {5, 17, 1000, 100'000}) {
    for (const auto step : {uint64_t{1}, uint64_t{3}, uint64_t{1000}, uint64_t{1} << 20, uint64_t{1} << 40, random()}) {
      DictEntries::Entries ints, doubles, texts;
      for (uint64_t i = 0; i < static_cast<uint64_t>(count); ++i) {
        ints.emplace_back(static_cast<int64_t>(i * step), 0);
        doubles.emplace_back(static_cast<double>(i * step), 0);
        texts.emplace_back(std::to_string(i * step), 0);
      }
      CHECK(canBeDict(ints));
      CHECK(canBeDict(doubles));
      CHECK(canBeDict(texts));
    }
    DictEntries::Entries any;
    for (int i = 0; i < count; ++i) any.emplace_back(static_cast<int64_t>(random()), 0);
    CHECK(canBeDict(any));
  }
}

TEST_CASE("a dict keeps keys that torch's dicts cannot have") {
  const auto dict = makeDict({{tupleOf({1}), 1}, {uint64_t{1} << 63, 2}});
  REQUIRE(formAs<DictEntries>(dict));
  CHECK(arrivedSame(dict, roundTrip(dict)));
  CHECK(makeDict({{1, 1}, {"a", 2}}).isGenericDict());
  CHECK_THROWS_AS(makeDict({{1, 1}, {1, 2}}), Error);
}

}  // namespace torchrpc
