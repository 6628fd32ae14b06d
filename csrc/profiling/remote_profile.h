#pragma once

// torch's legacy profiler over several workers: what a callee records while it serves a request, for the caller whose
// profile it becomes part of, and for those who profile all that this process serves.
// Threads: a Recording begins and leaves on the thread that serves the request; the rest may come from any.

#include <torch/csrc/autograd/profiler_legacy.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torchrpc {

using torch::autograd::profiler::LegacyEvent;
using torch::autograd::profiler::thread_event_lists;
using torch::profiler::impl::ProfilerConfig;

/// What is recorded on one thread from the constructor to leave(), and on others by what was called in between.
class Recording {
 public:
  explicit Recording(const ProfilerConfig& config);
  /// On the same thread.
  void leave();
  /// What there is so far, and takes it out.
  thread_event_lists take() const;

 private:
  const at::RecordFunctionTLS callbacks_;  ///< of the thread, before
  std::shared_ptr<c10::ThreadLocalDebugInfo> profile_;
};

/// As bytes; a remote profile has the CPU's times only.
std::string encodeConfig(const ProfilerConfig& config);
ProfilerConfig decodeConfig(std::string_view bytes);
std::string encodeEvents(const thread_event_lists& events);
/// Adds the events in `bytes` to the legacy profile `to`, each name behind that of the call and a mark. Throws
/// Error(kProtocol).
void addRemoteEvents(
    const std::shared_ptr<c10::ThreadLocalDebugInfo>& to, const std::string& call, std::string_view bytes);

// --- profiles of all that the process serves ---

/// One of them; they nest, and the inner one's requests belong to the outer ones, too.
class ServerProfile {
 public:
  /// Begins one inside that which is on.
  static void enable(const ProfilerConfig& config);
  /// Ends the innermost and gives what was recorded, request by request. Throws Error(kInvalidArgument) if none is on.
  static std::vector<thread_event_lists> disable();
  /// The innermost; null if none is on.
  static std::shared_ptr<ServerProfile> current();

  ServerProfile(ProfilerConfig config, std::shared_ptr<ServerProfile> outer);
  const ProfilerConfig& config() const { return config_; }
  void add(const thread_event_lists& events);

 private:
  struct State;
  static State& state();

  const ProfilerConfig config_;
  const std::shared_ptr<ServerProfile> outer_;
  std::vector<thread_event_lists> requests_;  // guarded by state().mutex
};

}  // namespace torchrpc
