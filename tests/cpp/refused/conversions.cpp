// What the compiler must refuse: tests/python/test_cpp_refusals.py compiles it and counts the messages.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "torchrpc/function.h"
#include "torchrpc/node.h"

int split(const std::string& text, const std::vector<int64_t>& sizes);
void set(int8_t small, int number, bool flag, float single, size_t size);
struct Opaque {};
std::unique_ptr<int> makeNumber();
void acceptsTime(std::chrono::steady_clock::time_point time);
struct Base {
  int size() const;
};
struct Other {};

void refused(const torchrpc::Node& node) {
  node.call("server", &split, "text", 5);
  node.callAsync("server", &set, 300, 1, true, 1.0f, size_t{1});
  node.remote("server", &set, int8_t{1}, 1.9, true, 1.0f, size_t{1});
  node.call("server", &set, int8_t{1}, 1, "yes", 1.0f, size_t{1});
  node.call("server", &set, int8_t{1}, 1, true, 0.1, size_t{1});
  node.call("server", &set, int8_t{1}, 1, true, 1.0f, 1);
  node.call("server", &split, "text");
  node.call<void>("server", "take", Opaque());
  torchrpc::registerFunction("changes its argument", [](std::string& text) { text += "x"; });
  torchrpc::registerFunction("generic", [](auto value) { return value; });
  torchrpc::registerFunction("variadic", &std::printf);
  torchrpc::registerFunction("takes a pointer", [](const char*) {});
  torchrpc::registerFunction("takes a time", &acceptsTime);
  node.call("server", &makeNumber);
  torchrpc::RRef<std::shared_ptr<Other>>().call(&Base::size);
  node.call(true, &split, "text", std::vector<int64_t>{1});
}
