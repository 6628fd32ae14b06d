"""Part 4: many calls at once, and for long: no deadlock, bounded memory."""

import os
import sys
import time

import torch

from .harness import Run, case, check
from .worker import Worker, finish, memory_mib, serve


def rpc_here():
    """Return the RPC module that this worker uses."""
    return sys.modules.get("torchrpc.rpc") or sys.modules["torch.distributed.rpc"]


def run_both(run: Run, first_function, within: float, **options):
    """Run `first_function` on worker0 beside a worker that serves; return its event "seen"."""
    first, second = run.group(first_function, serve, **options)
    second.expect("ready")
    seen = first.expect("seen", within=within)
    second.send_command("end")
    for process in (first, second):
        outcome = process.expect("end", within=20)
        check(not outcome["type"], f"{process.name}'s shutdown: {outcome['text']}")
    return seen


def deeper(depth: int) -> int:
    rpc = rpc_here()
    me = rpc.get_worker_info().id
    return 0 if depth == 0 else 1 + rpc.rpc_sync(f"worker{1 - me}", deeper, args=(depth - 1,))


def nest(worker: Worker) -> None:
    worker.init()
    worker.outcome("seen", lambda: worker.rpc.rpc_sync("worker1", deeper, args=(64,)))
    finish(worker)


@case("nested blocking calls, 64 deep, 4 threads", limit=60)
def nested(run: Run) -> str:
    outcome = run_both(run, nest, 40, num_worker_threads=4, rpc_timeout=20)
    check(not outcome["type"], f"{outcome['type']} after {outcome['seconds']:.0f} s: {outcome['text'][:60]}")
    return f"{outcome['seconds']:.2f} s"


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def with_many_threads(worker: Worker) -> None:
    before = threads()
    worker.init()
    worker.rpc.rpc_sync("worker1", threads)
    worker.report("seen", [threads() - before, memory_mib()])
    finish(worker)


@case("num_worker_threads=512 before it is used")
def many_threads(run: Run) -> str:
    more, memory = run_both(run, with_many_threads, 30, num_worker_threads=512)
    check(more < 20, f"{more} more threads")
    return f"{more} threads, {memory:.0f} MiB"


def queue_calls(worker: Worker) -> None:
    worker.init(rpc_timeout=0)
    count = max(int(100_000 * worker.scale), 30_000)
    before, there = memory_mib(), worker.rpc.rpc_sync("worker1", memory_mib)
    most = 0.0
    payload = "x" * 1024
    futures = []
    start = time.monotonic()
    for i in range(count):
        futures.append(worker.rpc.rpc_async("worker1", take, args=(payload, i)))
        if i % 1000 == 0:
            most = max(most, memory_mib())
    peak = worker.rpc.rpc_sync("worker1", peak_mib)
    torch.futures.wait_all(futures)
    worker.report("seen", [count, most - before, peak - there, time.monotonic() - start])
    finish(worker)


def take(payload: str, i: int) -> int:
    time.sleep(0.00002)  # the function under test is slow
    return i


def peak_mib() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


@case("100,000 queued calls of 1 KiB (--scale: at least 30,000)", limit=400)
def queued(run: Run) -> str:
    count, here, there, seconds = run_both(run, queue_calls, 380)
    seen = f"{count} calls in {seconds:.0f} s: caller +{here:.0f} MiB, callee +{there:.0f} MiB"
    check(here < 200 and there < 150, seen)
    return seen


def large(_: torch.Tensor) -> torch.Tensor:
    return torch.ones(1 << 18)  # 1 MiB


def slope(samples: list[tuple[int, float]]) -> float:
    """Return the growth in MiB per 1,000 calls in the second half, after all one-time allocations."""
    half = samples[len(samples) // 2 :]
    (first, low), (last, high) = half[0], half[-1]
    return (high - low) / max(last - first, 1) * 1000


def large_results(worker: Worker) -> None:
    worker.init()
    count = max(int(100_000 * worker.scale), 4000)
    here, there = [], []
    argument = torch.ones(1)
    for i in range(count):
        worker.rpc.rpc_sync("worker1", large, args=(argument,))
        if i % (count // 20) == 0:
            here.append((i, memory_mib()))
            there.append((i, worker.rpc.rpc_sync("worker1", memory_mib)))
    worker.report("seen", [count, slope(here), slope(there), here[-1][1], there[-1][1]])
    finish(worker)


@case("100,000 calls with results of 1 MiB (--scale: at least 4,000)", limit=1000)
def flat_results(run: Run) -> str:
    return flat(run_both(run, large_results, 980), 1.0)


def flat(measured: list[float], most: float) -> str:
    count, here, there, mib_here, mib_there = measured
    seen = (
        f"{count}: caller {here:+.2f}, callee {there:+.2f} MiB per 1,000 in the second half "
        f"({mib_here:.0f}, {mib_there:.0f} MiB)"
    )
    check(here < most and there < most, seen)
    return seen


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum()


def steps(worker: Worker) -> None:
    worker.init()
    count = max(int(20_000 * worker.scale), 2000)
    here, there = [], []
    weight = torch.ones(64, requires_grad=True)
    data = torch.ones(64)
    for i in range(count):
        with worker.autograd.context() as context:
            loss = worker.rpc.rpc_sync("worker1", product, args=(weight, data))
            worker.autograd.backward(context, [loss])
            worker.autograd.get_gradients(context)
        if i % (count // 20) == 0:
            here.append((i, memory_mib()))
            there.append((i, worker.rpc.rpc_sync("worker1", memory_mib)))
    worker.report("seen", [count, slope(here), slope(there), here[-1][1], there[-1][1]])
    finish(worker)


@case("20,000 autograd steps (--scale: at least 2,000)", limit=1000)
def flat_steps(run: Run) -> str:
    return flat(run_both(run, steps, 980), 1.0)


def size_of(tensor: torch.Tensor) -> int:
    return tensor.nbytes


def send_3_gib(worker: Worker) -> None:
    worker.init(rpc_timeout=120)
    tensor = torch.empty(3 << 30, dtype=torch.uint8).fill_(1)
    worker.outcome("seen", lambda: worker.rpc.rpc_sync("worker1", size_of, args=(tensor,)))
    finish(worker)


@case("a tensor of 3 GiB, with a liveness_timeout of 1 s", limit=150)
def three_gib(run: Run) -> str:
    outcome = run_both(run, send_3_gib, 130, liveness=1)
    check(not outcome["type"], f"{outcome['type']}: {outcome['text'][:80]}")
    return f"{outcome['seconds']:.1f} s"


def few_files(worker: Worker) -> None:
    worker.init()
    worker.report("seen", worker.rpc.rpc_sync("worker1", os.getpid))
    finish(worker)


@case("two workers with `ulimit -n 40`", systems=("torchrpc",))
def few_descriptors(run: Run) -> str:
    prefix = ("bash", "-c", 'ulimit -n 40; exec "$@"', "-")
    first, second = (run.start(function, rank, 2, prefix=prefix) for rank, function in enumerate((few_files, serve)))
    for process, event in ((first, "seen"), (second, "ready")):
        try:
            process.expect(event, within=25)
        except Exception as failure:
            code = process.popen.poll()
            check(code is None or code >= 0, f"{process.name} was terminated by a signal: {failure}")
            check("descriptor" in str(failure) or "open files" in str(failure), str(failure))
            return f"refuses: {failure}"
    second.send_command("end")
    return "work"


def one_of_many(worker: Worker) -> None:
    worker.init()
    if worker.rank == 0:
        names = [f"worker{rank}" for rank in range(worker.size)]
        start = time.monotonic()
        answers = torch.futures.wait_all([worker.rpc.rpc_async(name, os.getpid) for name in names])
        assert len(set(answers)) == worker.size
        worker.report("called", [time.monotonic() - start, len(os.listdir("/proc/self/fd")), threads()])
    worker.report("here", [len(os.listdir("/proc/self/fd")), threads(), memory_mib()])
    worker.rpc.shutdown()
    worker.report("left")


@case("64 workers on one machine (--scale below 0.1: 16)", limit=400)
def many_workers(run: Run) -> str:
    count = 64 if run.scale >= 0.1 else 16
    start = time.monotonic()
    processes = run.group(*[one_of_many] * count, liveness=60)
    seconds, files, thread_count = processes[0].expect("called", within=350)
    last = processes[-1].expect("here", within=60)
    for process in processes:
        process.expect("left", within=60)
    return (
        f"{count} in {time.monotonic() - start:.0f} s; calls to all {seconds:.2f} s; files {files}, threads "
        f"{thread_count} on worker0, {last[0]} and {last[1]} on the last"
    )
