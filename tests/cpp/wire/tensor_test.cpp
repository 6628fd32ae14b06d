// Tensors as bytes: every tensor that can be sent arrives unchanged; the others are refused with a reason.

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include "wire/message.h"
#include "wire/samples.h"

namespace torchrpc {

namespace {

Frame frameOf(const at::Tensor& tensor, const Limits& limits = {}) {
  return encodeFrame({.kind = Kind::kReply, .tensors = {tensor}}, limits);
}

std::string refusal(const at::Tensor& tensor) {
  try {
    frameOf(tensor);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kSerialization);
    return error.what();
  }
  return "not refused";
}

}  // namespace

TEST_CASE("every kind of tensor arrives as it was sent") {
  for (const auto& sample : sampleTensors()) {
    INFO(sample.name);
    CHECK(arrivedSame(sample.tensor, roundTrip(sample.tensor)));
  }
}

TEST_CASE("every kind of tensor can be sent again after it has arrived") {
  for (const auto& sample : sampleTensors()) {
    INFO(sample.name);
    CHECK(arrivedSame(sample.tensor, roundTrip(roundTrip(sample.tensor))));
  }
}

TEST_CASE("an arrived tensor can be computed with, changed and resized") {
  auto tensor = roundTrip(at::ones({2, 3}));
  tensor.add_(1).resize_({100});
  CHECK(tensor.slice(0, 0, 6).sum().item<float>() == 12);
  auto large = roundTrip(at::ones({3000}));
  large.mul_(2).resize_({6000});
  CHECK(large.slice(0, 0, 3000).sum().item<float>() == 6000);

  auto parameter = roundTrip(at::ones({3}).requires_grad_());
  (parameter * 2).sum().backward();
  CHECK(parameter.grad().sum().item<float>() == 6);
}

TEST_CASE("the data of a small tensor is in the head, a segment shares the memory of a large one") {
  const auto limit = static_cast<int64_t>(kInlineTensorBytes);
  CHECK(frameOf(at::ones({limit}, at::kByte)).segments.empty());

  const auto large = at::ones({limit + 1}, at::kByte);
  const auto frame = frameOf(large);
  REQUIRE(frame.segments.size() == 1);
  CHECK(frame.segments[0].data() == large.const_data_ptr());
  CHECK(frame.segments[0].bytes == kInlineTensorBytes + 1);
  CHECK(frame.head.size() < 200);
}

TEST_CASE("a view sends only its own part of the storage") {
  const auto whole = at::arange(100'000);
  const auto view = whole.slice(0, 5000, 6000);
  const auto frame = frameOf(view);
  REQUIRE(frame.segments.size() == 1);
  CHECK(frame.segments[0].data() == view.const_data_ptr());
  CHECK(frame.segments[0].bytes == 8000);
  CHECK(roundTrip(view).storage().nbytes() == 8000);
}

TEST_CASE("a transposed tensor is sent without a copy") {
  const auto tensor = at::rand({60, 70}).t();
  const auto frame = frameOf(tensor);
  REQUIRE(frame.segments.size() == 1);
  CHECK(frame.segments[0].data() == tensor.const_data_ptr());
}

TEST_CASE("an expanded tensor sends only the memory that it uses") {
  const auto tensor = at::rand({1}).expand({5000});
  CHECK(frameOf(tensor).segments.empty());
  const auto arrived = roundTrip(tensor);
  CHECK(arrived.strides() == tensor.strides());
  CHECK(arrived.equal(tensor));
}

TEST_CASE("a view with gaps keeps its strides, unless most of its range is gaps") {
  const auto whole = at::rand({100, 100});
  const auto most = whole.narrow(1, 0, 60);
  CHECK(roundTrip(most).strides() == most.strides());
  CHECK(roundTrip(most).equal(most));
  const auto least = whole.narrow(1, 0, 40);
  CHECK(roundTrip(least).is_contiguous());
  CHECK(roundTrip(least).storage().nbytes() == 100 * 40 * sizeof(float));
  CHECK(roundTrip(least).equal(least));
}

TEST_CASE("memory that belongs to no element is not sent where that is to stay private") {
  static constexpr int64_t kPrivate = 7777;
  const auto check = [](const std::vector<at::Tensor>& sent) {
    const auto frame = encodeFrame({.kind = Kind::kCppCall, .tensors = sent}, {.hides_gaps = true});
    std::string bytes = frame.head;
    for (const auto& segment : frame.segments) bytes.append(static_cast<const char*>(segment.data()), segment.bytes);
    CHECK(bytes.find(std::string(reinterpret_cast<const char*>(&kPrivate), sizeof kPrivate)) == std::string::npos);
    const auto arrived = decodeFrame(Frame(frame)).tensors;
    REQUIRE(arrived.size() == sent.size());
    for (size_t i = 0; i < sent.size(); ++i) CHECK(arrived[i].equal(sent[i]));
    return arrived;
  };
  const int64_t side = GENERATE(8, 300);  // in the head, in segments
  const auto matrix = at::full({side, side}, kPrivate, at::kLong);
  const auto column = matrix.select(1, 3).fill_(1);
  const auto columns = matrix.narrow(1, 3, side / 2 + 1).fill_(2);
  const auto diagonal = matrix.diagonal().fill_(3);
  SECTION("one view") {
    check({column});
    check({columns});
    check({diagonal});
    check({matrix.narrow(1, 3, 1).expand({side, int64_t{1} << 40}).narrow(1, 0, 2)});
    CHECK(check({column.expand({1 << 20, side})})[0].stride(0) == 0);
  }
  SECTION("views that share memory and leave gaps arrive apart") {
    check({column, diagonal});
    check({columns, columns.t()});
  }
  SECTION("views that share memory without gaps still share it") {
    const auto row = matrix.select(0, 5).fill_(4);
    const auto arrived = check({row, row.narrow(0, 2, 3), row.flip(0)});
    arrived[0].fill_(5);
    CHECK(arrived[1].equal(at::full({3}, 5, at::kLong)));
    const auto whole = check({row.view({2, side / 2}).t(), row});
    whole[1].fill_(6);
    CHECK(whole[0].equal(at::full({side / 2, 2}, 6, at::kLong)));
  }
  SECTION("windows that overlap cover all memory") { check({matrix.select(0, 1).fill_(7).unfold(0, 4, 2)}); }
}

TEST_CASE("an arrived tensor uses the memory of its segment") {
  auto frame = transported(frameOf(at::rand({5000})));
  const void* memory = frame.segments[0].data();
  const auto arrived = decodeFrame(std::move(frame));
  CHECK(arrived.tensors[0].const_data_ptr() == memory);
  CHECK(arrived.tensors[0].storage().use_count() == 1);
}

TEST_CASE("only what is checked is copied if the sender can still change it") {
  const auto index = at::arange(10'000, at::kLong);
  auto frame = frameOf(at::sparse_coo_tensor(index.unsqueeze(0), at::ones({10'000}), {10'000}));
  REQUIRE(frame.segments.size() == 2);
  for (auto& segment : frame.segments) segment.is_shared = true;
  const auto segments = frame.segments;
  const auto arrived = decodeFrame(std::move(frame)).tensors.at(0);
  CHECK(arrived._indices().const_data_ptr() != segments[0].data());
  CHECK(arrived._values().const_data_ptr() == segments[1].data());
}

TEST_CASE("sending a tensor does not change its autograd graph") {
  auto leaf = at::rand({3, 1}).requires_grad_();
  const auto view = leaf.expand({3, 4});
  const auto arrived = roundTrip(view);
  CHECK(arrived.is_leaf());
  CHECK(arrived.requires_grad());
  view.sum().backward();
  CHECK(leaf.grad().sum().item<float>() == 12);
}

TEST_CASE("a tensor that cannot be sent is refused with its kind and a remedy") {
  CHECK(refusal(at::rand({4, 4}).to_mkldnn()) == "cannot send a tensor of layout Mkldnn: call .to_dense() first");
  CHECK(
      refusal(at::quantize_per_tensor(at::rand({2, 4}), 0.1, 0, at::kQUInt4x2)) ==
      "cannot send a quantized tensor of QUInt4x2 and scheme per_tensor_affine: call .dequantize() first");
  const auto zero_points = at::zeros({2}, at::kInt);
  const auto per_channel = at::quantize_per_channel(at::rand({2, 2}), at::ones({2}), zero_points, 0, at::kQInt8);
  CHECK(
      refusal(per_channel.view({4})) ==
      "cannot send a view that has lost the channels of its scales: send the tensor itself");
  CHECK(
      refusal(at::_nested_tensor_from_tensor_list({at::rand({2}), at::rand({3})})) ==
      "cannot send a nested tensor: send the list that .unbind() gives");

  auto freed = at::rand({10});
  freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
  CHECK_THAT(refusal(freed), Catch::Contains("storage is smaller than the tensor"));

  const auto elsewhere = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, at::Device("cuda:1")), nullptr, false),
      c10::DispatchKeySet(c10::DispatchKey::CUDA), caffe2::TypeMeta::Make<float>());
  CHECK_THAT(refusal(elsewhere), Catch::Contains("cannot send a tensor on cuda:1") && Catch::Contains(".cpu()"));
}

TEST_CASE("scales that do not fit the channels of a quantized tensor are malformed") {
  const auto encoded = [](int64_t axis, const at::Tensor& scales, const at::Tensor& integers) {
    std::string bytes;
    Writer head(bytes);
    std::vector<Segment> segments;
    head.put<uint32_t>(5);  // the form; no detail, bits and dimensions
    head.put<int64_t>(axis);
    for (const auto& part : {scales, at::zeros(scales.sizes(), at::kLong), integers}) {
      encodeTensor(part, head, segments, {});
    }
    return bytes;
  };
  const auto decoded = [](const std::string& bytes) {
    Reader head(bytes);
    std::span<Segment> segments;
    return decodeTensor(head, segments, {});
  };
  const auto integers = at::zeros({2, 3}, at::kByte);
  CHECK(decoded(encoded(1, at::ones({3}), integers)).q_per_channel_axis() == 1);
  CHECK_THROWS_AS(decoded(encoded(0, at::ones({3}), integers)), Error);
  CHECK_THROWS_AS(decoded(encoded(2, at::ones({3}), integers)), Error);
  CHECK_THROWS_AS(decoded(encoded(-1, at::ones({3}), integers)), Error);
  CHECK_THROWS_AS(decoded(encoded(1, at::ones({3, 1}), integers)), Error);
  CHECK_THROWS_AS(decoded(encoded(1, at::ones({1}).expand({3}), integers)), Error);
  CHECK_THROWS_AS(decoded(encoded(1, at::ones({3}), at::zeros({2, 3}))), Error);
  CHECK_THROWS_AS(decoded(encoded(1, at::ones({3}, at::kLong), integers)), c10::Error);
}

TEST_CASE("a dtype or a layout that torch does not have is malformed") {
  for (int number = 0; number < 256; ++number) {
    for (const uint8_t form : {1, 3}) {
      const std::string bytes{static_cast<char>(form), static_cast<char>(number), '\0', '\1', 0, 0, 0, 0, 0, 0, 0, 0};
      Reader head(bytes);
      std::span<Segment> segments;
      try {
        const auto tensor = decodeTensor(head, segments, {});
        CHECK(number < static_cast<int>(at::ScalarType::Undefined));
        CHECK(tensor.numel() == 0);
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kProtocol);
      }
    }
  }
}

TEST_CASE("tensors that are together larger than the limit are refused before anything is sent") {
  Limits limits;
  limits.frame_bytes = 20'000;
  const auto tensor = at::ones({2'000});
  CHECK_NOTHROW(encodeFrame({.kind = Kind::kReply, .tensors = {tensor, tensor.clone()}}, limits));
  try {
    encodeFrame({.kind = Kind::kReply, .tensors = {tensor, tensor.clone(), tensor.clone()}}, limits);
    FAIL("not refused");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kFrameTooLarge);
  }
}

TEST_CASE("a tensor larger than the limit is refused before anything is sent") {
  try {
    frameOf(at::ones({5000}, at::kByte), {.segment_bytes = 4999});
    FAIL("not refused");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kFrameTooLarge);
    CHECK_THAT(error.what(), Catch::Contains("5000 bytes") && Catch::Contains("4999"));
  }
}

}  // namespace torchrpc
