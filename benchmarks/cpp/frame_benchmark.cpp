// Encoding and decoding of frames, by the number and size of their tensors: below and above kInlineTensorBytes.

#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include "wire/message.h"

using namespace torchrpc;

namespace {

/// range(0) tensors of range(1) bytes.
Message makeMessage(const benchmark::State& state) {
  Message message{.kind = Kind::kCppCall, .call = 7, .payload = std::string(64, 'x')};
  for (int64_t i = 0; i < state.range(0); ++i) message.tensors.push_back(at::zeros({state.range(1)}, at::kByte));
  return message;
}

/// A copy like a received frame, which owns its memory. A frame to send shares memory with the sender's tensors.
Frame copyOf(const Frame& frame) {
  Frame out{.head = frame.head};
  for (const auto& segment : frame.segments) {
    auto copy = at::empty({static_cast<int64_t>(segment.bytes)}, at::kByte);
    std::memcpy(copy.mutable_data_ptr(), segment.data(), segment.bytes);
    out.segments.push_back({.storage = copy.storage(), .bytes = segment.bytes});
  }
  return out;
}

void encodesFrame(benchmark::State& state) {
  const auto message = makeMessage(state);
  for (auto _ : state) benchmark::DoNotOptimize(encodeFrame(message));
}

/// The time includes a copy of the head and of the references to the segments in each repetition.
void decodesFrame(benchmark::State& state) {
  const auto received = copyOf(encodeFrame(makeMessage(state)));
  for (auto _ : state) benchmark::DoNotOptimize(decodeFrame(received));
}

void peeksFrame(benchmark::State& state) {
  const auto frame = encodeFrame({.kind = Kind::kReply, .call = 7});
  for (auto _ : state) benchmark::DoNotOptimize(peekFrame(frame.head));
}

void shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"tensors", "bytes"});
  for (const auto& shape : {std::pair{0, 0}, {2, 16}, {2, 4096}, {2, 65536}, {1000, 64}}) {
    benchmark->Args({shape.first, shape.second});
  }
}

BENCHMARK(encodesFrame)->Apply(shapes);
BENCHMARK(decodesFrame)->Apply(shapes);
BENCHMARK(peeksFrame);

}  // namespace
