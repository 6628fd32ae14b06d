// The rows of the comparison with gRPC. README.md lists the options.

#include <array>
#include <condition_variable>
#include <grpcpp/grpcpp.h>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "calls.grpc.pb.h"
#include "compare.h"

namespace {

using namespace compare;

/// gRPC has no remote objects: a table of counters, as programs make them.
class Counters {
 public:
  int64_t make(int64_t start) {
    const std::scoped_lock lock(mutex_);
    values_[++last_] = start;
    return last_;
  }
  int64_t addAndRemove(int64_t counter, int64_t number) {
    const std::scoped_lock lock(mutex_);
    const auto value = values_.at(counter) + number;
    values_.erase(counter);
    return value;
  }

 private:
  std::mutex mutex_;
  int64_t last_ = 0;
  std::unordered_map<int64_t, int64_t> values_;
};

class SyncService final : public Calls::Service {
  grpc::Status Echo(grpc::ServerContext*, const Number* request, Number* reply) override {
    reply->set_value(request->value());
    return grpc::Status::OK;
  }
  grpc::Status EchoBytes(grpc::ServerContext*, const Bytes* request, Bytes* reply) override {
    *reply = *request;
    return grpc::Status::OK;
  }
  grpc::Status EchoNumbers(grpc::ServerContext*, const Numbers* request, Numbers* reply) override {
    *reply = *request;
    return grpc::Status::OK;
  }
  grpc::Status MakeCounter(grpc::ServerContext*, const Number* request, CounterId* reply) override {
    reply->set_value(counters_.make(request->value()));
    return grpc::Status::OK;
  }
  grpc::Status AddAndRemove(grpc::ServerContext*, const Addition* request, Number* reply) override {
    reply->set_value(counters_.addAndRemove(request->counter().value(), request->number()));
    return grpc::Status::OK;
  }

  Counters counters_;
};

class CallbackService final : public Calls::CallbackService {
  using Reactor = grpc::ServerUnaryReactor;
  using Context = grpc::CallbackServerContext;

  Reactor* Echo(Context* context, const Number* request, Number* reply) override {
    reply->set_value(request->value());
    return finished(context);
  }
  Reactor* EchoBytes(Context* context, const Bytes* request, Bytes* reply) override {
    *reply = *request;
    return finished(context);
  }
  Reactor* EchoNumbers(Context* context, const Numbers* request, Numbers* reply) override {
    *reply = *request;
    return finished(context);
  }
  Reactor* MakeCounter(Context* context, const Number* request, CounterId* reply) override {
    reply->set_value(counters_.make(request->value()));
    return finished(context);
  }
  Reactor* AddAndRemove(Context* context, const Addition* request, Number* reply) override {
    reply->set_value(counters_.addAndRemove(request->counter().value(), request->number()));
    return finished(context);
  }
  static Reactor* finished(Context* context) {
    auto* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  Counters counters_;
};

void serve(const Options& options, const std::string& folder, const System::Listening& listening) {
  SyncService sync;
  CallbackService callback;
  grpc::ServerBuilder builder;
  const bool is_tcp = options.transport == "tcp";
  const auto address = is_tcp ? std::string("127.0.0.1:0") : "unix:" + folder + "/socket";
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  if (options.api == "sync") {
    builder.RegisterService(&sync);
  } else {
    builder.RegisterService(&callback);
  }
  const auto server = builder.BuildAndStart();
  if (!server) throw std::runtime_error("gRPC cannot listen at " + address);
  listening(is_tcp ? "127.0.0.1:" + std::to_string(port) : address);
  server->Wait();
}

std::shared_ptr<grpc::Channel> connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection for each channel, that is, for each thread
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

class GrpcClient : public Client {
 public:
  GrpcClient(const std::string& address, bool with_callbacks)
      : stub_(Calls::NewStub(connect(address))), with_callbacks_(with_callbacks) {
    bytes_.set_value(std::string(kBytes, '\0'));
    numbers_.mutable_values()->Resize(kNumbers, 0.5);
  }

  void smallCall() override {
    Number number;
    number.set_value(++number_);
    require(call(&Calls::Stub::Echo, number).value() == number_);
  }
  void smallCallsInFlight(int calls) override {
    if (with_callbacks_) {
      CallbackCalls(*stub_, calls).run();
    } else {
      inFlightByQueue(calls);
    }
  }
  void bytes() override { require(call(&Calls::Stub::EchoBytes, bytes_).value().size() == kBytes); }
  void methodOfNewObject() override {
    Number start;
    start.set_value(++number_);
    Addition addition;
    *addition.mutable_counter() = call(&Calls::Stub::MakeCounter, start);
    addition.set_number(1);
    require(call(&Calls::Stub::AddAndRemove, addition).value() == number_ + 1);
  }
  void numbers() override {
    const auto reply = call(&Calls::Stub::EchoNumbers, numbers_);
    require(reply.values_size() == kNumbers && reply.values(kNumbers - 1) == 0.5);
  }

 private:
  template <typename Request, typename Reply>
  Reply call(
      grpc::Status (Calls::Stub::*method)(grpc::ClientContext*, const Request&, Reply*), const Request& request) {
    grpc::ClientContext context;
    Reply reply;
    check((*stub_.*method)(&context, request, &reply));
    return reply;
  }
  static void check(const grpc::Status& status) {
    if (!status.ok()) throw std::runtime_error(status.error_message());
  }

  /// This thread starts the calls, and waits for them in a completion queue.
  void inFlightByQueue(int calls) {
    struct Call {
      std::optional<grpc::ClientContext> context;
      std::unique_ptr<grpc::ClientAsyncResponseReader<Number>> reader;
      Number request, reply;
      grpc::Status status;
    };
    std::array<Call, kInFlight> slots;
    int started = 0;
    const auto start = [&](Call& call) {
      call.context.emplace();
      call.request.set_value(started++);
      call.reader = stub_->AsyncEcho(&*call.context, call.request, &queue_);
      call.reader->Finish(&call.reply, &call.status, &call);
    };
    for (auto& slot : slots) start(slot);
    void* tag = nullptr;
    bool is_ok = false;
    for (int ended = 0; ended < calls && queue_.Next(&tag, &is_ok); ++ended) {
      auto& call = *static_cast<Call*>(tag);
      check(call.status);
      require(call.reply.value() == call.request.value());
      if (started < calls) start(call);
    }
  }

  /// gRPC's threads start each next call.
  class CallbackCalls {
   public:
    CallbackCalls(Calls::Stub& stub, int calls) : stub_(stub), calls_(calls) {}
    void run() {
      for (auto& slot : slots_) {
        slot.request.set_value(started_.fetch_add(1));
        start(slot);
      }
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ended_ == kInFlight; });
    }

   private:
    struct Call {
      std::optional<grpc::ClientContext> context;
      Number request, reply;
    };
    void start(Call& call) {
      call.context.emplace();
      stub_.async()->Echo(&*call.context, &call.request, &call.reply, [this, &call](const grpc::Status& status) {
        check(status);
        require(call.reply.value() == call.request.value());
        const int number = started_.fetch_add(1);
        if (number < calls_) {
          call.request.set_value(number);
          return start(call);
        }
        const std::scoped_lock lock(mutex_);
        if (++ended_ == kInFlight) changed_.notify_one();
      });
    }

    Calls::Stub& stub_;
    const int calls_;
    std::atomic<int> started_{0};
    std::array<Call, kInFlight> slots_;
    std::mutex mutex_;
    std::condition_variable changed_;
    int ended_ = 0;
  };

  std::unique_ptr<Calls::Stub> stub_;
  const bool with_callbacks_;
  grpc::CompletionQueue queue_;
  int64_t number_ = 0;
  Bytes bytes_;
  Numbers numbers_;
};

}  // namespace

int main(int argc, char** argv) {
  const System system{
      .name = "gRPC",
      .version = GRPC_VERSION,
      .transports = {"unix", "tcp"},
      .apis = {"sync", "callback"},
      .serve = serve,
      .call = [](const Options& options, const std::string&, const std::string& address) {
        Rows(options, [&] { return std::make_unique<GrpcClient>(address, options.api == "callback"); }).measure();
      }};
  return compare::run(system, argc, argv);
}
