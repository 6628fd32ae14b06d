"""Workers of a group of fixed size are killed under load and started again: when others notice, and when they serve.

python benchmarks/member_restarts.py [--workers N] [--seconds S] [--kills-at-once K]

All workers call random others all the time. Again and again K of them are killed (SIGKILL), and a quarter of a second
later processes that have imported everything already take their places. It prints how long a loss took to reach the
callbacks of on_member_change on the others, how long init_rpc took in the restarted workers, and when the first call to
them was answered. A call that fails must have been to a killed worker.
"""

import argparse
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


def serve(connection: Any, rank: int, workers: int, url: str) -> None:
    """Wait for a word, join, and call others until the end; report changes, first answers and errors."""
    torch.set_num_threads(1)
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
    while not connection.poll():
        peer = random.randrange(workers)
        if peer == rank:
            continue
        number = random.randrange(1 << 20)
        try:
            pid, value = rpc.rpc_sync(peer, answer, args=(number,))
            calls += 1
            wrong += value != number + 1
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
    return os.getpid(), number + 1


class Worker:
    def __init__(self, context: Any, rank: int, workers: int, url: str) -> None:
        self.rank = rank
        self.connection, child_end = context.Pipe()
        self.process = context.Process(target=serve, args=(child_end, rank, workers, url), daemon=True)
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
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--kills-at-once", type=int, default=1)
    arguments = parser.parse_args()
    workers = arguments.workers
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchrpc.testing._preload"])
    url = f"file://{tempfile.mkdtemp()}/store"
    group = [Worker(context, rank, workers, url) for rank in range(workers)]
    for worker in group:
        worker.wait_for("standby")
    for worker in group:
        worker.connection.send("go")
    for worker in group:
        worker.wait_for("joined")
    time.sleep(2 + 0.02 * workers)  # until all are connected
    noticed: list[float] = []
    joined: list[float] = []
    served: list[float] = []
    unnoticed = kills = 0
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        victims = random.sample(range(workers), arguments.kills_at_once)
        fresh = {rank: Worker(context, rank, workers, url) for rank in victims}
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
        time.sleep(0.25)  # as a supervisor needs to notice it, too
        for rank, worker in fresh.items():
            worker.connection.send("go")
            group[rank] = worker
        started = {}
        for rank, worker in fresh.items():
            _, begin, finished = worker.wait_for("joined")
            started[rank] = begin
            joined.append(finished - begin)
        deadline = time.monotonic() + 30
        for rank, worker in fresh.items():
            pid = worker.process.pid
            first = []
            for other in others:
                while time.monotonic() < deadline:
                    seen = [m[3] for m in other.messages if m[0] == "answered" and m[1] == rank and m[2] == pid]
                    if seen:
                        first.append(seen[0])
                        break
                    other.receive(0.05)
                lost = [m[3] for m in other.messages if m[:3] == ("change", "lost", rank)]
                if lost:
                    noticed.append(lost[0] - killed_at[rank])
                else:
                    unnoticed += 1
            if first:
                served.append(min(first) - started[rank])
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
    print("\n| seconds | number | median | 95 % | worst |\n|-|-|-|-|-|")
    print(row("from the kill to a callback `lost`", noticed))
    print(row("`init_rpc` of the restarted worker", joined))
    print(row("from its `init_rpc` to the first call that it serves", served))
    for text in unexpected[:5]:
        print("unexpected:", text)
    return 1 if totals[1] or unexpected else 0


if __name__ == "__main__":
    raise SystemExit(main())
