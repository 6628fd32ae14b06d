#include "group/store_wait.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "base/doctor.h"
#include "base/log.h"
#include "base/os/sockets.h"
#include "base/sync/interrupt.h"

namespace torchrpc {

namespace {

using std::chrono::milliseconds;

constexpr Duration kShortestRetryPause = milliseconds(10);
constexpr Duration kLongestRetryPause = milliseconds(250);
constexpr Duration kLongestDial = std::chrono::seconds(3);  // after that the name is resolved again
// The least time that a store which has accepted a connection has to answer, even if the time-out has passed.
constexpr Duration kLeastAnswerTime = milliseconds(500);
constexpr Duration kWarnWaitingAfter = std::chrono::seconds(10);

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Resolves the name. If it has no address, returns null and sets `why`.
AddressList addressesOf(const std::string& host, uint16_t port, std::string& why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (rc != 0) why = "'" + host + "' cannot be resolved (" + gai_strerror(rc) + ")";
  return {rc == 0 ? list : nullptr, &freeaddrinfo};
}

struct OpenSocket {
  const int fd;
  explicit OpenSocket(int family) : fd(os::openSocket(family, SOCK_STREAM, os::Blocking::kNo)) {}
  ~OpenSocket() {
    if (fd >= 0) ::close(fd);
  }
  OpenSocket(const OpenSocket&) = delete;
  OpenSocket& operator=(const OpenSocket&) = delete;
};

/// Waits for one of the events of poll(). Returns false if the deadline has passed.
bool waitFor(int fd, short events, TimePoint deadline) {
  for (;;) {
    checkInterrupt();
    const auto left = std::min<Duration>(timeUntil(deadline), kSignalCheckInterval);
    pollfd awaited{.fd = fd, .events = events, .revents = 0};
    const auto left_ms = std::chrono::ceil<milliseconds>(left).count();
    if (::poll(&awaited, 1, static_cast<int>(left_ms)) > 0) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
}

/// Waits for a connect() that is in progress, and returns its error; 0: it is connected.
int connectError(int fd, TimePoint deadline) {
  if (!waitFor(fd, POLLOUT, deadline)) return ETIMEDOUT;
  int error = 0;
  socklen_t length = sizeof(error);
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

// The numbers of the protocol of c10d's TCPStore that the greeting needs. Only an internal header of torch names them,
// and torch 2.14 has moved it to another folder. They are the same in torch 2.11 to 2.15.
constexpr uint8_t kValidateQuery = 0;
constexpr uint32_t kValidationMagicNumber = 0x3C85F7CE;
constexpr uint8_t kPingQuery = 13;
constexpr uint32_t kNonce = 0x70726374;

/// The first bytes that a client of c10d's store sends: that it is one, and a question (PING) whose answer is the
/// nonce.
std::string greeting() {
  std::string bytes;
  const auto put = [&bytes](const auto& value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  put(kValidateQuery);
  put(kValidationMagicNumber);
  put(kPingQuery);
  put(kNonce);
  return bytes;
}

/// Whether a store answers on the connection. A process that was stopped (SIGSTOP) accepts connections but never
/// answers, and c10d's client would wait for it for ever.
bool answers(int fd, TimePoint deadline) {
  const auto question = greeting();
  if (::send(fd, question.data(), question.size(), os::kSendFlags) != static_cast<ssize_t>(question.size()))
    return false;
  std::string answer(sizeof(kNonce), '\0');
  for (size_t received = 0; received < answer.size();) {
    if (!waitFor(fd, POLLIN, deadline)) return false;
    const auto n = ::recv(fd, answer.data() + received, answer.size() - received, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (n > 0) received += static_cast<size_t>(n);
  }
  return std::memcmp(answer.data(), &kNonce, sizeof(kNonce)) == 0;
}

/// Returns why no store answers at the address; empty if one does.
std::string dial(const addrinfo& address, Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  const OpenSocket socket(address.ai_family);
  if (socket.fd < 0) return std::strerror(errno);
  int error = ::connect(socket.fd, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) error = connectError(socket.fd, deadline);
  if (error != 0) return std::strerror(error);
  return answers(socket.fd, std::max(deadline, deadlineAfter(kLeastAnswerTime)))
      ? ""
      : "who listens there does not answer as a store of c10d does";
}

/// Repeats `attempt`, which returns why it has failed, until it returns "".
template <typename Attempt>
std::string repeat(const std::string& purpose, Duration timeout, bool warns, const Attempt& attempt) {
  const auto start = std::chrono::steady_clock::now();
  const auto deadline = deadlineAfter(timeout, start);
  bool has_warned = !warns;
  for (Duration pause = kShortestRetryPause;; pause = std::min(2 * pause, kLongestRetryPause)) {
    auto why = attempt(std::min<Duration>(timeUntil(deadline), kLongestDial));
    if (why.empty()) return "";
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return why;
    if (!has_warned && now - start >= kWarnWaitingAfter) {
      has_warned = true;
      log(LogLevel::kWarning, "has waited 10 s " + purpose + ": " + why + ". It goes on. " + kAskDoctor);
    }
    checkInterrupt();
    std::this_thread::sleep_for(std::min<Duration>(pause, timeUntil(deadline)));
  }
}

}  // namespace

std::string waitForName(const std::string& host, Duration timeout, bool warns) {
  return repeat("for the name of the host where the group meets", timeout, warns, [&](Duration) {
    std::string why;
    addressesOf(host, 0, why);
    return why;
  });
}

std::string waitForStore(const std::string& host, uint16_t port, Duration timeout, bool warns) {
  const auto where = host + ":" + std::to_string(port);
  return repeat("for a store to answer at " + where, timeout, warns, [&](Duration limit) {
    std::string why;
    const auto addresses = addressesOf(host, port, why);
    for (const auto* each = addresses.get(); each; each = each->ai_next) {
      why = dial(*each, limit);
      if (why.empty()) break;
    }
    return why;
  });
}

}  // namespace torchrpc
