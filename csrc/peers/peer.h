#pragma once

// What is known of a peer: what its connection has established, and the record that it publishes.

#include <cstdint>
#include <string>
#include <string_view>

#include "base/ids.h"

namespace torchrpc {

struct WorkerRecord;

/// A peer as its link has established it: the id is that in HELLO, the name the one that the handshake has proved, if
/// it proves names. Checks compare what a message says with it.
struct Peer : WorkerInfo {
  uint64_t incarnation = 0;  ///< see PeerId
  bool is_member = true;     ///< false: the handshake has proved that the peer is a client

  PeerId peerId() const { return {id, incarnation}; }
  /// Throws Error(kNotAllowed) unless the record is that of this peer. `self` has received it.
  void requireOwn(const WorkerRecord& record, const std::string& self) const;
};

/// The record that a worker publishes when it starts.
struct WorkerRecord {
  WorkerInfo info;
  std::string address;       ///< of its transport; empty: not known yet
  int32_t world_size = 0;    ///< 0: the group grows as workers join
  uint64_t incarnation = 0;  ///< see PeerId
  std::string metadata;      ///< for all members of the group; opaque to the core
  std::string devices;       ///< its devices, see device/group_devices.h; empty: it has none
  /// As the worker itself claims. Its permissions depend on what it has proved (Peer::is_member).
  bool is_member = true;

  PeerId peerId() const { return {info.id, incarnation}; }
  Peer peer() const { return {info, incarnation, is_member}; }
  /// Whether this is the record of that worker and of that start of it.
  bool isOf(const Peer& peer) const { return info == peer && incarnation == peer.incarnation; }

  friend bool operator==(const WorkerRecord&, const WorkerRecord&) = default;
};

std::string encodeRecord(const WorkerRecord& record);
/// Throws Error(kProtocol), also for a record of more than 4 MiB.
WorkerRecord decodeRecord(std::string_view bytes);

/// The name, in texts, of a worker that is not in the directory: "worker 7".
std::string nameOfUnknown(WorkerId id);

}  // namespace torchrpc
