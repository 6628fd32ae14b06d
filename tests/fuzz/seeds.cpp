// Writes the first inputs of the corpora: one of each kind of input that real workers send. Usage: fuzz_seeds FOLDER

#include <filesystem>
#include <fstream>
#include <iostream>

#include "transport/native/address.h"
#include "transport/native/auth/handshake_message.h"
#include "wire/samples.h"
#include "wire/value_codec.h"

using namespace torchrpc;
using namespace torchrpc::native;

namespace {

std::filesystem::path root;

void write(const std::string& target, const std::string& bytes) {
  static int number = 0;
  std::filesystem::create_directories(root / target);
  std::ofstream(root / target / ("seed" + std::to_string(number++)), std::ios::binary) << bytes;
}

/// The segments as fuzz::Input reads them. The size of each is rounded down to a multiple of 256 bytes.
std::string segmentsOf(const Frame& frame) {
  std::string out(1, static_cast<char>(frame.segments.size()));
  for (const auto& segment : frame.segments) out += static_cast<char>(segment.bytes / 256);
  return out;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::cerr << "usage: fuzz_seeds FOLDER\n";
    return 2;
  }
  root = arguments[1];
  const auto payload = HandshakePayload{.flags = 5, .name = "alice", .encryption = "auto", .identity = "i"}.bytes();
  for (const auto& message :
       {HandshakeMessage{.listener = 42, .group = "g", .payload = payload},
        HandshakeMessage{.type = HandshakeType::kWelcome, .payload = payload},
        HandshakeMessage{.type = HandshakeType::kConfirm, .payload = payload},
        HandshakeMessage{.type = HandshakeType::kReady, .payload = payload},
        HandshakeMessage{.type = HandshakeType::kRefusal, .text = "no"}}) {
    write("handshake", '\0' + message.bytes());
  }
  write("handshake", std::string("\2\1\2\0\5\5\5\5", 8));
  write("handshake", std::string("\2\1\2\0\5\5\0\1\1\5", 10));
  write("records", "\4\4\4\4\4\4\4\4\4\4\4\4\4\4");
  write("records", std::string("\1\4\4\0\0\4\4", 7));
  write("records", "\1\4\4\2\7\1\4");
  write("handshake", "\1native:id=4f;tcp=[fd00::2]:4242;host=83cc.40;unix=torchrpc-4f");
  std::mt19937 random(1);
  for (int i = 0; i < 40; ++i) {
    const auto frame = encodeFrame(randomMessage(random));
    if (frame.head.size() > 2000) continue;
    if (frame.segments.size() < 4) write("message", segmentsOf(frame) + frame.head);
    std::string stream(1, static_cast<char>(i));
    const uint64_t head_bytes = frame.head.size();
    const uint32_t segments = 0, flags = 0;
    Writer out(stream);
    out.put(head_bytes);
    out.put(segments);
    out.put(flags);
    if (i % 8 == 0) write("frames", stream + frame.head);
  }
  for (const auto& sample : sampleTensors()) {
    Frame frame;
    Writer head(frame.head);
    encodeTensor(sample.tensor, head, frame.segments, Limits());
    if (frame.segments.size() < 4 && frame.head.size() < 2000) write("tensor", segmentsOf(frame) + frame.head);
  }
  const std::vector<at::Tensor> tensors(3);
  for (int i = 0; i < 60; ++i) {
    std::string bytes(1, static_cast<char>(i % 16));
    std::vector<at::Tensor> out;
    Writer writer(bytes);
    encodeValue(randomValue(random, tensors), writer, out);
    if (bytes.size() < 500) write("value", bytes);
  }
}
