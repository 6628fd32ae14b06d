"""Part 7: forks, floods, signals and limits: what happens to one process or one call leaves all others unharmed."""

import contextlib
import gc
import os
import resource
import signal
import threading
import time
from typing import Any

import torch

from .harness import Run, case, check
from .load import peak_mib, run_both
from .worker import Worker, finish, memory_mib, serve, value

# --- forks ---


def fork_with_reference(worker: Worker) -> None:
    worker.init()
    rref = worker.rpc.remote("worker1", value)
    rref.to_here()
    child = os.fork()
    if child == 0:
        rref = None
        gc.collect()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    worker.outcome("seen", lambda: [code, rref.to_here().tolist(), worker.rpc.rpc_sync("worker1", value).tolist()])
    rref = None
    finish(worker)


@case("a forked child drops an RRef of its parent")
def forked(run: Run) -> str:
    outcome = run_both(run, fork_with_reference, 60)
    check(outcome["text"] == "[0, [1.0, 1.0], [1.0, 1.0]]", f"{outcome['type']}: {outcome['text'][:80]}")
    return "the parent's RRef and calls work"


# --- floods ---


def large_result(_: int) -> torch.Tensor:
    return torch.ones(1 << 18)  # 1 MiB


def stop_with_calls(worker: Worker) -> None:
    worker.init(rpc_timeout=0)
    worker.rpc.rpc_sync("worker1", large_result, args=(0,))
    before = worker.rpc.rpc_sync("worker1", memory_mib)
    futures = [worker.rpc.rpc_async("worker1", large_result, args=(i,)) for i in range(3000)]
    worker.report("called")
    os.kill(os.getpid(), signal.SIGSTOP)
    right = sum(future.wait().numel() == 1 << 18 for future in futures)
    del futures
    worker.report("seen", [right, worker.rpc.rpc_sync("worker1", peak_mib) - before])
    finish(worker)


@case("3,000 results of 1 MiB for a caller that is stopped", limit=120)
def stopped_caller(run: Run) -> str:
    first, second = run.group(stop_with_calls, serve, liveness=60)
    second.expect("ready")
    first.expect("called")
    time.sleep(3)  # the caller is stopped for that long while results arrive
    first.send_signal(signal.SIGCONT)
    right, more = first.expect("seen", within=60)
    second.send_command("end")
    check(right == 3000, f"{right} of 3000 results")
    check(more < 800, f"callee +{more:.0f} MiB")
    return f"all answered after it continued; callee +{more:.0f} MiB at most"


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def echo_large(worker: Worker) -> None:
    worker.init(rpc_timeout=120)
    tensor = torch.ones(1 << 28 if worker.scale >= 0.1 else 1 << 26)  # 1 GiB; else 256 MiB
    worker.rpc.rpc_sync("worker1", value)
    worker.wait_for_command("echo")
    start = time.monotonic()
    worker.rpc.rpc_sync("worker1", echo, args=(tensor,))
    worker.report("seen", [tensor.nbytes >> 20, time.monotonic() - start])
    worker.wait_for_command("end")
    finish(worker)


def call_until_told(worker: Worker) -> None:
    worker.init()
    told = threading.Event()
    threading.Thread(target=lambda: (worker.wait_for_command("stop"), told.set()), daemon=True).start()
    slowest = 0.0
    worker.rpc.rpc_sync("worker1", value)
    worker.report("calling")
    while not told.is_set():
        start = time.monotonic()
        worker.rpc.rpc_sync("worker1", value)
        slowest = max(slowest, time.monotonic() - start)
    worker.report("slowest", slowest)
    finish(worker)


@case(
    "small calls of another worker beside an echo of 1 GiB, liveness_timeout of 1 s (--scale below 0.1: 256 MiB)", 150
)
def large_echo(run: Run) -> str:
    first, second, third = run.group(echo_large, serve, call_until_told, liveness=1)
    third.expect("calling")
    first.send_command("echo")
    mib, seconds = first.expect("seen", within=120)
    third.send_command("stop")
    slowest = third.expect("slowest")
    for process in (first, second):
        process.send_command("end")
    for process in (first, second, third):
        outcome = process.expect("end", within=20)
        check(not outcome["type"], f"{process.name}'s shutdown: {outcome['text']}")
    seen = f"{mib} MiB in {seconds:.1f} s, the slowest small call {slowest * 1000:.0f} ms"
    check(slowest < 0.5, seen)
    return seen


# --- signals and limits ---


def interrupted_wait(worker: Worker) -> None:
    class Interrupted(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    worker.init()
    interrupted = 0
    for i in range(100):
        future = worker.rpc.rpc_async("worker1", time.sleep, args=(0.01,))
        signal.setitimer(signal.ITIMER_REAL, 0.005 + i * 0.0001)
        try:
            with contextlib.suppress(Interrupted):
                future.wait()
                time.sleep(1)  # the signal comes after the reply
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        future.wait()
    worker.outcome("seen", lambda: [interrupted, worker.rpc.rpc_sync("worker1", value).tolist()])
    finish(worker)


@case("a signal's handler raises in future.wait(), 100 times")
def interrupted(run: Run) -> str:
    outcome = run_both(run, interrupted_wait, 30)
    check(outcome["text"] == "[100, [1.0, 1.0]]", f"{outcome['type']}: {outcome['text'][:80]}")
    return "every future completes"


def first_call_without_descriptors(worker: Worker) -> None:
    worker.init()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
    future = worker.rpc.rpc_async("worker1", value)
    time.sleep(0.5)  # the call fails to open a connection meanwhile
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    worker.outcome("seen", lambda: [future.wait().tolist(), worker.rpc.remote("worker1", value).to_here().tolist()])
    finish(worker)


@case("no free descriptor during the first call to a worker")
def no_descriptors(run: Run) -> str:
    outcome = run_both(run, first_call_without_descriptors, 60)
    check(outcome["text"] == "[[1.0, 1.0], [1.0, 1.0]]", f"{outcome['type']}: {outcome['text'][:80]}")
    return "answered once there is one"
