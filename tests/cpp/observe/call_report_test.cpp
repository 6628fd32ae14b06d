#include "observe/call_report.h"

#include <catch2/catch.hpp>

using namespace torchrpc;

TEST_CASE("a report has the counters of each function as plain values") {
  CallCounts row{.function = "train.step", .peer = "w0", .side = CallCounts::Side::kIn, .calls = 100, .in_flight = 1};
  row.errors = {{ErrorCode::kTimeout, 2}, {ErrorCode::kUserException, 1}};
  row.request_bytes = 1000;
  row.reply_bytes = 234;
  row.max_ns = 2'000'000;
  row.latency.add(LatencyHistogram::bucketOf(1'000'000), 100);
  const auto report = toReport({row});
  REQUIRE(report.isList());
  REQUIRE(report.toList().size() == 1);
  const auto dict = report.toList().get(0).toGenericDict();
  CHECK(dict.size() == 10);
  CHECK(dict.at("function").toStringRef() == "train.step");
  CHECK(dict.at("peer").toStringRef() == "w0");
  CHECK(dict.at("side").toStringRef() == "in");
  CHECK(dict.at("calls").toInt() == 100);
  CHECK(dict.at("errors").toInt() == 3);
  CHECK(dict.at("bytes").toInt() == 1234);
  CHECK(dict.at("in_flight").toInt() == 1);
  CHECK(dict.at("max_s").toDouble() == Approx(0.002));
  CHECK(dict.at("p50_s").toDouble() == Approx(0.001).epsilon(0.13));
  CHECK(dict.at("p99_s").toDouble() == Approx(0.001).epsilon(0.13));
  CHECK(toReport({}).toList().empty());
}
