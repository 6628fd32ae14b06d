// Exits with 0 if the constructor of a node names both places where a function of one name is registered, and nothing
// else.

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <iostream>

#include "shared.h"
#include "torchrpc/node.h"

int main() {
  try {
    torchrpc::NodeOptions options;
    options.rank = 0;
    options.world_size = 1;
    const torchrpc::Node node(options, c10::make_intrusive<c10d::HashStore>());
  } catch (const torchrpc::Error& error) {
    const auto& text = error.text();
    std::cout << text << std::endl;
    const auto has = [&](const char* part) { return text.find(part) != std::string::npos; };
    const bool is_named = has("twice") && has("first.cpp:5") && has("second.cpp:5") && !has("hared");
    return error.code() == torchrpc::ErrorCode::kInvalidArgument && is_named ? 0 : 1;
  }
  std::cout << "no error" << std::endl;
  return 1;
}
