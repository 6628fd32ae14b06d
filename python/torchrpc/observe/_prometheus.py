"""Serves the counters of this worker to Prometheus, with the package prometheus_client, which is loaded on use.

The HTTP server has threads of its own. A scrape reads the counters and makes no call.
"""

import collections
import contextlib
import http.server
import logging
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from torchrpc._C import TensorPipeAgent, _get_current_rpc_agent, _is_current_rpc_agent_set
from torchrpc.rpc._errors import ShutdownError
from torchrpc.rpc.api import _get_debug_info

from ._metrics import FunctionMetrics, enable_metrics, functions

logger = logging.getLogger(__name__)

# Ends of the buckets of torchrpc_call_latency_seconds: powers of two in nanoseconds, which are ends of the core's
# buckets, from 8 µs to 34 s.
BUCKET_ENDS = [2**power * 1e-9 for power in range(13, 36)]

# key of _get_debug_info() -> name and help of the metric.
GAUGES = {
    "agent.num_pending_calls": ("pending_calls", "Calls of this worker without a reply so far."),
    "agent.num_connections": ("connections", "Connections to other workers."),
    "agent.thread_pool_size": ("pool_size", "Functions that can run at once (num_worker_threads)."),
    "agent.num_threads": ("pool_threads", "Threads of the pool."),
    "agent.num_idle_threads": ("pool_idle_threads", "Idle threads of the pool."),
    "agent.num_blocked_threads": ("pool_blocked_threads", "Threads of the pool that wait for calls of their own."),
    "agent.num_lacking_threads": ("pool_lacking_threads", "Threads that tasks wait for and that cannot be started."),
    "agent.num_queued_tasks": ("queued_tasks", "Tasks that no thread has started."),
    "agent.num_held_calls": ("held_calls", "Calls not sent yet because too many bytes wait on the callee."),
    "agent.num_deferred_calls": ("deferred_calls", "Calls not started because their callers do not read results."),
    "agent.queued_reply_bytes": ("queued_reply_bytes", "Bytes of results that wait to be sent."),
    "agent.kept_reply_bytes": ("kept_reply_bytes", "Bytes of results kept for calls with a key."),
    "rref.owned": ("owned_rrefs", "Values that this worker owns for RRefs."),
    "rref.forks": ("rref_forks", "RRefs of other workers to values that this worker owns."),
    "num_autograd_contexts": ("autograd_contexts", "Open contexts of distributed autograd."),
}
COUNTERS = {
    "agent.late_replies": ("late_replies", "Replies that arrived after the time-out."),
    "agent.foreign_replies": ("foreign_replies", "Replies of workers to which the call was not sent."),
    "agent.malformed_frames": ("malformed_frames", "Frames that could not be decoded."),
    "agent.retries": ("retries", "Calls that this worker has sent again."),
    "agent.repeated_calls": ("repeated_calls", "Calls of others that arrived again and were not run again."),
    "agent.refused_by_quota": ("refused_by_quota", "Requests that were refused because of quotas."),
    "agent.dropped_audit_events": ("dropped_audit_events", "Events that the audit log has lost."),
}


def _client() -> Any:
    try:
        import prometheus_client.core
        import prometheus_client.utils
    except ImportError as exc:
        raise ModuleNotFoundError(
            "Serving metrics needs the package prometheus_client: pip install 'torchrpc[prometheus]'."
        ) from exc
    return prometheus_client


def _cumulative(row: FunctionMetrics) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus expects them: (end, number of calls that took at most that long)."""
    client = _client()
    found, below, rest = [], 0, list(row.buckets)
    for end in BUCKET_ENDS:
        while rest and rest[0][0] <= end * (1 + 1e-9):
            below += rest.pop(0)[1]
        found.append((client.utils.floatToGoString(end), float(below)))
    found.append(("+Inf", float(below + sum(count for _, count in rest))))
    return found


class _Collector:
    """The collector that prometheus_client calls at each scrape."""

    def describe(self) -> Iterable[Any]:
        return []  # the names are not checked in advance

    def collect(self) -> Iterator[Any]:
        if not _is_current_rpc_agent_set() or not isinstance(agent := _get_current_rpc_agent(), TensorPipeAgent):
            return
        try:
            me = agent.get_worker_info().name
            info, rows = _get_debug_info(), functions()
            workers, living = len(agent.get_worker_infos()), len(agent._living_workers())
        except ShutdownError:
            return
        yield from self._of_worker(me, info, workers, living)
        yield from self._of_functions(me, rows)

    @staticmethod
    def _of_worker(me: str, info: dict[str, str], workers: int, living: int) -> Iterator[Any]:
        core = _client().core
        numbers = [
            ("workers", "Workers of the group, lost ones included.", workers),
            ("lost_workers", "Workers of the group that were lost or have left.", workers - living),
            *((name, text, float(info[key])) for key, (name, text) in GAUGES.items() if key in info),
        ]
        for name, text, number in numbers:
            family = core.GaugeMetricFamily(f"torchrpc_{name}", text, labels=["worker"])
            family.add_metric([me], number)
            yield family
        for key, (name, text) in COUNTERS.items():
            if key in info:
                family = core.CounterMetricFamily(f"torchrpc_{name}", text, labels=["worker"])
                family.add_metric([me], float(info[key]))
                yield family

    @staticmethod
    def _of_functions(me: str, rows: list[FunctionMetrics]) -> Iterator[Any]:
        core = _client().core
        labels = ["worker", "function", "peer", "side"]
        counter, gauge, histogram = core.CounterMetricFamily, core.GaugeMetricFamily, core.HistogramMetricFamily
        calls = counter("torchrpc_calls", "Calls that have ended.", labels=labels)
        errors = counter("torchrpc_call_errors", "Calls that have ended with an error.", labels=[*labels, "code"])
        requests = counter("torchrpc_request_bytes", "Bytes of the requests of calls.", labels=labels)
        replies = counter("torchrpc_reply_bytes", "Bytes of the replies to calls.", labels=labels)
        in_flight = gauge("torchrpc_calls_in_flight", "Calls that have begun and not ended.", labels=labels)
        latency = histogram("torchrpc_call_latency_seconds", "Seconds from a call to its reply.", labels=labels)
        for row in rows:
            values = [me, row.function, row.peer, row.side]
            calls.add_metric(values, row.calls)
            for code, count in row.errors.items():
                errors.add_metric([*values, code], count)
            requests.add_metric(values, row.request_bytes)
            replies.add_metric(values, row.reply_bytes)
            in_flight.add_metric(values, row.in_flight)
            latency.add_metric(values, buckets=_cumulative(row), sum_value=row.total_s)
        yield from (calls, errors, requests, replies, in_flight, latency)


class MetricsServer:
    """An HTTP server for Prometheus in this process, as `serve_metrics` returns it. Any thread may use it.

    Attributes:
        addr (str): the address on which it listens.
        port (int): its port.
    """

    def __init__(self, port: int, addr: str) -> None:
        client = _client()
        registry = client.CollectorRegistry()
        registry.register(_Collector())
        client.ProcessCollector(registry=registry)
        handler = client.MetricsHandler.factory(registry)
        handler.timeout = _IDLE_TIMEOUT_S
        self._server = _Server((addr, port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="torchrpc-metrics", daemon=True)
        self._thread.start()
        self.addr, self.port = str(self._server.server_address[0]), int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The URL at which Prometheus finds the metrics."""
        host = f"[{self.addr}]" if ":" in self.addr else self.addr
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving and free the port. It may be called more than once."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_IDLE_TIMEOUT_S = 5.0
_MOST_CONNECTIONS = 32


class _Server(http.server.ThreadingHTTPServer):
    """A thread for each connection. A connection beyond `_MOST_CONNECTIONS` closes the oldest one of the address that
    has most of them.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._mutex = threading.Lock()
        self._open: dict[Any, str] = {}  # connection -> address of the peer, the oldest connection first
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._mutex:
            self._open[request] = client_address[0]
            if len(self._open) > _MOST_CONNECTIONS:
                ((most, _),) = collections.Counter(self._open.values()).most_common(1)
                oldest = next(each for each, address in self._open.items() if address == most)
                del self._open[oldest]
                with contextlib.suppress(OSError):  # its peer has closed it
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread then closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._mutex:
            self._open.pop(request, None)
        super().shutdown_request(request)


def serve_metrics(port: int = 0, addr: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of this worker to Prometheus, in the text formats of Prometheus and OpenMetrics.

    It turns metrics on (`enable_metrics`) if RPC is initialized. The server keeps running after `shutdown`: it serves
    no metrics of torchrpc until this process starts another worker. Any program that can reach the port can read the
    names of the workers and of the functions that they call. So by default, only programs on this machine can reach it.

    Args:
        port (int): the TCP port; 0: any free one, see `MetricsServer.port`.
        addr (str): the address to listen on: `"127.0.0.1"`, or `"0.0.0.0"` or `"::"` for all addresses of this machine.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed.
        OSError: the port is in use, or `addr` is not an address of this machine.
        ValueError: `port` is not between 0 and 65535.
    """
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise ValueError(f"serve_metrics: port must be a number from 0 to 65535, but is {port!r}.")
    server = MetricsServer(port, addr)
    if _is_current_rpc_agent_set() and isinstance(_get_current_rpc_agent(), TensorPipeAgent):
        enable_metrics()
    return server


_served: MetricsServer | None = None  # the server that serve_by_environment started


def serve_by_environment(worker: str) -> None:
    """Serve at TORCHRPC_METRICS_PORT and TORCHRPC_METRICS_ADDR, once per process. `worker` is the name in log lines.

    A failure is logged as a warning: a job must not fail because its metrics cannot be served.
    """
    global _served
    if _served is not None:
        return
    text, addr = os.environ["TORCHRPC_METRICS_PORT"], os.environ.get("TORCHRPC_METRICS_ADDR", "127.0.0.1")
    try:
        first, _, last = text.partition("-")
        ports = range(int(first), int(last or first) + 1)
        if not ports or ports[0] < 0 or ports[-1] > 65535:
            raise ValueError
    except ValueError:
        logger.warning("%s: TORCHRPC_METRICS_PORT must be a port or a range of ports, but is %r.", worker, text)
        return
    failure: Exception | None = None
    for port in ports:
        try:
            _served = serve_metrics(port, addr)
        except (OSError, ModuleNotFoundError) as exc:
            failure = exc
            continue
        logger.info("%s serves its metrics at %s", worker, _served.url)
        return
    logger.warning("%s cannot serve its metrics at %s port %s: %s", worker, addr, text, failure)


def _forget_in_child() -> None:
    """Close the inherited socket in a forked child, which has no thread of the server and soon no worker."""
    global _served
    if _served is not None:
        _served._server.socket.close()
        _served = None


os.register_at_fork(after_in_child=_forget_in_child)
