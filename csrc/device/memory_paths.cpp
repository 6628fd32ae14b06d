#include "device/memory_paths.h"

#include <ATen/ops/empty.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include "base/exception.h"
#include "base/log.h"
#include "base/random.h"
#include "device/device_map.h"
#include "device/device_memory.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

constexpr size_t kNonceBytes = 16;
constexpr Duration kProbeTimeout = std::chrono::seconds(30);

/// A token that identifies this process.
const std::string& processToken() {
  static const auto* const token = new std::string(secureRandomBytes(kNonceBytes));
  return *token;
}

bool isSharingEnabled() {
  const char* const text = std::getenv("TORCHRPC_SHARE_DEVICE_MEMORY");
  return !text || std::string_view(text) != "0";
}

/// The payload of MEMORY_PROBE: can the receiver read `nonce` from memory of the sender's device?
struct Probe {
  std::string process;
  c10::Device device{c10::kCPU};
  std::string device_id;
  std::string handle;  ///< empty: the memory cannot be mapped; the probe only finds out whether both are in one process
  uint64_t offset = 0;
  std::string reason;  ///< for the lack of a handle

  std::string encode() const {
    std::string payload;
    Writer out(payload);
    out.putShort(process);
    putDevice(out, device);
    out.putShort(device_id);
    out.putShort(handle);
    out.put(offset);
    return payload;
  }
  static Probe decode(std::string_view payload) {
    Reader in(payload);
    Probe probe;
    probe.process = in.getShort();
    probe.device = getDevice(in);
    probe.device_id = in.getShort();
    probe.handle = in.getShort();
    probe.offset = in.get<uint64_t>();
    in.expectEnd();
    return probe;
  }
};

std::string encodeAnswer(MemoryPath path, std::string_view text) {
  std::string payload;
  Writer out(payload);
  out.put(path);
  out.putShort(text.substr(0, 1000));
  return payload;
}

at::Tensor bytesTensor(const std::string& text, const c10::Device& device) {
  auto bytes = at::empty({static_cast<int64_t>(text.size())}, at::TensorOptions(at::kByte));
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes.to(device);
}

std::string textOfBytes(const at::Tensor& bytes) {
  const auto host = bytes.cpu();
  return {static_cast<const char*>(host.const_data_ptr()), static_cast<size_t>(host.numel())};
}

std::string readNonce(const Probe& probe) {
  const auto* const memory = DeviceMemory::of(probe.device.type());
  if (!memory) throw Error(ErrorCode::kInvalidArgument, "it has no plug-in for devices like " + probe.device.str());
  const auto storage = memory->borrow(probe.device_id, probe.handle, probe.offset, kNonceBytes);
  auto bytes = at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()));
  bytes.set_(storage, 0, {static_cast<int64_t>(kNonceBytes)}, {1});
  return textOfBytes(bytes);
}

}  // namespace

std::string toString(MemoryPath path) {
  switch (path) {
    case MemoryPath::kHost: return "through host memory";
    case MemoryPath::kShared: return "in shared memory of the device";
    case MemoryPath::kSameProcess: return "within the process";
  }
  return "unknown";
}

MemoryPaths::MemoryPaths(Messenger& messenger, bool shares_memory)
    : messenger_(messenger), shares_memory_(shares_memory && isSharingEnabled()) {}

MemoryPath MemoryPaths::to(WorkerId worker, const c10::Device& device) {
  if (worker == messenger_.self().id) return MemoryPath::kSameProcess;
  const auto peer = messenger_.peerId(worker);
  {
    MutexLock lock(mutex_);
    const auto [it, is_new] = known_.try_emplace({worker, device.str()});
    if (!is_new && it->second.peer == peer) return it->second.path;
    it->second = {.peer = peer};
  }
  if (shares_memory_) {
    messenger_.post([this, worker, device] { probe(worker, device); });
  } else {
    set(worker, device, MemoryPath::kHost, messenger_.self().name + " does not share memory of devices");
  }
  return MemoryPath::kHost;
}

void MemoryPaths::probe(WorkerId worker, const c10::Device& device) {
  const auto nonce = secureRandomBytes(kNonceBytes);
  Probe probe{.process = processToken(), .device = device};
  at::Tensor tensor;
  try {
    const auto* const memory = DeviceMemory::of(device.type());
    if (!memory) throw Error(ErrorCode::kInvalidArgument, "there is no plug-in for devices of this type");
    tensor = bytesTensor(nonce, device);
    auto exported = memory->exportMemory(device, tensor.const_data_ptr());
    probe.device_id = memory->deviceId(device);
    probe.handle = std::move(exported.handle);
    probe.offset = exported.offset;
  } catch (...) {
    probe.reason = errorFromException(std::current_exception(), ErrorCode::kUnknown).text();
  }
  Message message{.kind = Kind::kMemoryProbe, .payload = probe.encode()};
  messenger_.request(
      worker, std::move(message), kProbeTimeout,
      [this, worker, device, nonce, tensor, reason = probe.reason](const Result<Message>& reply) {
        if (!reply) return set(worker, device, MemoryPath::kHost, reply.error().text());
        try {
          Reader in(reply.value().payload);
          const auto path = in.get<MemoryPath>();
          if (path > MemoryPath::kSameProcess)
            throw Error(ErrorCode::kProtocol, "malformed message: an unknown memory path");
          const std::string text(in.getShort());
          in.expectEnd();
          const bool is_true = path == MemoryPath::kSameProcess ? text == processToken() : text == nonce;
          if (path != MemoryPath::kHost && is_true) return set(worker, device, path, "");
          set(worker, device, MemoryPath::kHost,
              !reason.empty() ? reason : (path == MemoryPath::kHost ? text : "it read something else there"));
        } catch (const Error& error) {
          set(worker, device, MemoryPath::kHost, error.text());
        }
      });
}

void MemoryPaths::serve(const Request& request, const Responder& responder, bool uses_devices) const {
  const auto answer = [&](MemoryPath path, std::string_view text) {
    responder.reply({.kind = Kind::kReply, .payload = encodeAnswer(path, text)});
  };
  const auto probe = Probe::decode(request.message.payload);
  if (!uses_devices) return answer(MemoryPath::kHost, "it uses no devices");
  if (probe.process == processToken()) return answer(MemoryPath::kSameProcess, processToken());
  if (!shares_memory_) return answer(MemoryPath::kHost, "it does not share memory of devices");
  if (probe.handle.empty()) return answer(MemoryPath::kHost, "the memory has no handle");
  try {
    answer(MemoryPath::kShared, readNonce(probe));
  } catch (...) {
    answer(MemoryPath::kHost, errorFromException(std::current_exception(), ErrorCode::kUnknown).text());
  }
}

void MemoryPaths::set(WorkerId worker, const c10::Device& device, MemoryPath path, const std::string& reason) {
  {
    MutexLock lock(mutex_);
    const auto known = known_.find({worker, device.str()});
    if (known == known_.end()) return;  // the worker has been lost
    known->second.path = path;
    known->second.reason = reason;
  }
  log(LogLevel::kInfo,
      "tensors of " + device.str() + " go to " + messenger_.worker(worker).name + " " + toString(path) +
          (reason.empty() ? "" : ": " + reason));
}

void MemoryPaths::forget(WorkerId worker) {
  MutexLock lock(mutex_);
  std::erase_if(known_, [&](const auto& each) { return each.first.first == worker; });
}

std::map<std::string, std::string> MemoryPaths::describe() const {
  std::map<Key, Known> known;
  {
    MutexLock lock(mutex_);
    known = known_;
  }
  std::map<std::string, std::string> texts;
  for (const auto& [key, value] : known) {
    texts[messenger_.worker(key.first).name + " " + key.second] =
        toString(value.path) + (value.reason.empty() ? "" : ": " + value.reason);
  }
  return texts;
}

}  // namespace torchrpc
