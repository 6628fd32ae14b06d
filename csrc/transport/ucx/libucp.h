#pragma once

// Loads UCX (libucp and libucs) at run time, if the machine has it. The build needs only UCX's headers, which no file
// outside of this folder includes.

#include <string>
#include <ucp/api/ucp.h>
#include <ucs/async/async_fwd.h>

namespace torchrpc::ucx {

/// The functions of libucp and libucs that this folder uses, under their own names; their ABI is stable. Threads: only
/// the loop thread of a worker passes objects of that worker to them, or another thread while the loop thread does
/// not run. ucp_worker_signal is the exception.
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

  /// Returns the functions; the first call loads the libraries. Throws Error(kInvalidArgument) with what is missing and
  /// how to install it.
  static const Libucp& get();
  /// Returns the text of that error; empty if nothing is missing.
  static const std::string& lacks();
};

/// The oldest version of UCX that works; the interface of every later 1.x is a superset. While peers connect, 1.13 and
/// 1.16 sometimes crash, and 1.14 and 1.15 fail to send messages.
constexpr unsigned kUcxMajor = 1, kUcxMinor = 17;

}  // namespace torchrpc::ucx
