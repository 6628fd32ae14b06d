// Numbered streams, with which a message takes effect once.

#include "rref/numbered_stream.h"

#include <catch2/catch.hpp>

#include <random>
#include <set>

using namespace torchrpc;

TEST_CASE("a number source counts from one for each destination") {
  NumberSource source;
  CHECK(source.next(3) == 1);
  CHECK(source.next(3) == 2);
  CHECK(source.next(5) == 1);
}

TEST_CASE("seen numbers are a set, stored as runs of consecutive numbers") {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    SeenNumbers seen;
    std::set<uint64_t> model;
    for (int i = 0; i < 60; ++i) {
      const uint64_t number = 1 + random() % 40;
      CHECK(seen.contains(number) == (model.count(number) > 0));
      CHECK(seen.insert(number) == model.insert(number).second);
      size_t runs = 0;
      for (const auto n : model) runs += model.count(n - 1) == 0;
      REQUIRE(seen.runs() == runs);
    }
    for (uint64_t number = 0; number < 45; ++number) CHECK(seen.contains(number) == (model.count(number) > 0));
  }
}
