#pragma once

// What the programs of the comparison share: the rows, how each is measured, and the two processes. A program
// implements Client and a server, and prints a line of JSON for each row.

#include <algorithm>
#include <barrier>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <regex>
#include <stdexcept>
#include <string>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace compare {

using Clock = std::chrono::steady_clock;

constexpr int kInFlight = 64;
constexpr size_t kBytes = 4096;
constexpr size_t kNumbers = 1'000'000;

struct Options {
  double seconds = 0.5;  ///< of each row
  std::string transport;
  std::string api;      ///< of gRPC
  std::regex rows{""};  ///< the names of the rows to measure
};

/// What one caller thread calls the server with. It belongs to that thread. Each function returns when the results have
/// come, and throws if they are wrong.
class Client {
 public:
  virtual ~Client() = default;
  /// A function of an int64 that returns an int64.
  virtual void smallCall() = 0;
  /// So many small calls, of which kInFlight wait for their results at any time.
  virtual void smallCallsInFlight(int calls) = 0;
  /// kBytes there and back.
  virtual void bytes() = 0;
  /// Makes a counter on the server, and calls a method of it.
  virtual void methodOfNewObject() = 0;
  /// kNumbers doubles there and back.
  virtual void numbers() = 0;
  /// The same as a tensor.
  virtual bool hasTensors() const { return false; }
  virtual void tensor() {}
};

inline void require(bool is_right) {
  if (!is_right) throw std::runtime_error("a call has returned a wrong result");
}

class Rows {
 public:
  Rows(Options options, std::function<std::unique_ptr<Client>()> connect)
      : options_(std::move(options)), connect_(std::move(connect)) {}

  void measure() const {
    for (const int threads : {1, 2, 4}) row("small call", threads, &Client::smallCall);
    inFlight();
    row("4 KiB of bytes there and back", 1, &Client::bytes);
    for (const int threads : {1, 2, 4})
      row("method of an object that is still to be made", threads, &Client::methodOfNewObject);
    for (const int threads : {1, 2, 4}) row("vector of 1,000,000 doubles there and back", threads, &Client::numbers);
    if (connect_()->hasTensors()) row("tensor of 1,000,000 doubles there and back", 1, &Client::tensor);
  }

 private:
  /// The threads warm up for a quarter of the time, begin together, and call until the time has passed.
  void row(const std::string& what, int threads, void (Client::*call)()) const {
    const auto name = what + (threads == 1 ? ", 1 thread" : ", " + std::to_string(threads) + " threads");
    if (!std::regex_search(name, options_.rows)) return;
    std::vector<std::vector<double>> times_us(threads);
    std::vector<std::thread> callers;
    Clock::time_point begin;
    std::barrier warm(threads, [&]() noexcept { begin = Clock::now(); });
    for (int i = 0; i < threads; ++i) {
      callers.emplace_back([&, i] {
        try {
          const auto client = connect_();
          repeat(options_.seconds / 4, [&] { (*client.*call)(); });
          warm.arrive_and_wait();
          repeat(options_.seconds, [&, before = Clock::now()]() mutable {
            (*client.*call)();
            const auto now = Clock::now();
            times_us[i].push_back(std::chrono::duration<double, std::micro>(now - before).count());
            before = now;
          });
        } catch (const std::exception& error) {
          std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
          std::_Exit(1);
        }
      });
    }
    for (auto& caller : callers) caller.join();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    std::vector<double> all_us;
    for (const auto& times : times_us) all_us.insert(all_us.end(), times.begin(), times.end());
    print(name, static_cast<double>(all_us.size()) / seconds, median(all_us));
  }

  /// Batches; the rate is that of the median batch.
  void inFlight() const {
    const auto name = "small call, " + std::to_string(kInFlight) + " in flight by 1 thread";
    if (!std::regex_search(name, options_.rows)) return;
    constexpr int kBatch = 2000;
    const auto client = connect_();
    std::vector<double> times_us;
    repeat(options_.seconds / 4, [&] { client->smallCallsInFlight(kBatch); });
    repeat(options_.seconds, [&] {
      const auto before = Clock::now();
      client->smallCallsInFlight(kBatch);
      times_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - before).count() / kBatch);
    });
    const double us = median(times_us);
    print(name, 1e6 / us, us);
  }

  static void repeat(double seconds, std::function<void()> call) {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    do call();
    while (Clock::now() < end);
  }

  static double median(std::vector<double>& values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  static void print(const std::string& name, double rate, double us) {
    std::printf("{\"row\": \"%s\", \"calls_per_s\": %.1f, \"median_us\": %.3f}\n", name.c_str(), rate, us);
    std::fflush(stdout);
  }

  Options options_;
  std::function<std::unique_ptr<Client>()> connect_;
};

/// `serve` gets a new folder for a socket or a store, and a function by which it says that it listens and at which
/// address; it need not return. `call` gets the folder and that address.
struct System {
  std::string name;
  std::string version;
  std::vector<std::string> transports;
  std::vector<std::string> apis;
  using Listening = std::function<void(const std::string& address)>;
  std::function<void(const Options&, const std::string& folder, const Listening& listening)> serve;
  std::function<void(const Options&, const std::string& folder, const std::string& address)> call;
  bool server_ends_itself = false;
};

/// The server runs in a child process, which is forked before anything of the system has started.
inline int runServerAndClient(const System& system, const Options& options) {
  auto folder = (std::filesystem::temp_directory_path() / "compare.XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("no folder can be made at " + folder);
  int listening[2];
  if (::pipe(listening) != 0) throw std::runtime_error("no pipe can be made");
  const pid_t server = ::fork();
  if (server == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(listening[0]);
    int code = 0;
    try {
      system.serve(options, folder, [&](const std::string& address) {
        const auto written = ::write(listening[1], address.data(), address.size());
        ::close(listening[1]);
        if (written < 0) std::_Exit(1);
      });
    } catch (const std::exception& error) {
      std::fprintf(stderr, "the server: %s\n", error.what());
      code = 1;
    }
    ::_exit(code);
  }
  ::close(listening[1]);
  std::string address;
  char buffer[256];
  for (ssize_t count = 0; (count = ::read(listening[0], buffer, sizeof buffer)) > 0;) address.append(buffer, count);
  std::printf("{\"system\": \"%s\", \"version\": \"%s\"}\n", system.name.c_str(), system.version.c_str());
  int code = 0;
  try {
    system.call(options, folder, address);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "the client: %s\n", error.what());
    code = 1;
  }
  if (!system.server_ends_itself || code != 0) ::kill(server, SIGKILL);
  int status = 0;
  ::waitpid(server, &status, 0);
  std::filesystem::remove_all(folder);
  return code != 0 || (system.server_ends_itself && status != 0) ? 1 : 0;
}

/// with_SYSTEM [--quick] [--seconds S] [--rows REGEX] [--transport T] [--api A]
inline int run(const System& system, int argc, char** argv) {
  Options options;
  options.transport = system.transports.front();
  options.api = system.apis.empty() ? "" : system.apis.front();
  const auto usage = [&] {
    std::fprintf(stderr, "usage: %s [--quick] [--seconds S] [--rows REGEX]", argv[0]);
    const auto choice = [](const char* option, const std::vector<std::string>& values) {
      for (const auto& value : values)
        std::fprintf(stderr, "%s%s", &value == values.data() ? option : "|", value.c_str());
      if (!values.empty()) std::fprintf(stderr, "]");
    };
    choice(" [--transport ", system.transports);
    choice(" [--api ", system.apis);
    std::fprintf(stderr, "\n");
    return 2;
  };
  const auto isOneOf = [](const std::vector<std::string>& values, const std::string& value) {
    return std::find(values.begin(), values.end(), value) != values.end();
  };
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--quick") {
      options.seconds = 0.05;
      continue;
    }
    if (i + 1 == argc) return usage();
    const std::string value = argv[++i];
    if (option == "--seconds") {
      options.seconds = std::atof(value.c_str());
    } else if (option == "--rows") {
      options.rows = value;
    } else if (option == "--transport" && isOneOf(system.transports, value)) {
      options.transport = value;
    } else if (option == "--api" && isOneOf(system.apis, value)) {
      options.api = value;
    } else {
      return usage();
    }
  }
  return options.seconds > 0 ? runServerAndClient(system, options) : usage();
}

}  // namespace compare
