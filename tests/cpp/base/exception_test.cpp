// What foreign code throws, as an Error.

#include "base/exception.h"

#include <c10/util/Exception.h>
#include <catch2/catch.hpp>

#include <pthread.h>
#include <thread>

namespace torchrpc {
namespace {

template <typename Exception>
Error converted(const Exception& exception) {
  return errorFromException(std::make_exception_ptr(exception), ErrorCode::kUserException, "worker1", "in f: ");
}

void* endThread(void* passed) {
  struct Unwound {
    bool& happened;
    ~Unwound() { happened = true; }
  } unwound{*static_cast<bool*>(passed)};
  runOrFail([] { pthread_exit(nullptr); }, [](const Error&) { std::abort(); }, ErrorCode::kUnknown);
  return nullptr;
}

}  // namespace

TEST_CASE("an Error keeps its code, worker and detail") {
  const auto error = converted(Error(ErrorCode::kTimeout, "too late", "worker2", "detail"));
  CHECK(error.code() == ErrorCode::kTimeout);
  CHECK(error.text() == "in f: too late");
  CHECK(error.worker() == "worker2");
  CHECK(error.detail() == "detail");
}

TEST_CASE("other exceptions get the code and the worker of the caller") {
  const auto error = converted(std::runtime_error("plain"));
  CHECK(error.code() == ErrorCode::kUserException);
  CHECK(error.text() == "in f: plain");
  CHECK(error.worker() == "worker1");
  CHECK(converted(7).text() == "in f: an exception of type int");
  CHECK(converted(7).exceptionType() == "int");
  CHECK(converted(std::out_of_range("far")).exceptionType() == "std::out_of_range");
}

TEST_CASE("torch's errors come without their backtrace") {
  try {
    TORCH_CHECK(false, "a bad shape");
  } catch (const c10::Error& error) {
    CHECK(converted(error).text() == std::string("in f: ") + error.what_without_backtrace());
    CHECK(converted(error).text().size() < std::string(error.what()).size());
  }
}

TEST_CASE("what a body throws is passed to its fail function, once") {
  int failures = 0;
  runOrFail([] {}, [&](const Error&) { ++failures; }, ErrorCode::kUnknown);
  CHECK(failures == 0);
  const auto fail = [&](const Error& error) {
    ++failures;
    CHECK(error.text() == "plain");
    CHECK(error.worker() == "worker1");
  };
  runOrFail([] { throw std::runtime_error("plain"); }, fail, ErrorCode::kUnknown, "worker1");
  CHECK(failures == 1);
}

TEST_CASE("a thread that exits in the body unwinds") {
  bool unwound = false;
  pthread_t thread{};
  REQUIRE(pthread_create(&thread, nullptr, endThread, &unwound) == 0);
  pthread_join(thread, nullptr);
  CHECK(unwound);
}

}  // namespace torchrpc
