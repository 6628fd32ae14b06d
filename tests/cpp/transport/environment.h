#pragma once

#include <cstdlib>

namespace torchrpc::test {

/// Sets an environment variable while it exists, and unsets it afterwards.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Environment() { ::unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

}  // namespace torchrpc::test
