// The rows of the comparison with Cap'n Proto RPC. The server has one thread with an event loop, and each thread of the
// client an event loop and a connection of its own: a Cap'n Proto object belongs to one thread.

#include <capnp/ez-rpc.h>
#include <kj/async.h>

#include "calls.capnp.h"
#include "compare.h"

namespace {

using namespace compare;

// In words of 8 bytes; the default ends a connection that has read one message of 64 MiB.
const capnp::ReaderOptions kReaderOptions{.traversalLimitInWords = uint64_t{1} << 40};
// How much one message needs, so that it is allocated in one piece.
constexpr capnp::MessageSize kNumbersSize{kNumbers + 16, 0};
constexpr capnp::MessageSize kBytesSize{kBytes / 8 + 16, 0};

class CounterServer final : public Counter::Server {
 public:
  explicit CounterServer(int64_t start) : value_(start) {}
  kj::Promise<void> add(AddContext context) override {
    context.getResults().setValue(value_ += context.getParams().getNumber());
    return kj::READY_NOW;
  }

 private:
  int64_t value_;
};

class CallsServer final : public Calls::Server {
 public:
  kj::Promise<void> echo(EchoContext context) override {
    context.getResults().setValue(context.getParams().getValue());
    return kj::READY_NOW;
  }
  kj::Promise<void> echoBytes(EchoBytesContext context) override {
    context.initResults(kBytesSize).setValue(context.getParams().getValue());
    return kj::READY_NOW;
  }
  kj::Promise<void> echoNumbers(EchoNumbersContext context) override {
    context.initResults(kNumbersSize).setValues(context.getParams().getValues());
    return kj::READY_NOW;
  }
  kj::Promise<void> makeCounter(MakeCounterContext context) override {
    context.getResults().setCounter(kj::heap<CounterServer>(context.getParams().getStart()));
    return kj::READY_NOW;
  }
};

class CapnpClient : public Client {
 public:
  explicit CapnpClient(const std::string& address)
      : client_(address, 0, kReaderOptions), calls_(client_.getMain<Calls>()), wait_scope_(client_.getWaitScope()) {}
  ~CapnpClient() noexcept override {}  // those of Cap'n Proto may throw

  void smallCall() override {
    auto request = calls_.echoRequest();
    request.setValue(++number_);
    require(request.send().wait(wait_scope_).getValue() == number_);
  }
  void smallCallsInFlight(int calls) override {
    to_start_ = calls;
    auto loops = kj::heapArrayBuilder<kj::Promise<void>>(kInFlight);
    for (int i = 0; i < kInFlight; ++i) loops.add(callAgain());
    kj::joinPromises(loops.finish()).wait(wait_scope_);
  }
  void bytes() override {
    auto request = calls_.echoBytesRequest(kBytesSize);
    request.setValue(kj::arrayPtr(bytes_.data(), bytes_.size()));
    require(request.send().wait(wait_scope_).getValue().size() == kBytes);
  }
  void methodOfNewObject() override {
    auto make = calls_.makeCounterRequest();
    make.setStart(++number_);
    auto add = make.send().getCounter().addRequest();
    add.setNumber(1);
    require(add.send().wait(wait_scope_).getValue() == number_ + 1);
  }
  void numbers() override {
    auto request = calls_.echoNumbersRequest(kNumbersSize);
    request.setValues(kj::arrayPtr(numbers_.data(), numbers_.size()));
    const auto response = request.send().wait(wait_scope_);
    const auto values = response.getValues();
    require(values.size() == kNumbers && values[kNumbers - 1] == 0.5);
  }

 private:
  /// Calls one after the other until `to_start_` have been started by all of these loops.
  kj::Promise<void> callAgain() {
    if (to_start_ == 0) return kj::READY_NOW;
    const auto number = --to_start_;
    auto request = calls_.echoRequest();
    request.setValue(number);
    return request.send().then([this, number](auto&& response) {
      require(response.getValue() == number);
      return callAgain();
    });
  }

  capnp::EzRpcClient client_;
  Calls::Client calls_;
  kj::WaitScope& wait_scope_;
  int64_t number_ = 0;
  int64_t to_start_ = 0;
  const std::vector<kj::byte> bytes_ = std::vector<kj::byte>(kBytes);
  const std::vector<double> numbers_ = std::vector<double>(kNumbers, 0.5);
};

}  // namespace

int main(int argc, char** argv) {
  const System system{
      .name = "Cap'n Proto",
      .version = CAPNP_VERSION_TEXT,
      .transports = {"unix", "tcp"},
      .apis = {},
      .serve =
          [](const Options& options, const std::string& folder, const System::Listening& listening) {
            const bool is_tcp = options.transport == "tcp";
            const auto address = is_tcp ? std::string("127.0.0.1") : "unix:" + folder + "/socket";
            capnp::EzRpcServer server(kj::heap<CallsServer>(), address, 0, kReaderOptions);
            const auto port = server.getPort().wait(server.getWaitScope());
            listening(is_tcp ? address + ":" + std::to_string(port) : address);
            kj::Promise<void>(kj::NEVER_DONE).wait(server.getWaitScope());
          },
      .call =
          [](const Options& options, const std::string&, const std::string& address) {
            Rows(options, [&] { return std::make_unique<CapnpClient>(address); }).measure();
          }};
  return compare::run(system, argc, argv);
}
