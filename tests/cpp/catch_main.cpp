#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

#include "test_times.h"

/// What a program does before its tests, if it defines this function.
[[gnu::weak]] void beforeTests();

int main(int argc, char** argv) {
  if (beforeTests) beforeTests();
  return Catch::Session().run(argc, argv);
}
