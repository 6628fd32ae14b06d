// What the compiler must refuse: tests/python/test_cpp_refusals.py compiles it and counts the messages.

#include <cstdint>
#include <string>
#include <vector>

#include "torchrpc/function.h"
#include "torchrpc/node.h"

int split(const std::string& text, const std::vector<int64_t>& sizes);
void set(int8_t small, int number, bool flag, float single, size_t size);
struct Opaque {};

void refused(const torchrpc::Node& node) {
  node.call("server", &split, "text", 5);
  node.callAsync("server", &set, 300, 1, true, 1.0f, size_t{1});
  node.remote("server", &set, int8_t{1}, 1.9, true, 1.0f, size_t{1});
  node.call("server", &set, int8_t{1}, 1, "yes", 1.0f, size_t{1});
  node.call("server", &set, int8_t{1}, 1, true, 0.1, size_t{1});
  node.call("server", &set, int8_t{1}, 1, true, 1.0f, 1);
  node.call("server", &split, "text");
  node.call<void>("server", "take", Opaque());
  node.call(true, &split, "text", std::vector<int64_t>{1});
}
