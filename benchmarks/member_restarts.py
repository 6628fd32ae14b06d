"""Kills workers of a group under load and starts them again; measures when others notice, and when they serve.

python benchmarks/member_restarts.py [--workers N] [--minutes M] [--kills-at-once K] [--delay S]

The group has a fixed size. All workers call random other workers all the time; every second call has a key and retries.
The program repeatedly kills K workers (SIGKILL). After the delay, a quarter of a second by default, processes that have
already imported everything take their places. The program prints how long a loss took to reach the callbacks of
on_member_change on the other workers, how long init_rpc took in the restarted workers, and when the first call to them
was answered. It checks that only calls to killed workers failed, and that no call ran twice: the called function counts
its runs in a file that all processes map, so that no kill loses the counts.
"""

import argparse
import mmap
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
from typing import Any

import torch

import torchrpc
import torchrpc.rpc as rpc

_MOST_CALLS_OF_A_PROCESS = 1 << 16  # each call has a byte in the file
_MOST_PROCESSES = 1 << 14
_runs: mmap.mmap  # how often each call has run


def serve(connection: Any, rank: int, workers: int, url: str, first_number: int, path: str) -> None:
    """Wait for "go", join, and call other workers until the end; report changes, first answers and errors.

    The numbers of this process's calls begin at `first_number`; calls with odd numbers have a key.
    """
    global _runs
    torch.set_num_threads(1)
    with open(path, "r+b") as file:
        _runs = mmap.mmap(file.fileno(), 0)
    send_lock = threading.Lock()

    def send(*message: Any) -> None:
        with send_lock:
            connection.send(message)

    connection.send(("standby",))
    if connection.recv() != "go":
        return
    torchrpc.on_member_change(lambda worker, change: send("change", change, worker.id, time.monotonic()))
    start = time.monotonic()
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, num_worker_threads=4, rpc_timeout=60)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=workers, rpc_backend_options=options)
    send("joined", start, time.monotonic())
    calls = wrong = 0
    failed: dict[int, int] = {}
    answered_by: dict[int, int] = {}
    pause = 0.002 * workers  # the machine has few cores
    retries = rpc.RetryPolicy(retries=5)
    number = first_number
    while not connection.poll():
        peer = random.randrange(workers)
        if peer == rank or number + 1 == first_number + _MOST_CALLS_OF_A_PROCESS:
            time.sleep(pause)
            continue
        number += 1
        keyed: dict[str, Any] = {"retries": retries, "idempotency_key": f"call {number}"} if number % 2 else {}
        try:
            pid, value = rpc.rpc_sync(peer, answer, args=(number,), **keyed)
            calls += 1
            wrong += value != number + 1 or _runs[number] != 1
            if answered_by.get(peer) != pid:
                answered_by[peer] = pid
                send("answered", peer, pid, time.monotonic())
        except rpc.WorkerLostError as error:
            failed[peer] = failed.get(peer, 0) + 1
            if error.worker != f"worker{peer}":
                send("unexpected", str(error))
        except Exception as error:
            send("unexpected", repr(error))
        time.sleep(pause)
    connection.recv()
    send("calls", calls, wrong, failed)
    connection.recv()
    rpc.shutdown()
    send("left")


def answer(number: int) -> tuple[int, int]:
    _runs[number] += 1
    return os.getpid(), number + 1


class Worker:
    made = 0  # processes started so far

    def __init__(self, context: Any, rank: int, workers: int, url: str, path: str) -> None:
        self.rank = rank
        first_number = Worker.made * _MOST_CALLS_OF_A_PROCESS
        Worker.made += 1
        self.connection, child_end = context.Pipe()
        self.process = context.Process(
            target=serve, args=(child_end, rank, workers, url, first_number, path), daemon=True
        )
        self.process.start()
        child_end.close()
        self.messages: list[tuple] = []

    def receive(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.connection.poll(max(end - time.monotonic(), 0)):
            self.messages.append(self.connection.recv())

    def wait_for(self, kind: str, seconds: float = 120) -> tuple:
        end = time.monotonic() + seconds
        while True:
            for message in self.messages:
                if message[0] == kind:
                    return message
            if not self.connection.poll(max(end - time.monotonic(), 0)):
                raise TimeoutError(f"worker{self.rank} has not sent {kind!r} in {seconds} s")
            self.messages.append(self.connection.recv())


def row(what: str, seconds: list[float]) -> str:
    if not seconds:
        return f"| {what} | 0 | | |"
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    return f"| {what} | {len(ordered)} | {statistics.median(ordered):.3f} | {p95:.3f} | {ordered[-1]:.3f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--kills-at-once", type=int, default=1)
    parser.add_argument(
        "--delay", type=float, default=0.25, help="seconds, as a supervisor needs to notice a kill, too"
    )
    arguments = parser.parse_args()
    workers = arguments.workers
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchrpc.testing._preload"])
    folder = tempfile.mkdtemp()
    url, path = f"file://{folder}/store", f"{folder}/runs"
    with open(path, "wb") as file:
        file.truncate(_MOST_PROCESSES * _MOST_CALLS_OF_A_PROCESS)  # a sparse file
    group = [Worker(context, rank, workers, url, path) for rank in range(workers)]
    for worker in group:
        worker.wait_for("standby")
    for worker in group:
        worker.connection.send("go")
    for worker in group:
        worker.wait_for("joined")
    time.sleep(2 + 0.02 * workers)  # time for all workers to connect
    noticed: list[float] = []
    joined: list[float] = []
    served: list[float] = []
    unnoticed = kills = 0
    end = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end and Worker.made + arguments.kills_at_once <= _MOST_PROCESSES:
        victims = random.sample(range(workers), arguments.kills_at_once)
        fresh = {rank: Worker(context, rank, workers, url, path) for rank in victims}
        for worker in fresh.values():
            worker.wait_for("standby")
        others = [worker for worker in group if worker.rank not in victims]
        for worker in others:
            worker.receive(0)
            worker.messages.clear()
        killed_at = {}
        for rank in victims:
            killed_at[rank] = time.monotonic()
            group[rank].process.kill()
            kills += 1
        time.sleep(arguments.delay)
        for rank, worker in fresh.items():
            worker.connection.send("go")
            group[rank] = worker
        started = {}
        for rank, worker in fresh.items():
            _, begin, finished = worker.wait_for("joined")
            started[rank] = begin
            joined.append(finished - begin)
        answers: dict[int, list[float]] = {}
        losses: dict[int, list[float]] = {}
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for other in others:
                other.receive(0)
            for rank, worker in fresh.items():
                messages = [m for other in others for m in other.messages]
                answers[rank] = [m[3] for m in messages if m[:3] == ("answered", rank, worker.process.pid)]
                seen = ([m[3] for m in other.messages if m[:3] == ("change", "lost", rank)] for other in others)
                losses[rank] = [times[0] for times in seen if times]
            if all(answers.values()) and all(len(times) == len(others) for times in losses.values()):
                break
            time.sleep(0.1)
        for rank in fresh:
            noticed += [time_lost - killed_at[rank] for time_lost in losses[rank]]
            unnoticed += len(others) - len(losses[rank])
            served += [min(times) - started[rank] for times in [answers[rank]] if times]
    totals = [0, 0]
    failed: dict[int, int] = {}
    for worker in group:
        worker.connection.send("stop")
    for worker in group:
        _, calls, wrong, failures = worker.wait_for("calls")
        totals[0] += calls
        totals[1] += wrong
        for peer, count in failures.items():
            failed[peer] = failed.get(peer, 0) + count
    unexpected = [m[1] for worker in group for m in worker.messages if m[0] == "unexpected"]
    for worker in group:
        worker.connection.send("leave")
    for worker in group:
        worker.wait_for("left")
    print(f"{workers} workers, {kills} killed and started again, {totals[0]} calls, {totals[1]} wrong")
    print(
        f"calls that failed: {sum(failed.values())}; with another error than the loss of the callee: {len(unexpected)}"
    )
    print(f"losses that were noticed only by the restart: {unnoticed}")
    with open(path, "rb") as file:
        runs = file.read(Worker.made * _MOST_CALLS_OF_A_PROCESS)
    repeated = {name: sum(count > 1 for count in runs[start::2]) for start, name in enumerate(("without", "with"))}
    for name, count in repeated.items():
        print(f"calls {name} a key and retries that ran more than once: {count}")
    print("\n| seconds | number | median | 95 % | worst |\n|-|-|-|-|-|")
    print(row("from the kill to a callback `lost`", noticed))
    print(row("`init_rpc` of the restarted worker", joined))
    print(row("from its `init_rpc` to the first call that it serves", served))
    for text in unexpected[:5]:
        print("unexpected:", text)
    return 1 if totals[1] or unexpected or any(repeated.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
