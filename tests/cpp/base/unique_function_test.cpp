// UniqueFunction: small functions and large ones, what they own, and when it is destroyed.

#include "base/unique_function.h"

#include <catch2/catch.hpp>

#include <array>
#include <functional>
#include <memory>
#include <string>

namespace torchrpc {

TEST_CASE("an empty function is false") {
  const UniqueFunction<void()> none{}, null(nullptr), of_empty{std::function<void()>()};
  CHECK_FALSE(none);
  CHECK_FALSE(null);
  CHECK_FALSE(of_empty);
}

TEST_CASE("functions return values, and take arguments that cannot be copied") {
  const UniqueFunction<int(std::unique_ptr<int>)> deref = [](const std::unique_ptr<int>& value) { return *value; };
  CHECK(deref(std::make_unique<int>(7)) == 7);
  const UniqueFunction<std::string(const std::string&, int)> joined = [](const std::string& text, int number) {
    return text + std::to_string(number);
  };
  CHECK(joined("a", 2) == "a2");
}

namespace {

/// A function of that size which counts its calls, and owns something.
template <size_t kBytes>
struct Counter {
  std::unique_ptr<int> count = std::make_unique<int>(0);
  std::shared_ptr<int> owned;
  std::array<char, kBytes> filler{};

  int operator()() { return ++*count; }
};
using Small = Counter<8>;
using Large = Counter<200>;
static_assert(sizeof(Small) <= UniqueFunction<int()>::kInlineBytes);
static_assert(sizeof(Large) > UniqueFunction<int()>::kInlineBytes);

}  // namespace

TEMPLATE_TEST_CASE("a function keeps its state when it is moved, and what it owns ends with it", "", Small, Large) {
  auto owned = std::make_shared<int>(1);
  TestType counter;
  counter.owned = owned;
  UniqueFunction<int()> first = std::move(counter);
  CHECK(owned.use_count() == 2);
  CHECK(first() == 1);
  auto second = std::move(first);
  CHECK_FALSE(first);  // NOLINT(bugprone-use-after-move)
  CHECK(second() == 2);
  first = std::move(second);
  CHECK(first() == 3);
  CHECK(owned.use_count() == 2);
  first = [] { return 0; };
  CHECK(owned.use_count() == 1);
  CHECK(first() == 0);
}

TEMPLATE_TEST_CASE("a function may be replaced by what its own destructor does", "", Small, Large) {
  UniqueFunction<int()> function;
  TestType counter;
  counter.owned = std::shared_ptr<int>(new int(1), [&](const int* value) {
    delete value;
    CHECK_FALSE(function);  // it has been emptied before
  });
  function = std::move(counter);
  function = nullptr;
  CHECK_FALSE(function);
}

}  // namespace torchrpc
