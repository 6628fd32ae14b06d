// Plain values, decoded without a type and as an operator's argument of some type.

#include <ATen/core/List.h>
#include <ATen/ops/ones.h>

#include "input.h"
#include "wire/value_codec.h"

using namespace torchrpc;

namespace {

const std::vector<c10::TypePtr>& types() {
  static const std::vector<c10::TypePtr> all = {
      nullptr,
      nullptr,
      nullptr,
      c10::TensorType::get(),
      c10::IntType::get(),
      c10::FloatType::get(),
      c10::NumberType::get(),
      c10::StringType::get(),
      c10::DeviceObjType::get(),
      c10::ListType::ofInts(),
      c10::ListType::ofTensors(),
      c10::ListType::create(c10::OptionalType::create(c10::TensorType::get())),
      c10::OptionalType::create(c10::ListType::ofFloats()),
      c10::DictType::create(c10::StringType::get(), c10::TensorType::get()),
      c10::TupleType::create({c10::IntType::get(), c10::StringType::get()}),
      c10::AnyType::get(),
      c10::ScalarTypeType::get(),
      c10::LayoutType::get(),
      c10::OptionalType::create(c10::ListType::create(c10::MemoryFormatType::get())),
      c10::ListType::create(c10::OptionalType::create(c10::SymIntType::get()))};
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<at::Tensor> tensors = {at::ones({2}), at::Tensor(), at::ones({3, 3})};
  fuzz::Input input(data, size);
  const auto& type = types()[input.byte() % types().size()];
  const auto limits = fuzz::limits();
  Reader reader(input.rest());
  const auto rref_at = [](uint32_t index) {
    if (index >= 3) throw Error(ErrorCode::kProtocol, "no such RRef");
    return c10::IValue(static_cast<int64_t>(index));
  };
  try {
    const auto value = decodeValue(reader, tensors, type, limits, rref_at);
    std::string bytes;
    std::vector<at::Tensor> out;
    Writer writer(bytes);
    encodeValue(value, writer, out, limits);
    Reader again(bytes);
    decodeValue(again, out, type, limits);
    again.expectEnd();
  } catch (const Error& error) {
    fuzz::expectRefusal(error, type != nullptr);
  }
  return 0;
}
