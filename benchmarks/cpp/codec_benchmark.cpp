// Encoding and decoding of plain values: the cost of the arguments and the result of a call on each side.

#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include "wire/value_codec.h"

using namespace torchrpc;

namespace {

c10::IValue threeNumbers() { return c10::ivalue::Tuple::create({int64_t{7}, 0.5, true}); }

c10::IValue twoTensors() { return c10::ivalue::Tuple::create({at::ones({4}), at::ones({4})}); }

c10::IValue thousandInts() { return c10::List<int64_t>(std::vector<int64_t>(1000, 7)); }

c10::IValue namedLists() {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const char* name : {"ids", "sizes", "offsets", "labels"}) {
    dict.insert(std::string(name), c10::List<int64_t>(std::vector<int64_t>(20, 7)));
  }
  return dict;
}

void encode(benchmark::State& state, c10::IValue (*make)()) {
  const auto value = make();
  size_t bytes = 0;
  for (auto _ : state) {
    std::string out;
    std::vector<at::Tensor> tensors;
    Writer writer(out);
    encodeValue(value, writer, tensors);
    bytes = out.size();
    benchmark::DoNotOptimize(tensors.data());
  }
  state.counters["bytes"] = static_cast<double>(bytes);
}

void decode(benchmark::State& state, c10::IValue (*make)()) {
  std::string bytes;
  std::vector<at::Tensor> tensors;
  Writer writer(bytes);
  encodeValue(make(), writer, tensors);
  for (auto _ : state) {
    Reader reader(bytes);
    benchmark::DoNotOptimize(decodeValue(reader, tensors));
  }
}

BENCHMARK_CAPTURE(encode, three_numbers, threeNumbers);
BENCHMARK_CAPTURE(encode, two_tensors, twoTensors);
BENCHMARK_CAPTURE(encode, thousand_ints, thousandInts);
BENCHMARK_CAPTURE(encode, dict_of_lists, namedLists);
BENCHMARK_CAPTURE(decode, three_numbers, threeNumbers);
BENCHMARK_CAPTURE(decode, two_tensors, twoTensors);
BENCHMARK_CAPTURE(decode, thousand_ints, thousandInts);
BENCHMARK_CAPTURE(decode, dict_of_lists, namedLists);

}  // namespace
