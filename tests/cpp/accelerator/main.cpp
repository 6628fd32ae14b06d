#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

#include "accelerator/load.h"

int main(int argc, char** argv) {
  simulated::load();
  return Catch::Session().run(argc, argv);
}
