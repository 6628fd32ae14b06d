// A C++ function that Python workers call without the GIL: the Levenshtein distance of a word to each word of a list
// (how many letters must be changed, added or removed to turn one word into the other). A Python worker loads this
// library; cpp_function.py does so and measures it.

#include <algorithm>
#include <numeric>
#include <string>
#include <torchrpc/function.h>
#include <vector>

namespace {

int distance(const std::string& a, const std::string& b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int changed = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, changed});
    }
  }
  return row.back();
}

std::vector<int> distances(const std::string& word, const std::vector<std::string>& words) {
  std::vector<int> all;
  for (const auto& each : words) all.push_back(distance(word, each));
  return all;
}
TORCHRPC_FUNCTION(distances);

}  // namespace
