#pragma once

// UCX, where the machine has it: libucp and libucs are looked for at run time. To build, only UCX's headers are needed,
// and no file outside of this folder includes them.

#include <string>
#include <ucp/api/ucp.h>
#include <ucs/async/async_fwd.h>

namespace torchrpc::ucx {

/// The functions of libucp and libucs that are used, under their own names; their ABI is stable. Threads: those that
/// take an object are called by the loop thread of its worker only, or after its end, except ucp_worker_signal.
struct Libucp {
  // Of libucp.
  decltype(&::ucp_am_data_release) ucp_am_data_release;
  decltype(&::ucp_am_recv_data_nbx) ucp_am_recv_data_nbx;
  decltype(&::ucp_am_send_nbx) ucp_am_send_nbx;
  decltype(&::ucp_cleanup) ucp_cleanup;
  decltype(&::ucp_config_modify) ucp_config_modify;
  decltype(&::ucp_config_read) ucp_config_read;
  decltype(&::ucp_config_release) ucp_config_release;
  decltype(&::ucp_conn_request_query) ucp_conn_request_query;
  decltype(&::ucp_ep_close_nbx) ucp_ep_close_nbx;
  decltype(&::ucp_ep_create) ucp_ep_create;
  decltype(&::ucp_get_version) ucp_get_version;
  decltype(&::ucp_get_version_string) ucp_get_version_string;
  decltype(&::ucp_init_version) ucp_init_version;
  decltype(&::ucp_listener_create) ucp_listener_create;
  decltype(&::ucp_listener_destroy) ucp_listener_destroy;
  decltype(&::ucp_listener_query) ucp_listener_query;
  decltype(&::ucp_request_free) ucp_request_free;
  decltype(&::ucp_worker_arm) ucp_worker_arm;
  decltype(&::ucp_worker_create) ucp_worker_create;
  decltype(&::ucp_worker_destroy) ucp_worker_destroy;
  decltype(&::ucp_worker_get_efd) ucp_worker_get_efd;
  decltype(&::ucp_worker_progress) ucp_worker_progress;
  decltype(&::ucp_worker_set_am_recv_handler) ucp_worker_set_am_recv_handler;
  decltype(&::ucp_worker_signal) ucp_worker_signal;
  // Of libucs.
  decltype(&::ucs_async_add_timer) ucs_async_add_timer;
  decltype(&::ucs_async_remove_handler) ucs_async_remove_handler;
  decltype(&::ucs_status_string) ucs_status_string;

  /// This machine's, loaded by the first call. Throws Error(kInvalidArgument), which says what is missing and how to
  /// install it.
  static const Libucp& get();
  /// The text of that error; empty if nothing is missing.
  static const std::string& lacks();
};

/// The oldest UCX that works, of whose interface every later 1.x has a superset. While peers connect, 1.13 and 1.16
/// crash now and then, and 1.14 and 1.15 fail to send messages.
constexpr unsigned kUcxMajor = 1, kUcxMinor = 17;

}  // namespace torchrpc::ucx
