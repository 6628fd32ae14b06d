// Whole messages: a head, and the segments beside it.

#include "wire/message.h"

#include "input.h"

using namespace torchrpc;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  Frame frame{.segments = input.segments()};
  frame.head = input.rest();
  peekFrame(frame.head);
  try {
    const auto message = decodeFrame(std::move(frame), fuzz::limits());
    encodeFrame(message);  // reads all of every tensor
    if (message.kind == Kind::kError) decodeError(message);
  } catch (const Error& error) {
    fuzz::expectRefusal(error);
  }
  return 0;
}
