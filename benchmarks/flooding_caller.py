"""Measures what a caller that floods a worker with requests costs the worker and a well-behaved caller.

python benchmarks/flooding_caller.py [--seconds 3] [--quotas on|off|both]

Three processes: a server, a caller that makes one small call after the other, and a caller that floods the server in
one of several ways. For each way, without and with a quota for the flooding caller, prints the latency of the
well-behaved caller (median and 99th percentile), how many requests of the flood were answered and refused in a second,
and the largest resident memory of the server. Exit status 1 if a call of the well-behaved caller failed.
"""

import argparse
import collections
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing as mp

import torchrpc.rpc as rpc
from torchrpc.rpc import Quota

THREADS = 4  # of the server
QUOTA = Quota(calls=THREADS // 2, bytes=16 << 20, rrefs=16, connections=2)  # leaves threads to others
MOST_OUTSTANDING = 2000  # requests of the flood, as far as the limit of bytes allows
MOST_OUTSTANDING_BYTES = 512 << 20


# --- on the server ----------------------------------------------------------------------------------------------------
def reset_peak_memory() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10


def first(value: torch.Tensor) -> float:
    return value[0].item()


def repeat(value: torch.Tensor, times: int) -> torch.Tensor:
    return value.repeat(times)


def sleep_briefly() -> None:
    time.sleep(0.01)  # stands for the work of a function


# --- the flooding caller ----------------------------------------------------------------------------------------------
FLOODS: dict[str, tuple[int, Callable[[], torch.futures.Future]]] = {  # bytes of a request or reply, and how to send it
    "small calls": (0, lambda: rpc.rpc_async("server", torch.add, args=(torch.ones(4), 1))),
    "calls that take 10 ms": (0, lambda: rpc.rpc_async("server", sleep_briefly)),
    "requests of 8 MiB": (8 << 20, lambda: rpc.rpc_async("server", first, args=(torch.ones(2 << 20),))),
    "replies of 8 MiB": (8 << 20, lambda: rpc.rpc_async("server", repeat, args=(torch.ones(1024), 2048))),
}


class Flood:
    """Floods on a thread, and counts the outcomes."""

    def __init__(self, kind: str) -> None:
        self.answered = self.refused = 0
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, args=FLOODS[kind])
        self._thread.start()

    def _run(self, size: int, send: Callable[[], torch.futures.Future]) -> None:
        most = min(MOST_OUTSTANDING, MOST_OUTSTANDING_BYTES // max(size, 1))
        outstanding: collections.deque[torch.futures.Future] = collections.deque()
        while not self._is_ending.is_set():
            outstanding.append(send())
            if len(outstanding) >= most:
                self._finish(outstanding.popleft())
        for future in outstanding:
            self._finish(future)

    def _finish(self, future: torch.futures.Future) -> None:
        try:
            future.wait()
            self.answered += 1
        except rpc.QuotaExceededError:
            self.refused += 1

    def end(self) -> tuple[int, int]:
        self._is_ending.set()
        self._thread.join()
        return self.answered, self.refused


flood: Flood | None = None
is_over = threading.Event()  # from shutdown() on, the flooding caller may make no calls


def begin_flood(kind: str) -> None:
    global flood
    flood = Flood(kind)


def end_flood() -> tuple[int, int]:
    assert flood is not None
    return flood.end()


def end_all_floods() -> None:
    is_over.set()


# --- the well-behaved caller ------------------------------------------------------------------------------------------
def latencies(seconds: float) -> list[float]:
    found = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        if rpc.rpc_sync("server", torch.add, args=(torch.ones(4), 1))[0] != 2:
            raise RuntimeError("a wrong result")
        found.append(time.perf_counter() - start)
    return found


def measure(seconds: float, has_quotas: bool) -> None:
    quota = "yes" if has_quotas else "no"
    latencies(min(seconds, 1))
    for kind in [None, *FLOODS]:
        rpc.rpc_sync("server", reset_peak_memory)
        if kind:
            rpc.rpc_sync("flood", begin_flood, args=(kind,))
        start = time.perf_counter()
        found = latencies(seconds)
        counts = rpc.rpc_sync("flood", end_flood, timeout=600) if kind else (0, 0)
        passed = time.perf_counter() - start
        percentiles = statistics.quantiles(found, n=100)
        answered, refused = (f"{count / passed:,.0f}" for count in counts)
        print(
            f"| {kind or 'none'} | {quota} | {percentiles[49] * 1e6:,.0f} | {percentiles[98] * 1e6:,.0f} "
            f"| {answered} | {refused} | {rpc.rpc_sync('server', peak_memory_mib):,} |",
            flush=True,
        )


def work(rank: int, store: str, seconds: float, has_quotas: bool) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{store}", num_worker_threads=THREADS, quotas={"flood": QUOTA} if has_quotas else None
    )
    rpc.init_rpc(("caller", "server", "flood")[rank], rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        measure(seconds, has_quotas)
        rpc.rpc_sync("flood", end_all_floods)
    elif rank == 2:
        is_over.wait()
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures what a caller that floods a worker costs others.")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--quotas", choices=("on", "off", "both"), default="both")
    args = parser.parse_args()
    if not args.seconds > 0:
        parser.error("--seconds must be positive")
    print("| flood | quota | p50, us | p99, us | answered a second | refused a second | server, MiB |")
    print("|-|-|-|-|-|-|-|")
    for has_quotas in {"on": [True], "off": [False], "both": [False, True]}[args.quotas]:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, args=(os.path.join(folder, "store"), args.seconds, has_quotas), nprocs=3)
