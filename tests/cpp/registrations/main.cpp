// Exits with 0 if the constructor of a node names both places where a function of one name is registered, and those of
// a function without a name and of a null function, and nothing else; and if a wrong registration that comes later, as
// in a library that is loaded then, is logged.

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <iostream>

#include "shared.h"
#include "torchrpc/log.h"
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
    const bool is_named = has("twice") && has("first.cpp:5") && has("second.cpp:5") && has("second.cpp:7") &&
        has("an empty name") && has("second.cpp:8") && has("the function is null") && !has("hared");
    std::string logged;
    torchrpc::setLogSink([&logged](torchrpc::LogLevel, const std::string& line) { logged += line; });
    torchrpc::detail::declareAt("library.cpp:1", "", [] { return 1; });
    torchrpc::setLogSink(nullptr);
    std::cout << logged << std::endl;
    const bool is_logged = logged.find("library.cpp:1") != std::string::npos;
    return error.code() == torchrpc::ErrorCode::kInvalidArgument && is_named && is_logged ? 0 : 1;
  }
  std::cout << "no error" << std::endl;
  return 1;
}
