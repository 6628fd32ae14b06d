#include "profiling/remote_profile.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cmath>

#include "wire/codec.h"

namespace torchrpc {

using torch::autograd::profiler::EventKind;
using torch::autograd::profiler::ProfilerDisableOptions;
using torch::profiler::impl::ProfilerState;

namespace {
/// Separates the name of a call from the name of a range that its callee recorded.
constexpr auto kRemoteMark = "#remote_op: ";
}  // namespace

// --- Recording ---

Recording::Recording(const ProfilerConfig& config) : callbacks_(at::get_record_function_tls_()) {
  torch::autograd::profiler::enableProfilerLegacy(config);
  profile_ = c10::ThreadLocalDebugInfo::current();
}

void Recording::detachThread() {
  torch::autograd::profiler::disableProfilerLegacy(
      ProfilerDisableOptions(/*shouldCleanupTLSState=*/true, /*shouldConsolidate=*/false));
  at::set_record_function_tls_(callbacks_);  // disableProfilerLegacy() does not restore them
}

thread_event_lists Recording::take() const {
  const c10::DebugInfoGuard guard(profile_);
  return torch::autograd::profiler::disableProfilerLegacy(
      ProfilerDisableOptions(/*shouldCleanupTLSState=*/false, /*shouldConsolidate=*/true));
}

// --- bytes ---

std::string encodeConfig(const ProfilerConfig& config) {
  std::string out;
  Writer writer(out);
  for (const bool wanted :
       {config.report_input_shapes, config.profile_memory, config.with_stack, config.with_flops, config.with_modules}) {
    writer.put(wanted);
  }
  return out;
}

ProfilerConfig decodeConfig(std::string_view bytes) {
  Reader reader(bytes);
  bool wanted[5];
  for (auto& flag : wanted) flag = reader.get<uint8_t>() != 0;
  return ProfilerConfig(ProfilerState::CPU, wanted[0], wanted[1], wanted[2], wanted[3], wanted[4]);
}

namespace {

void write(const LegacyEvent& event, Writer& out) {
  out.put(event.kind());
  out.putString(event.name());
  out.put(event.threadId());
  out.put(event.handle());
  out.put(event.nodeId());
  out.put<int64_t>(std::llround(event.cpuUs() * 1000));
  out.put(event.cpuMemoryUsage());
  out.put(event.cudaMemoryUsage());
  out.put(event.sequenceNr());
  out.put(event.fwdThreadId());
  out.put(event.scope());
  const auto shapes = event.shapes();
  out.put(static_cast<uint32_t>(shapes.size()));
  for (const auto& shape : shapes) {
    out.put(static_cast<uint32_t>(shape.size()));
    for (const auto size : shape) out.put(size);
  }
  out.put(static_cast<uint32_t>(event.stack().size()));
  for (const auto& line : event.stack()) out.putString(line);
}

LegacyEvent read(Reader& in, const std::string& prefix) {
  const auto kind = in.get<EventKind>();
  if (kind > EventKind::MemoryAlloc)
    throw Error(ErrorCode::kProtocol, "malformed message: unknown kind of event in a profile");
  const auto name = prefix + std::string(in.getString());
  const auto thread = in.get<uint64_t>();
  const auto handle = in.get<at::RecordFunctionHandle>();
  const auto node = in.get<int64_t>();
  const auto nanoseconds = in.get<int64_t>();
  const auto cpu_memory = in.get<int64_t>();
  const auto cuda_memory = in.get<int64_t>();
  const auto sequence = in.get<int64_t>();
  const auto forward_thread = in.get<uint64_t>();
  const auto scope = in.get<uint8_t>();
  if (nanoseconds <= 0) throw Error(ErrorCode::kProtocol, "malformed message: an event without a time in a profile");
  std::vector<std::vector<int64_t>> shapes;
  for (auto count = in.get<uint32_t>(); count > 0; --count) {
    auto& shape = shapes.emplace_back();
    for (auto sizes = in.get<uint32_t>(); sizes > 0; --sizes) shape.push_back(in.get<int64_t>());
  }
  std::vector<std::string> stack;
  for (auto lines = in.get<uint32_t>(); lines > 0; --lines) stack.emplace_back(in.getString());
  LegacyEvent event(
      kind, at::StringView(name), static_cast<uint16_t>(thread), handle, std::move(shapes), node, /*is_remote=*/true,
      cpu_memory, nanoseconds, /*cuda_recorded=*/false, cuda_memory);
  event.setSequenceNr(sequence);
  event.setFwdThreadId(forward_thread);
  event.setScope(scope);
  event.setStack(stack);
  return event;
}

}  // namespace

std::string encodeEvents(const thread_event_lists& events) {
  std::string out;
  Writer writer(out);
  for (const auto& thread : events) {
    for (const auto& event : thread) {
      if (event.kind() != EventKind::Mark) write(event, writer);
    }
  }
  return out;
}

void addRemoteEvents(
    const std::shared_ptr<c10::ThreadLocalDebugInfo>& to, const std::string& call, std::string_view bytes) {
  std::vector<LegacyEvent> events;
  Reader reader(bytes);
  while (reader.remaining() > 0) events.push_back(read(reader, call + kRemoteMark));
  const c10::DebugInfoGuard guard(to);
  torch::autograd::profiler::addEventList(std::move(events));
}

// --- ServerProfile ---

// Never destroyed: threads may serve requests while the process exits.
ServerProfile::State& ServerProfile::state_ = *new State();

ServerProfile::ServerProfile(ProfilerConfig config, std::shared_ptr<ServerProfile> outer)
    : config_(std::move(config)), outer_(std::move(outer)) {}

void ServerProfile::enable(const ProfilerConfig& config) {
  MutexLock lock(state_.mutex);
  state_.innermost = std::make_shared<ServerProfile>(config, state_.innermost);
  state_.any = true;
}

std::vector<thread_event_lists> ServerProfile::disable() {
  std::shared_ptr<ServerProfile> ended;
  MutexLock lock(state_.mutex);
  ended = state_.innermost;
  if (!ended) throw Error(ErrorCode::kInvalidArgument, "no profile of the requests of this process is being recorded");
  state_.innermost = ended->outer_;
  state_.any = state_.innermost != nullptr;
  return std::exchange(ended->requests_, {});
}

std::shared_ptr<ServerProfile> ServerProfile::current() {
  if (!state_.any.load(std::memory_order_relaxed)) return nullptr;
  MutexLock lock(state_.mutex);
  return state_.innermost;
}

void ServerProfile::add(const thread_event_lists& events) {
  MutexLock lock(state_.mutex);
  for (auto* profile = this; profile; profile = profile->outer_.get()) profile->requests_.push_back(events);
}

}  // namespace torchrpc
