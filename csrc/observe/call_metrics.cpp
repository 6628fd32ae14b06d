#include "observe/call_metrics.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/sync/mutex.h"
#include "wire/callable_name.h"

namespace torchrpc {

using Side = CallCounts::Side;

namespace call_metrics_detail {

/// A counter that one thread writes and all threads read.
class OwnCounter {
 public:
  void add(uint64_t n) { value_.store(get() + n, std::memory_order_relaxed); }
  void raiseTo(uint64_t n) {
    if (n > get()) value_.store(n, std::memory_order_relaxed);
  }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

/// Counters that one thread allocates when it first needs them. All threads read them.
template <typename T>
class OwnPart {
 public:
  OwnPart() = default;
  ~OwnPart() { delete pointer_.load(std::memory_order_relaxed); }
  OwnPart(const OwnPart&) = delete;
  OwnPart& operator=(const OwnPart&) = delete;

  T& own() {
    auto* part = pointer_.load(std::memory_order_relaxed);
    if (!part) pointer_.store(part = new T(), std::memory_order_release);
    return *part;
  }
  const T* get() const { return pointer_.load(std::memory_order_acquire); }

 private:
  std::atomic<T*> pointer_{nullptr};
};

constexpr size_t kErrorCodes = 32;  // codes of later versions are counted as kUnknown

/// The counters of one thread for one pair. Most calls of a function have similar latencies, so most octaves are never
/// allocated.
struct PairCounters {
  using Octave = std::array<OwnCounter, LatencyHistogram::kBucketsPerOctave>;
  // `shortest` and `longest` count the first and the last bucket, `octaves` the others.
  OwnCounter begun, ended, request_bytes, reply_bytes, total_ns, max_ns, shortest, longest;
  std::array<OwnPart<Octave>, LatencyHistogram::kOctaves> octaves;
  OwnPart<std::array<OwnCounter, kErrorCodes>> errors;

  void addLatency(uint64_t nanoseconds) {
    total_ns.add(nanoseconds);
    max_ns.raiseTo(nanoseconds);
    const auto bucket = LatencyHistogram::bucketOf(nanoseconds);
    if (bucket == 0) return shortest.add(1);
    if (bucket == LatencyHistogram::kBuckets - 1) return longest.add(1);
    constexpr auto kPerOctave = LatencyHistogram::kBucketsPerOctave;
    octaves[(bucket - 1) / kPerOctave].own()[(bucket - 1) % kPerOctave].add(1);
  }
  void addTo(CallCounts& sum) const {
    sum.calls += ended.get();
    sum.request_bytes += request_bytes.get();
    sum.reply_bytes += reply_bytes.get();
    sum.total_ns += total_ns.get();
    sum.max_ns = std::max(sum.max_ns, max_ns.get());
    sum.latency.add(0, shortest.get());
    sum.latency.add(LatencyHistogram::kBuckets - 1, longest.get());
    for (size_t i = 0; i < octaves.size(); ++i) {
      const auto* octave = octaves[i].get();
      for (size_t j = 0; octave && j < octave->size(); ++j) {
        sum.latency.add(1 + i * LatencyHistogram::kBucketsPerOctave + j, (*octave)[j].get());
      }
    }
    const auto* codes = errors.get();
    for (size_t i = 0; codes && i < codes->size(); ++i) {
      if (const auto count = (*codes)[i].get()) sum.errors[static_cast<ErrorCode>(i)] += count;
    }
  }
};

}  // namespace call_metrics_detail

using call_metrics_detail::kErrorCodes, call_metrics_detail::OwnPart, call_metrics_detail::PairCounters;

namespace {

/// Hashes the length and the last 16 bytes, in which most names differ. Names with the same hash share one entry of the
/// known calls and replace each other there.
uint64_t hashOf(std::string_view bytes, uint64_t seed) {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15;
  std::array<uint64_t, 2> words{};
  if (bytes.size() >= sizeof(words)) {
    std::memcpy(words.data(), bytes.data() + bytes.size() - sizeof(words), sizeof(words));
  } else if (!bytes.empty()) {
    std::memcpy(words.data(), bytes.data(), bytes.size());
  }
  auto hash = (seed ^ bytes.size() ^ words[0]) * kFactor;
  hash = (hash ^ (hash >> 32) ^ words[1]) * kFactor;
  return hash ^ (hash >> 32);
}

uint64_t bytesOfValues(const Message& message) {
  return message.payload.size() + (message.tensors.empty() ? 0 : message.tensorBytes());
}

/// For each of the two sides: kMaxPairs pairs, and the pair for all others.
constexpr size_t kMaxPairIds = 2 * (CallMetrics::kMaxPairs + 1);

}  // namespace

/// The counters of one thread. Only this thread writes them. Tables keeps them alive for readers.
class CallMetrics::ThreadCounters {
 public:
  /// Returns the counters of a pair, allocated on first use. Called by the owning thread only.
  PairCounters& own(uint32_t pair) { return blocks_[pair / kBlock].own()[pair % kBlock].own(); }
  /// Returns null if this thread has counted nothing for the pair.
  const PairCounters* get(uint32_t pair) const {
    const auto* block = blocks_[pair / kBlock].get();
    return block ? (*block)[pair % kBlock].get() : nullptr;
  }

  /// A cache entry: the pair of a recent call, by the first bytes of its payload. Used by the owning thread only.
  struct Known {
    uint64_t hash = 0, epoch = 0;
    Kind kind{};
    WorkerId peer = kNoWorker;
    Side side{};
    uint32_t pair = 0;
    std::string name_bytes{};

    bool is(
        uint64_t the_hash, uint64_t the_epoch, Kind the_kind, WorkerId the_peer, Side the_side,
        std::string_view bytes) const {
      return hash == the_hash && epoch == the_epoch && kind == the_kind && peer == the_peer && side == the_side &&
          name_bytes == bytes;
    }
  };
  Known& knownAt(uint64_t hash) { return known_[hash % known_.size()]; }

 private:
  static constexpr size_t kBlock = 64;
  using Block = std::array<OwnPart<PairCounters>, kBlock>;
  std::array<OwnPart<Block>, kMaxPairIds / kBlock + 1> blocks_;
  std::array<Known, 256> known_;
};

/// The pairs, and the counters of all threads.
class CallMetrics::Tables : public std::enable_shared_from_this<Tables> {
 public:
  uint32_t pairOf(Side side, const std::string& function, const std::string& peer) {
    const auto key = std::string(1, static_cast<char>(side)) + peer + '\0' + function;
    MutexLock lock(mutex_);
    if (const auto found = ids_.find(key); found != ids_.end()) return found->second;
    auto& count = counts_[static_cast<size_t>(side)];
    if (count >= kMaxPairs) {
      auto& other = others_[static_cast<size_t>(side)];
      if (!other) other = addPair(side, kOther, kOther);
      return *other;
    }
    ++count;
    const auto id = addPair(side, function, peer);
    ids_.emplace(key, id);
    return id;
  }

  /// Returns the counters of the calling thread; null while the thread exits.
  ThreadCounters* mine() {
    const auto& latest = latest_;
    return latest.of == this ? latest.counters : findMine();
  }

  std::vector<CallCounts> sum() const {
    std::vector<CallCounts> sums;
    std::vector<std::shared_ptr<ThreadCounters>> threads;
    {
      MutexLock lock(mutex_);
      sums = pairs_;
      threads = all_;
    }
    for (uint32_t id = 0; id < sums.size(); ++id) {
      auto& sum = sums[id];
      // Reads all `ended` before all `begun`. In the other order, a call that begins and ends in between would count as
      // minus one call in flight.
      for (const auto& thread : threads) {
        if (const auto* counters = thread->get(id)) counters->addTo(sum);
      }
      uint64_t begun = 0;
      for (const auto& thread : threads) {
        if (const auto* counters = thread->get(id)) begun += counters->begun.get();
      }
      sum.in_flight = begun > sum.calls ? begun - sum.calls : 0;
    }
    return sums;
  }

  /// Called when the node ends. Its counters are freed when the threads that hold them drop them.
  void close() { is_closed_.store(true, std::memory_order_relaxed); }

 private:
  using CountersPtr = std::shared_ptr<ThreadCounters>;

  /// The counters of one thread, for each node of the process. They go back to their Tables when the thread exits.
  struct OfThread {
    std::vector<std::pair<std::shared_ptr<Tables>, CountersPtr>> list;
    ~OfThread() {
      thread_has_ended_ = true;
      latest_ = {};
      for (const auto& [tables, counters] : list) tables->takeBack(counters);
    }
  };

  ThreadCounters* findMine() {
    if (thread_has_ended_) return nullptr;
    ThreadCounters* found = nullptr;
    for (const auto& [tables, counters] : of_thread_.list) {
      if (tables.get() == this) found = counters.get();
    }
    latest_ = {this, found ? found : lend()};
    return latest_.counters;
  }

  ThreadCounters* lend() {
    latest_ = {};
    std::erase_if(of_thread_.list, [](const auto& each) { return each.first->is_closed_.load(); });
    CountersPtr counters;
    {
      MutexLock lock(mutex_);
      if (!free_.empty()) {
        counters = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (!counters) {
      counters = std::make_shared<ThreadCounters>();
      MutexLock lock(mutex_);
      all_.push_back(counters);
    }
    of_thread_.list.emplace_back(shared_from_this(), counters);
    return counters.get();
  }

  void takeBack(const CountersPtr& counters) {
    MutexLock lock(mutex_);
    free_.push_back(counters);
  }

  uint32_t addPair(Side side, const std::string& function, const std::string& peer) TORCHRPC_REQUIRES(mutex_) {
    pairs_.push_back({.function = function, .peer = peer, .side = side});
    return static_cast<uint32_t>(pairs_.size() - 1);
  }

  static thread_local OfThread of_thread_;
  // These have no destructor, so they stay valid after of_thread_ has been destroyed.
  static thread_local constinit bool thread_has_ended_;
  struct Latest {
    const Tables* of = nullptr;
    ThreadCounters* counters = nullptr;
  };
  static thread_local constinit Latest latest_;

  std::atomic<bool> is_closed_{false};
  mutable Mutex mutex_;
  std::unordered_map<std::string, uint32_t> ids_ TORCHRPC_GUARDED_BY(mutex_);
  std::vector<CallCounts> pairs_ TORCHRPC_GUARDED_BY(mutex_);  ///< by id; their counts stay 0
  std::array<size_t, 2> counts_ TORCHRPC_GUARDED_BY(mutex_){};
  std::array<std::optional<uint32_t>, 2> others_ TORCHRPC_GUARDED_BY(mutex_);
  std::vector<CountersPtr> all_ TORCHRPC_GUARDED_BY(mutex_);
  std::vector<CountersPtr> free_ TORCHRPC_GUARDED_BY(mutex_);  ///< of threads that have exited
};

thread_local CallMetrics::Tables::OfThread CallMetrics::Tables::of_thread_;
thread_local constinit bool CallMetrics::Tables::thread_has_ended_ = false;
thread_local constinit CallMetrics::Tables::Latest CallMetrics::Tables::latest_;

CallMetrics::CallMetrics(const Messenger& workers, bool is_on)
    : workers_(workers), epoch_(0), tables_(std::make_shared<Tables>()) {
  enable(is_on);
}

CallMetrics::~CallMetrics() { tables_->close(); }

void CallMetrics::enable(bool is_on) { epoch_.store(is_on ? next_epoch_.fetch_add(1) : 0); }

void CallMetrics::onWorkerJoined() {
  if (isOn()) enable(true);
}

std::vector<CallCounts> CallMetrics::snapshot() const { return tables_->sum(); }

ReplyObserver::Note CallMetrics::begin(Side side, const Message& message, WorkerId peer, const std::string* peer_name) {
  auto* const mine = tables_->mine();
  if (!mine) return {};
  const auto name_bytes = callableNameBytes(message.kind, message.payload);
  const auto epoch = epoch_.load(std::memory_order_relaxed);
  const auto seed =
      (static_cast<uint64_t>(message.kind) << 32) ^ static_cast<uint64_t>(peer) ^ (static_cast<uint64_t>(side) << 63);
  const auto hash = hashOf(name_bytes, seed);
  auto& known = mine->knownAt(hash);
  if (!known.is(hash, epoch, message.kind, peer, side, name_bytes)) {
    const auto function = callableOrKindName(message.kind, name_bytes);
    const auto pair = tables_->pairOf(side, function, peer_name ? *peer_name : workers_.worker(peer).name);
    known = {hash, epoch, message.kind, peer, side, pair, std::string(name_bytes)};
  }
  auto& counters = mine->own(known.pair);
  counters.begun.add(1);
  counters.request_bytes.add(bytesOfValues(message));
  return {.counted = known.pair + 1, .begun = std::chrono::steady_clock::now()};
}

ReplyObserver::Note CallMetrics::onRequest(WorkerId to, const Message& message) {
  return isOn() ? begin(Side::kOut, message, to, nullptr) : Note();
}

ReplyObserver::Note CallMetrics::onServe(const Request& request) {
  if (!isOn() || request.from.id == kNoWorker) return {};  // observers are not workers
  return begin(Side::kIn, request.message, request.from.id, &request.from.name);
}

void CallMetrics::onReply(const Note& note, const Result<Message>& reply) {
  auto* const mine = tables_->mine();
  if (!mine) return;
  const auto elapsed = std::chrono::steady_clock::now() - note.begun;
  auto& counters = mine->own(note.counted - 1);
  counters.ended.add(1);
  counters.addLatency(static_cast<uint64_t>(std::max<int64_t>(std::chrono::nanoseconds(elapsed).count(), 0)));
  if (reply) {
    counters.reply_bytes.add(bytesOfValues(reply.value()));
  } else {
    const auto code = static_cast<size_t>(reply.error().code());
    counters.errors.own()[code < kErrorCodes ? code : 0].add(1);
  }
}

bool defaultMetrics() {
  const char* const port = std::getenv("TORCHRPC_METRICS_PORT");
  const char* const text = std::getenv("TORCHRPC_METRICS");
  const std::string_view value = text ? text : "";
  if (!value.empty() && value != "0" && value != "1") {
    throwInvalidArgument("TORCHRPC_METRICS must be 0 or 1, but is '" + std::string(value) + "'");
  }
  return value == "1" || (value.empty() && port && *port);
}

}  // namespace torchrpc
