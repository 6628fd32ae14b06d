#include "wire/samples.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <cstring>
#include <string_view>

#include "wire/value_codec.h"
#include "wire/value_forms.h"

namespace torchrpc {

namespace {

void addDtypes(std::vector<Sample>& samples) {
  const auto numbers = at::arange(0, 24, at::kFloat).reshape({2, 3, 4});
  for (auto dtype :
       {at::kByte,
        at::kChar,
        at::kShort,
        at::kInt,
        at::kLong,
        at::kHalf,
        at::kFloat,
        at::kDouble,
        at::kBool,
        at::kBFloat16,
        at::kFloat8_e5m2,
        at::kFloat8_e4m3fn,
        at::kFloat8_e5m2fnuz,
        at::kFloat8_e4m3fnuz,
        at::ScalarType::UInt16,
        at::ScalarType::UInt32,
        at::ScalarType::UInt64,
        at::kComplexHalf,
        at::kComplexFloat,
        at::kComplexDouble}) {
    samples.push_back({c10::toString(dtype), numbers.to(dtype)});
  }
}

void addShapes(std::vector<Sample>& samples) {
  const auto big = at::arange(0, 6000, at::kFloat);  // too large for the head
  samples.push_back({"undefined", at::Tensor()});
  samples.push_back({"0-dim", at::scalar_tensor(3.5)});
  samples.push_back({"empty", at::empty({0})});
  samples.push_back({"empty of three dimensions", at::empty({2, 0, 5}, at::kLong)});
  samples.push_back({"empty and transposed", at::empty({2, 0, 5}).transpose(0, 2)});
  samples.push_back({"large", big});
  samples.push_back({"large and transposed", big.reshape({60, 100}).t()});
  samples.push_back({"large view in the middle", big.slice(0, 500, 3000)});
  samples.push_back({"small view of a large one", big.slice(0, 500, 510)});
  samples.push_back({"transposed", at::rand({3, 5}).t()});
  samples.push_back({"channels last", at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)});
  samples.push_back({"one channel, last", at::rand({2, 1, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)});
  samples.push_back({"large channels last", at::rand({2, 3, 40, 50}).contiguous(at::MemoryFormat::ChannelsLast)});
  samples.push_back({"expanded", at::rand({3, 1}).expand({3, 4})});
  samples.push_back({"large and expanded", at::rand({1}).expand({5000})});
  samples.push_back({"with gaps", at::rand({10, 10}).slice(1, 2, 5)});
  samples.push_back({"overlapping", at::rand({10}).unfold(0, 4, 1)});
  samples.push_back({"nan and infinite", at::tensor({NAN, INFINITY, -INFINITY, -0.0f})});
  samples.push_back({"meta", at::empty({3, 4}, at::TensorOptions().device(at::kMeta).dtype(at::kHalf))});
  samples.push_back({"huge meta", at::empty({1 << 20, 1 << 20}, at::TensorOptions().device(at::kMeta)).t()});
}

void addBits(std::vector<Sample>& samples) {
  const auto complex = at::rand({4, 5}, at::kComplexFloat);
  samples.push_back({"requires grad", at::rand({3}).requires_grad_()});
  samples.push_back({"result of an operation", at::rand({3}).requires_grad_() * 2});
  samples.push_back({"expanded, requires grad", at::rand({3, 1}).requires_grad_().expand({3, 4})});
  samples.push_back({"conjugate", complex.conj()});
  samples.push_back({"conjugate and transposed", complex.conj().t()});
  samples.push_back({"conjugate with gaps", complex.conj().slice(1, 0, 2)});
  samples.push_back({"negative", at::_neg_view(at::rand({3}))});
  samples.push_back({"imaginary part of a conjugate", at::imag(complex.conj())});
}

void addSparse(std::vector<Sample>& samples) {
  const auto dense = at::eye(6).slice(1, 0, 4).contiguous();
  const auto indices = at::tensor({0, 1, 1, 2, 0, 0}, at::kLong).reshape({2, 3});
  samples.push_back({"coo, coalesced", dense.to_sparse()});
  samples.push_back({"coo, not coalesced", at::sparse_coo_tensor(indices.flip(1), at::rand({3}), {3, 4})});
  samples.push_back({"coo with dense dimensions", at::sparse_coo_tensor(indices, at::rand({3, 2}), {3, 4, 2})});
  samples.push_back({"coo, empty", at::sparse_coo_tensor({0, 5}, at::TensorOptions().dtype(at::kFloat))});
  samples.push_back({"coo, large", at::eye(3000).to_sparse()});
  samples.push_back({"coo, requires grad", dense.to_sparse().requires_grad_()});
  samples.push_back({"csr", dense.to_sparse_csr()});
  samples.push_back({"csc", dense.to_sparse_csc()});
  samples.push_back({"bsr", dense.to_sparse_bsr({2, 2})});
  samples.push_back({"bsc", dense.to_sparse_bsc({2, 2})});
}

void addQuantized(std::vector<Sample>& samples) {
  for (auto dtype : {at::kQInt8, at::kQUInt8, at::kQInt32}) {
    const auto made = at::quantize_per_tensor(at::rand({2, 5}), 0.1, 10, dtype);
    const std::string name = c10::toString(dtype);
    samples.push_back({name, made});
    const auto zero_points = dtype == at::kQUInt8 ? at::rand({5}) : at::arange(5);
    const auto channels = at::quantize_per_channel(at::rand({2, 5}), at::rand({5}) + 0.1, zero_points, 1, dtype);
    samples.push_back({name + ", by channel", channels});
    samples.push_back({name + ", transposed", made.t()});
    samples.push_back({name + ", row of a matrix", made[1]});
    samples.push_back({name + ", large", at::quantize_per_tensor(at::rand({200, 300}), 0.1, 10, dtype).t()});
  }
}

bool sameBytes(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.numel() * a.itemsize()) == 0;
}

bool sameStrided(const at::Tensor& sent, const at::Tensor& arrived) {
  const bool dense = sent.is_meta() || sent.numel() == 0 || sent.unsafeGetTensorImpl()->is_non_overlapping_and_dense();
  if (arrived.is_conj() != sent.is_conj() || arrived.is_neg() != sent.is_neg() || arrived.is_meta() != sent.is_meta() ||
      (dense && arrived.strides() != sent.strides())) {
    return false;
  }
  if (dense) return sent.is_meta() || sameBytes(sent, arrived);
  return sameBytes(sent.contiguous(), arrived.contiguous());
}

bool sameParts(const at::Tensor& sent, const at::Tensor& arrived) {
  if (sent.layout() == at::kSparse) {
    return sent.is_coalesced() == arrived.is_coalesced() && sameStrided(sent._indices(), arrived._indices()) &&
        sameStrided(sent._values(), arrived._values());
  }
  const bool by_rows = sent.layout() == at::kSparseCsr || sent.layout() == at::kSparseBsr;
  return sameStrided(sent.values(), arrived.values()) &&
      (by_rows ? sameStrided(sent.crow_indices(), arrived.crow_indices()) &&
               sameStrided(sent.col_indices(), arrived.col_indices())
               : sameStrided(sent.ccol_indices(), arrived.ccol_indices()) &&
               sameStrided(sent.row_indices(), arrived.row_indices()));
}

template <typename T>
T pick(std::mt19937& random, T end) {
  return std::uniform_int_distribution<T>(0, end - 1)(random);
}

std::string randomBytes(std::mt19937& random, size_t most) {
  std::string bytes(pick<size_t>(random, most), '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

}  // namespace

std::vector<Sample> sampleTensors() {
  std::vector<Sample> samples;
  addDtypes(samples);
  addShapes(samples);
  addBits(samples);
  addSparse(samples);
  addQuantized(samples);
  return samples;
}

bool sameQuantizer(const at::Tensor& sent, const at::Tensor& arrived) {
  if (sent.qscheme() != arrived.qscheme()) return false;
  if (sent.qscheme() == at::kPerTensorAffine) {
    return sent.q_scale() == arrived.q_scale() && sent.q_zero_point() == arrived.q_zero_point();
  }
  return sent.q_per_channel_axis() == arrived.q_per_channel_axis() &&
      sent.q_per_channel_scales().equal(arrived.q_per_channel_scales()) &&
      sent.q_per_channel_zero_points().equal(arrived.q_per_channel_zero_points());
}

bool arrivedSame(const at::Tensor& sent, const at::Tensor& arrived) {
  at::NoGradGuard no_grad;
  if (!sent.defined() || !arrived.defined()) return sent.defined() == arrived.defined();
  if (sent.scalar_type() != arrived.scalar_type() || sent.layout() != arrived.layout() ||
      sent.sizes() != arrived.sizes() || sent.requires_grad() != arrived.requires_grad() || !arrived.is_leaf()) {
    return false;
  }
  if (sent.layout() != at::kStrided) return sameParts(sent.detach(), arrived.detach());
  if (sent.is_quantized()) {
    return sameQuantizer(sent, arrived) && sent.strides() == arrived.strides() && sameBytes(sent, arrived);
  }
  return sameStrided(sent, arrived);
}

namespace {

std::string bytesIn(const c10::IValue& value) {
  const auto bytes = value.toStorage();
  return {static_cast<const char*>(bytes.data()), bytes.nbytes()};
}

bool sameForm(const c10::IValue& sent, const c10::IValue& arrived) {
  if (const auto* numbers = formAs<NumberList>(sent)) {
    const auto* others = formAs<NumberList>(arrived);
    return others && arrivedSame(numbers->numbers, others->numbers);
  }
  if (const auto* object = formAs<StructValue>(sent)) {
    const auto* other = formAs<StructValue>(arrived);
    return other && object->name == other->name &&
        std::equal(
               object->fields.begin(), object->fields.end(), other->fields.begin(), other->fields.end(),
               [](const auto& x, const auto& y) { return x.first == y.first && arrivedSame(x.second, y.second); });
  }
  const auto* dict = formAs<DictEntries>(sent);
  const auto* other = formAs<DictEntries>(arrived);
  return dict && other &&
      std::equal(
             dict->entries.begin(), dict->entries.end(), other->entries.begin(), other->entries.end(),
             [](const auto& x, const auto& y) {
               return arrivedSame(x.first, y.first) && arrivedSame(x.second, y.second);
             });
}

c10::IValue randomNumbers(std::mt19937& random) {
  constexpr at::ScalarType kTypes[] = {at::kByte, at::kShort, at::kLong,   at::kUInt64,
                                       at::kInt,  at::kFloat, at::kDouble, at::kComplexDouble};
  const auto type = kTypes[pick(random, std::size(kTypes))];
  auto numbers = at::empty({static_cast<int64_t>(random() % 1000)}, type);
  if (type == at::kUInt64) {
    auto* data = static_cast<uint64_t*>(numbers.mutable_data_ptr());
    for (int64_t i = 0; i < numbers.numel(); ++i) data[i] = uint64_t{random()} << (random() % 33);
  } else {
    numbers.fill_(3);
  }
  return makeForm<NumberList>(std::move(numbers));
}

}  // namespace

bool arrivedSame(const c10::IValue& sent, const c10::IValue& arrived) {
  if (sent.tagKind() != arrived.tagKind()) return false;
  if (sent.isTensor()) return arrivedSame(sent.toTensor(), arrived.toTensor());
  if (sent.isStorage()) return bytesIn(sent) == bytesIn(arrived);
  if (sent.isUnsigned() && !sent.isInt()) return sent.toUInt() == arrived.toUInt();
  if (sent.isCapsule()) return sameForm(sent, arrived);
  const auto all = [](const auto& a, const auto& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const c10::IValue& x, const c10::IValue& y) {
      return arrivedSame(x, y);
    });
  };
  if (sent.isList()) return all(sent.toListRef(), arrived.toListRef());
  if (sent.isTuple()) return all(sent.toTupleRef().elements(), arrived.toTupleRef().elements());
  if (sent.isGenericDict()) {
    const auto a = sent.toGenericDict();
    const auto b = arrived.toGenericDict();
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
      return arrivedSame(x.key(), y.key()) && arrivedSame(x.value(), y.value());
    });
  }
  return sent == arrived;
}

Frame transported(Frame frame) {
  for (auto& segment : frame.segments) {
    auto copy = makeStorage(segment.bytes);
    std::memcpy(copy.mutable_data(), segment.data(), segment.bytes);
    segment = {std::move(copy), 0, segment.bytes};
  }
  return frame;
}

at::Tensor roundTrip(const at::Tensor& tensor) {
  auto arrived = decodeFrame(transported(encodeFrame({.kind = Kind::kReply, .tensors = {tensor}})));
  return arrived.tensors.at(0);
}

c10::IValue roundTrip(const c10::IValue& value, const c10::TypePtr& type) {
  Message message{.kind = Kind::kReply};
  Writer out(message.payload);
  encodeValue(value, out, message.tensors);
  const auto arrived = decodeFrame(transported(encodeFrame(message)));
  Reader in(arrived.payload);
  auto result = decodeValue(in, arrived.tensors, type);
  in.expectEnd();
  return result;
}

static std::string randomText(std::mt19937& random, size_t most) {
  constexpr std::array<std::string_view, 5> kCharacters = {"a", {"\0", 1}, "\u00e9", "\u20ac", "\U0001F600"};
  std::string text;
  for (auto count = pick<size_t>(random, most); count > 0; --count)
    text += kCharacters.at(random() % kCharacters.size());
  return text;
}

c10::IValue randomValue(std::mt19937& random, const std::vector<at::Tensor>& tensors, int depth) {
  const auto child = [&] { return randomValue(random, tensors, depth - 1); };
  switch (pick(random, depth > 0 ? 16 : 11)) {
    case 0: return {};
    case 1: return random() % 2 == 0;
    case 2: return static_cast<int64_t>(random()) << (random() % 32);
    case 3: return static_cast<double>(random()) / 7;
    case 4: return c10::complex<double>(static_cast<double>(random()), 1);
    case 5: return randomText(random, 40);
    case 6: return tensors[pick(random, tensors.size())];
    case 7: return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(pick(random, 8)));
    case 8: return (uint64_t{1} << 63) + random();
    case 9: return makeBytes(randomBytes(random, random() % 4 == 0 ? 10'000 : 40));
    case 10: return randomNumbers(random);
    case 11: {
      StructValue::Fields fields;
      for (int i = pick(random, 6); i > 0; --i) fields.emplace_back("field" + std::to_string(i), child());
      return makeForm<StructValue>("Struct", std::move(fields));
    }
    case 12: {
      DictEntries::Entries entries;
      for (int i = 1 + pick(random, 5); i > 0; --i) {
        entries.emplace_back(c10::ivalue::Tuple::create({c10::IValue(i)}), child());
      }
      return makeForm<DictEntries>(std::move(entries));
    }
    case 13: {
      c10::impl::GenericList list(c10::AnyType::get());
      for (int i = pick(random, 6); i > 0; --i) list.push_back(child());
      return list;
    }
    case 14: {
      std::vector<c10::IValue> values;
      for (int i = pick(random, 6); i > 0; --i) values.push_back(child());
      return c10::ivalue::Tuple::create(std::move(values));
    }
    default: {
      c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
      for (int i = pick(random, 6); i > 0; --i) {
        dict.insert_or_assign(i % 2 != 0 ? c10::IValue(i) : c10::IValue(randomText(random, 8)), child());
      }
      return dict;
    }
  }
}

Message randomMessage(std::mt19937& random) {
  static const auto samples = sampleTensors();
  Message message{.kind = Kind::kPythonCall, .call = random(), .payload = randomBytes(random, 200)};
  for (int i = pick(random, 4); i > 0; --i) {
    message.headers.push_back({static_cast<HeaderKind>(pick(random, 8)), randomBytes(random, 30)});
  }
  for (int i = pick(random, 5); i > 0; --i) message.tensors.push_back(samples[pick(random, samples.size())].tensor);
  return message;
}

}  // namespace torchrpc
