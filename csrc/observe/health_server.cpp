#include "observe/health_server.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fcntl.h>
#include <map>
#include <poll.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/exception.h"
#include "base/executor/start_thread.h"
#include "base/os/sockets.h"
#include "base/timer.h"

namespace torchrpc {

namespace {

constexpr size_t kMaxConnections = 64;  // a further one closes an older one
constexpr size_t kMaxRequestBytes = 4096;
constexpr Duration kConnectionTime = std::chrono::seconds(1);
constexpr int kPauseMilliseconds = 100;

native::SocketAddress parse(const std::string& text) {
  const auto full = text.find(':') == std::string::npos ? "0.0.0.0:" + text : text;
  if (const auto address = native::SocketAddress::tcp(full)) return *address;
  throwInvalidArgument("the address for probes must be a port or host:port with a numeric host, but is '" + text + "'");
}

std::string response(std::string_view status, const std::string& body) {
  return "HTTP/1.1 " + std::string(status) +
      "\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: " + std::to_string(body.size() + 1) +
      "\r\nConnection: close\r\n\r\n" + body + "\n";
}

}  // namespace

struct HealthServer::Connection {
  native::Descriptor socket;
  std::string peer;  ///< its address, without the port
  TimePoint deadline;
  std::string request{};
  bool is_done = false;
};

HealthServer::HealthServer(const std::string& address, Check check)
    : check_(std::move(check)),
      listener_(parse(address).listen("the address for probes, " + address)),
      address_(native::SocketAddress::textOf(listener_.get())) {
  int ends[2] = {-1, -1};
  if (::pipe(ends) != 0) throw Error(ErrorCode::kRendezvous, "no descriptors are left for the address for probes");
  stop_reader_ = native::Descriptor(ends[0]);
  stop_writer_ = native::Descriptor(ends[1]);
  for (const int end : ends) ::fcntl(end, F_SETFD, FD_CLOEXEC);
  thread_ = startThread("that answers probes", [this] { run(); });
}

HealthServer::~HealthServer() {
  stop_writer_ = native::Descriptor();
  thread_.join();
}

void HealthServer::run() const {
  std::vector<Connection> connections;
  for (;;) {
    std::vector<pollfd> waits{{stop_reader_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const auto& connection : connections) waits.push_back({connection.socket.get(), POLLIN, 0});
    auto pause = -1;
    for (const auto& connection : connections) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(timeUntil(connection.deadline)).count();
      pause = static_cast<int>(pause < 0 ? left : std::min<int64_t>(pause, left));
    }
    ::poll(waits.data(), waits.size(), pause);
    if (waits.front().revents != 0) return;
    for (size_t i = 0; i < connections.size(); ++i) {
      auto& connection = connections[i];
      if (waits[i + 2].revents != 0) serve(connection);
      if (TimePoint::clock::now() >= connection.deadline) connection.is_done = true;
    }
    std::erase_if(connections, [](const Connection& connection) { return connection.is_done; });
    if (waits[1].revents != 0 && !acceptSome(connections)) {
      ::poll(waits.data(), 1, kPauseMilliseconds);  // no descriptor is left; only the stop ends this pause early
    }
  }
}

// A probe sends its request at once, and mostly is answered as soon as it is accepted. So connections that send nothing
// do not hold it up, however many there are, if none waits in the backlog of the listener.
bool HealthServer::acceptSome(std::vector<Connection>& connections) const {
  for (size_t i = 0; i < kMaxConnections; ++i) {
    native::Descriptor socket(os::acceptSocket(listener_.get()));
    if (!socket) {
      const bool is_full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (!is_full) return true;
      if (connections.empty()) return false;
      dropOne(connections);
      continue;
    }
    auto peer = native::SocketAddress::hostOfPeer(socket.get());
    connections.push_back({std::move(socket), std::move(peer), deadlineAfter(kConnectionTime)});
    serve(connections.back());
    if (connections.back().is_done) {
      connections.pop_back();
      return true;  // the check may have taken long
    }
    if (connections.size() > kMaxConnections) {
      dropOne(connections);
    }
  }
  return true;
}

void HealthServer::dropOne(std::vector<Connection>& connections) {
  std::map<std::string, size_t> counts;
  for (const auto& connection : connections) ++counts[connection.peer];
  const auto most = std::ranges::max_element(counts, {}, [](const auto& each) { return each.second; });
  connections.erase(std::ranges::find(connections, most->first, &Connection::peer));
}

void HealthServer::serve(Connection& connection) const {
  char bytes[1024];
  const auto got = ::recv(connection.socket.get(), bytes, sizeof(bytes), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    connection.is_done = true;
    return;
  }
  connection.request.append(bytes, static_cast<size_t>(got));
  const bool is_whole = connection.request.find("\r\n\r\n") != std::string::npos;
  if (!is_whole && connection.request.size() <= kMaxRequestBytes) return;
  const auto answer = answerTo(connection.request);
  // The answer is short, so it fits into the empty send buffer of the socket.
  static_cast<void>(::send(connection.socket.get(), answer.data(), answer.size(), os::kSendFlags));
  ::shutdown(connection.socket.get(), SHUT_WR);
  connection.is_done = true;
}

std::string HealthServer::answerTo(std::string_view request) const {
  const auto line = request.substr(0, request.find("\r\n"));
  if (!line.starts_with("GET ")) return response("405 Method Not Allowed", "only GET is answered");
  const auto path = line.substr(4, line.find_first_of(" ?", 4) - 4);
  if (path != "/" && path != "/healthz") return response("404 Not Found", "ask for /healthz");
  std::string reason;
  runOrFail([&] { reason = check_(); }, [&](const Error& error) { reason = error.text(); }, ErrorCode::kUserException);
  if (reason.empty()) return response("200 OK", "serving");
  return response("503 Service Unavailable", "not serving: " + reason);
}

}  // namespace torchrpc
