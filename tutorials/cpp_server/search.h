#pragma once

// What the server and its clients agree on: the values that they exchange, and the names of the functions. Fields may
// be added to the structs on one side before the other.

#include <cstdint>
#include <string>
#include <torchrpc/node.h>
#include <torchrpc/struct.h>
#include <vector>

namespace search {

struct Item {
  std::string id;
  std::vector<float> embedding;
};
TORCHRPC_STRUCT(Item, id, embedding);

struct Query {
  std::vector<float> embedding;
  int32_t count = 10;  // of the nearest items
};
TORCHRPC_STRUCT(Query, embedding, count);

struct Hit {
  std::string id;
  double score = 0;
};
TORCHRPC_STRUCT(Hit, id, score);

struct Health {
  int64_t items = 0;
  double uptime_s = 0;
};
TORCHRPC_STRUCT(Health, items, uptime_s);

constexpr const char* kInsert = "search.insert";  // Item -> the number of items
constexpr const char* kFind = "search.find";      // Query -> std::vector<Hit>
constexpr const char* kHealth = "search.health";  // -> Health

/// A message beyond them is refused where it is sent, so all workers need the same.
constexpr torchrpc::MessageLimits kLimits{.message_bytes = 64u << 20, .head_bytes = 8u << 20};

}  // namespace search
