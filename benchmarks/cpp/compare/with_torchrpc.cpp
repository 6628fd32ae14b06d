// The rows of the comparison with torchrpc. All threads share a node.

#include <ATen/ATen.h>

#include <array>
#include <cstddef>
#include <torchrpc/function.h>
#include <torchrpc/node.h>

#include "compare.h"

namespace {

using namespace compare;

class Counter {
 public:
  explicit Counter(int64_t start) : value_(start) {}
  int64_t add(int64_t number) { return value_ += number; }

 private:
  int64_t value_;
};

int64_t echo(int64_t value) { return value; }
std::vector<std::byte> echoBytes(const std::vector<std::byte>& value) { return value; }
std::vector<double> echoNumbers(const std::vector<double>& values) { return values; }
at::Tensor echoTensor(const at::Tensor& values) { return values; }
std::unique_ptr<Counter> makeCounter(int64_t start) { return std::make_unique<Counter>(start); }
TORCHRPC_FUNCTION(echo);
TORCHRPC_FUNCTION(echoBytes);
TORCHRPC_FUNCTION(echoNumbers);
TORCHRPC_FUNCTION(echoTensor);
TORCHRPC_FUNCTION(makeCounter);
TORCHRPC_FUNCTION(Counter::add);

class TorchrpcClient : public Client {
 public:
  explicit TorchrpcClient(const torchrpc::NodeRef& node) : node_(node), server_(node.worker("server")) {}

  void smallCall() override { require(node_.call(server_, &echo, ++number_) == number_); }
  void smallCallsInFlight(int calls) override {
    std::array<torchrpc::Future<int64_t>, kInFlight> futures;
    for (int i = 0; i < calls; ++i) {
      auto& future = futures[i % kInFlight];
      if (future.valid()) require(future.wait() == i - kInFlight);
      future = node_.callAsync(server_, &echo, i);
    }
    for (const auto& future : futures) future.wait();
  }
  void bytes() override { require(node_.call(server_, &echoBytes, bytes_).size() == kBytes); }
  void methodOfNewObject() override {
    require(node_.remote(server_, &makeCounter, ++number_).call(&Counter::add, 1) == number_ + 1);
  }
  void numbers() override {
    const auto result = node_.call(server_, &echoNumbers, numbers_);
    require(result.size() == kNumbers && result.back() == 0.5);
  }
  bool hasTensors() const override { return true; }
  void tensor() override { require(node_.call(server_, &echoTensor, tensor_).numel() == kNumbers); }

 private:
  torchrpc::NodeRef node_;
  torchrpc::WorkerInfo server_;
  int64_t number_ = 0;
  const std::vector<std::byte> bytes_ = std::vector<std::byte>(kBytes);
  const std::vector<double> numbers_ = std::vector<double>(kNumbers, 0.5);
  const at::Tensor tensor_ = at::full({int64_t{kNumbers}}, 0.5, at::kDouble);
};

torchrpc::NodeOptions nodeOptions(const Options& options, const std::string& folder, int rank) {
  return {
      .name = rank == 0 ? "server" : "client",
      .rank = rank,
      .world_size = 2,
      .rendezvous = "file://" + folder + "/store",
      .transport = options.transport};
}

}  // namespace

int main(int argc, char** argv) {
  const System system{
      .name = "torchrpc",
      .version = TORCHRPC_VERSION_TEXT,
      .transports = {"native", "tcp"},
      .apis = {},
      .serve =
          [](const Options& options, const std::string& folder, const System::Listening& listening) {
            listening("");  // the client waits for it in its own constructor
            torchrpc::Node node(nodeOptions(options, folder, 0));
            node.shutdown();
          },
      .call =
          [](const Options& options, const std::string& folder, const std::string&) {
            torchrpc::Node node(nodeOptions(options, folder, 1));
            Rows(options, [&] { return std::make_unique<TorchrpcClient>(node); }).measure();
            node.shutdown();
          },
      .server_ends_itself = true};
  return compare::run(system, argc, argv);
}
