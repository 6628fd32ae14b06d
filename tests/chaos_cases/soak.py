"""Part 6: all faults at once, for an hour, with an exact account.

Three workers that live ("steady") and two that are killed, restarted and stopped ("mortal") call each other: small and
large calls, RRefs that travel, backward passes, optimizer steps, functions that fork, waits that a signal interrupts,
moments without a free descriptor. Each steady worker keeps an account: every call ends exactly once, with the right
result or with an error for which a mortal worker is responsible. In the end no worker keeps any state.
"""

import collections
import contextlib
import gc
import itertools
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .harness import CaseFailure, Process, Run, case, check
from .worker import Worker, finish, memory_mib

STEADY = 3
MORTAL = 2
LIVENESS_S = 2.0
CALL_TIMEOUT_S = 60.0  # a call that takes longer has been lost
SLOW_S = 20.0  # longer than any of the faults


# --- Functions that the workers call on each other ---


def echo(value: Any) -> Any:
    return value


def total(tensor: torch.Tensor) -> float:
    return tensor.sum().item()


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


class Thing:
    """Known by weak references without callbacks, which the signal's handler could interrupt."""

    lock = threading.Lock()
    references: ClassVar[list["weakref.ref[Thing]"]] = []

    def __init__(self, number: int) -> None:
        self.number = number
        with Thing.lock:
            Thing.references.append(weakref.ref(self))
            if len(Thing.references) % 1000 == 0:
                Thing.references = [each for each in Thing.references if each()]

    @staticmethod
    def living() -> int:
        with Thing.lock:
            return sum(each() is not None for each in Thing.references)

    def get(self) -> int:
        return self.number


def number_of(rref: Any) -> int:
    return rref.rpc_sync().get()


def weight() -> torch.Tensor:
    return torch.zeros(2, requires_grad=True)


def use(rref: Any, x: torch.Tensor) -> torch.Tensor:
    return rref.local_value() * x


def state() -> str:
    """Return the stacks of this worker's threads, and what it counts."""
    rpc = sys.modules["torchrpc.rpc"]
    stacks = [
        f"{thread}: " + " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(traceback.extract_stack(top)))
        for thread, top in sys._current_frames().items()
    ]
    info = {**rpc._rref_context_get_debug_info(), **rpc.api._get_current_rpc_agent().get_debug_info()}
    return "\n".join([*stacks, str(info)])


def fork_child() -> int:
    """Fork a child that drops all that it has inherited, and return its exit code."""
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- The account ---


class Account:
    """Counts calls by kind and end. Any thread may use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.under_way: dict[int, tuple[str, float]] = {}
        self.ends: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def begin(self, kind: str) -> int:
        with self.lock:
            number = next(self.numbers)
            self.under_way[number] = (kind, time.monotonic())
            return number

    def end(self, number: int, how: str) -> None:
        with self.lock:
            begun = self.under_way.pop(number, None)
            self.ends[how] += 1
            if begun is None:
                self.wrong.append(f"call {number} ended twice")

    def longest_s(self) -> float:
        """Return for how long the oldest call has been under way."""
        with self.lock:
            return time.monotonic() - min((begun for _, begun in self.under_way.values()), default=time.monotonic())

    def note_wrong(self, text: str) -> None:
        with self.lock:
            self.wrong.append(text[:300])

    def report(self) -> dict:
        with self.lock:
            open_kinds = sorted({kind for kind, _ in self.under_way.values()})
            begun = next(self.numbers)
            return {"begun": begun, "ends": dict(self.ends), "open": open_kinds, "wrong": self.wrong[:5]}


class Interrupted(Exception):
    pass


class Load:
    """The calls of one worker, by threads that go on until `stop`."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.rpc, self.autograd = worker, worker.rpc, worker.autograd
        self.account = Account()
        self.stop = threading.Event()
        self.random = random.Random(worker.rank)
        self.explained = False
        self.is_interruptible = False
        self.parts = [self.watch, self.small, self.large, self.rrefs, self.passes, self.optimize, self.forks]
        self.threads = [threading.Thread(target=self.repeat, args=(part,), name=part.__name__) for part in self.parts]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def repeat(self, part: Callable[[], None]) -> None:
        while not self.stop.is_set():
            try:
                part()
            except Exception as error:
                self.account.note_wrong(f"{part.__name__}: {type(error).__name__}: {error}")
                time.sleep(0.1)  # an error that persists does not fill the account

    def join(self, seconds: float) -> list[str]:
        """Return the parts that still run after that time."""
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0, end - time.monotonic()))
        return [thread.name for thread in self.threads if thread.is_alive()]

    # --- What each part uses ---

    def any_ranks(self, count: int) -> list[int]:
        others = [rank for rank in range(STEADY + MORTAL) if rank != self.worker.rank]
        return self.random.sample(others, count)

    def attempt(self, kind: str, ranks: list[int], act: Callable[[], Any], expected: Any) -> None:
        """Account for `act`, which may fail if one of the workers is mortal."""
        number = self.account.begin(kind)
        self.judge(number, kind, ranks, act, expected)

    def judge(self, number: int, kind: str, ranks: list[int], act: Callable[[], Any], expected: Any) -> None:
        is_mortal = any(rank >= STEADY for rank in [*ranks, self.worker.rank])
        try:
            found = act()
        except Exception as error:
            self.account.end(number, "failed")
            if not is_mortal or "set timeout" in str(error):
                self.account.note_wrong(f"{kind} on {ranks}: {type(error).__name__}: {error}")
            return
        self.account.end(number, "right" if found == expected else "wrong")
        if found != expected:
            self.account.note_wrong(f"{kind} on {ranks}: {found!r} instead of {expected!r}")

    # --- The parts ---

    def watch(self) -> None:
        """Print the state of all steady workers once, if a call takes much longer than any fault lasts."""
        if not self.explained and self.account.longest_s() > SLOW_S:
            self.explained = True
            for rank in range(STEADY):
                text = self.rpc.rpc_sync(f"worker{rank}", state)
                print(f"--- worker{rank}, for a slow call of {self.worker.name}:\n{text}", file=sys.stderr, flush=True)
        time.sleep(1)  # the rate of the load

    def small(self) -> None:
        started = []
        for i in range(20):
            (rank,) = self.any_ranks(1)
            number = self.account.begin("small")
            try:
                started.append((number, rank, i, self.rpc.rpc_async(f"worker{rank}", echo, args=(i,))))
            except Exception as error:
                self.account.end(number, "failed")
                if rank < STEADY:
                    self.account.note_wrong(f"small to {rank}: {error}")
        for number, rank, i, future in started:
            self.judge(number, "small", [rank], future.wait, i)
        time.sleep(0.005)  # the rate of the load

    def large(self) -> None:
        (rank,) = self.any_ranks(1)
        tensor = torch.ones(self.random.choice([1 << 14, 1 << 18, 1 << 22, 1 << 23]))
        self.attempt(
            "large", [rank], lambda: self.rpc.rpc_sync(f"worker{rank}", total, args=(tensor,)), float(tensor.numel())
        )
        time.sleep(0.1)  # the rate of the load

    def rrefs(self) -> None:
        owner, user = self.any_ranks(2)
        number = self.random.randrange(1 << 30)

        def act() -> int:
            rref = self.rpc.remote(f"worker{owner}", Thing, args=(number,))
            return self.rpc.rpc_sync(f"worker{user}", number_of, args=(rref,))

        self.attempt("rref", [owner, user], act, number)
        time.sleep(0.01)  # the rate of the load

    def passes(self) -> None:
        first, second = self.any_ranks(2)
        x, y = torch.full((3,), 2.0, requires_grad=True), torch.full((3,), 5.0)

        def act() -> list[float]:
            with self.autograd.context() as context:
                there = self.rpc.rpc_sync(f"worker{first}", product, args=(x, y))
                there = self.rpc.rpc_sync(f"worker{second}", product, args=(there, x))
                self.autograd.backward(context, [there.sum()])
                return self.autograd.get_gradients(context)[x].tolist()

        self.attempt("pass", [first, second], act, [20.0, 20.0, 20.0])
        time.sleep(0.02)  # the rate of the load

    def optimize(self) -> None:
        """Ten steps on a parameter of a steady worker, each by one: the values are exact."""
        rank = (self.worker.rank + 1) % STEADY

        def act() -> list[float]:
            parameter = self.rpc.remote(f"worker{rank}", weight)
            optimizer = self.worker.optimizer.DistributedOptimizer(torch.optim.SGD, [parameter], lr=1)
            for _ in range(10):
                with self.autograd.context() as context:
                    loss = self.rpc.rpc_sync(f"worker{rank}", use, args=(parameter, torch.ones(2)))
                    self.autograd.backward(context, [loss.sum()])
                    optimizer.step(context)
            return parameter.to_here().tolist()

        self.attempt("optimizer", [rank], act, [-10.0, -10.0])
        time.sleep(0.2)  # the rate of the load

    def forks(self) -> None:
        rank = (self.worker.rank + 1) % STEADY
        self.attempt("fork", [rank], lambda: self.rpc.rpc_sync(f"worker{rank}", fork_child), 0)
        time.sleep(2)  # the rate of the load

    def interrupt_a_wait(self) -> None:
        """On the main thread: a signal's handler raises while a future is waited for, which completes all the same."""
        rank = (self.worker.rank + 1) % STEADY
        future = self.rpc.rpc_async(f"worker{rank}", time.sleep, args=(0.05,))
        with contextlib.suppress(Interrupted):
            self.is_interruptible = True
            signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.06 * self.random.random())
            future.wait()
            self.is_interruptible = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.attempt("interrupted", [rank], lambda: future.wait(), None)

    def on_alarm(self, number: int, frame: Any) -> None:
        # Another thread may have received a signal that is handled only now, long after the wait.
        if self.is_interruptible:
            self.is_interruptible = False
            raise Interrupted

    def use_up_descriptors(self) -> None:
        """For a moment no descriptor is free, so new connections fail, which are tried again."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files(), hard))
        time.sleep(0.2)  # new connections fail for that long
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def kept_state(worker: Worker) -> dict[str, int]:
    """What must be zero once all calls have ended and all references are dropped."""
    info = {**worker.rpc._rref_context_get_debug_info(), **worker.autograd._get_debug_info()}
    agent = worker.rpc.api._get_current_rpc_agent().get_debug_info()
    state = {name: int(value) for name, value in info.items()}
    state["pending_calls"] = int(agent["agent.num_pending_calls"])
    state["living_things"] = Thing.living()
    return {name: value for name, value in state.items() if value}


def steady(worker: Worker) -> None:
    worker.init(rpc_timeout=CALL_TIMEOUT_S)
    load = Load(worker)
    signal.signal(signal.SIGALRM, load.on_alarm)
    worker.wait_for_command("start")
    load.start()
    stopping = threading.Event()
    threading.Thread(target=lambda: (worker.wait_for_command("stop"), stopping.set()), daemon=True).start()
    memory = []
    for round_number in itertools.count():
        if stopping.is_set():
            break
        load.interrupt_a_wait()
        if round_number % 100 == 99 and worker.rank == 1:
            load.use_up_descriptors()
        if round_number % 100 == 10:
            memory.append(memory_mib())
    load.stop.set()
    hung = load.join(2 * CALL_TIMEOUT_S)
    if hung:
        raise RuntimeError(f"threads that did not end: {hung}")
    worker.report("stopped")
    worker.wait_for_command("account")
    gc.collect()
    end = time.monotonic() + 30
    while kept_state(worker) and time.monotonic() < end:
        time.sleep(0.1)  # what is left after 30 s is reported
        gc.collect()
    resources = {"files": open_files(), "threads": thread_count(), "memory": memory}
    worker.report("account", {**load.account.report(), "kept": kept_state(worker), **resources})
    worker.wait_for_command("end")
    finish(worker)


def mortal(worker: Worker) -> None:
    """Calls the others, too; nobody keeps an account."""
    worker.init(rpc_timeout=CALL_TIMEOUT_S)
    load = Load(worker)
    load.parts.remove(load.forks)
    load.start()
    worker.wait_for_command("end")
    load.stop.set()
    load.join(CALL_TIMEOUT_S)
    del load
    gc.collect()
    finish(worker)


# --- The faults ---


class Faults:
    """Kills, restarts and stops workers at random, until a point in time."""

    def __init__(self, run: Run, steady: list[Process], mortal: dict[int, Process]) -> None:
        self.run, self.steady, self.mortal = run, steady, mortal
        self.random = random.Random(int(os.environ.get("SOAK_SEED", "0")))
        self.count: collections.Counter[str] = collections.Counter()

    def inject(self) -> None:
        fault = self.random.choice([self.kill, self.kill, self.stop_mortal, self.stop_steady, self.pause])
        self.count[fault.__name__] += 1
        fault()
        time.sleep(self.random.uniform(0, 2))  # the rate of the faults

    def kill(self) -> None:
        rank = self.random.choice(list(self.mortal))
        self.mortal[rank].send_signal(signal.SIGKILL)
        self.mortal[rank].popen.wait()
        self.run.processes.remove(self.mortal[rank])
        time.sleep(self.random.uniform(0, 1))  # others call the killed worker meanwhile
        self.mortal[rank] = self.run.start(mortal, rank, None, liveness=LIVENESS_S)
        self.mortal[rank].expect("ready", within=60)

    def stop_mortal(self) -> None:
        """Perhaps for so long that it counts as lost."""
        self.freeze(self.mortal[self.random.choice(list(self.mortal))], self.random.uniform(0.1, 2 * LIVENESS_S))

    def stop_steady(self) -> None:
        """So briefly that it never counts as lost."""
        self.freeze(self.random.choice(self.steady), self.random.uniform(0.01, LIVENESS_S / 4))

    def pause(self) -> None:
        time.sleep(1)  # a time without a fault

    @staticmethod
    def freeze(process: Process, seconds: float) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)  # the process is stopped for that long
        process.send_signal(signal.SIGCONT)


@case("an hour of faults of all kinds, with an account (--scale: at least 40 s)", limit=4500, systems=("torchrpc",))
def soak(run: Run) -> str:
    seconds = max(3600 * run.scale, 40)
    living = [run.start(steady, rank, None, liveness=LIVENESS_S) for rank in range(STEADY)]
    for process in living:
        process.expect("ready")
    dying = {rank: run.start(mortal, rank, None, liveness=LIVENESS_S) for rank in range(STEADY, STEADY + MORTAL)}
    for process in dying.values():
        process.expect("ready")
    for process in living:
        process.send_command("start")
    faults = Faults(run, living, dying)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        faults.inject()
    for process in living:
        process.send_command("stop")
    for process in living:
        process.expect("stopped", within=3 * CALL_TIMEOUT_S)
    for process in dying.values():
        process.send_command("end")
    for process in dying.values():
        process.expect("end", within=2 * CALL_TIMEOUT_S)
    accounts = []
    for process in living:  # all at once: each holds references of the others
        process.send_command("account")
    for process in living:
        accounts.append(process.expect("account", within=60))
    for process in living:
        process.send_command("end")
    for process in living:
        process.expect("end", within=30)
    for process, account in zip(living, accounts, strict=True):
        audit(process.name, account)
    return summary(accounts, faults)


def audit(name: str, account: dict) -> None:
    check(not account["wrong"], f"{name}: {account['wrong']}")
    ended = sum(account["ends"].values())
    check(account["begun"] == ended and not account["open"], f"{name}: {account['begun']} begun, {ended} ended")
    check(not account["kept"], f"{name} keeps {account['kept']}")
    check(
        account["files"] < 64 and account["threads"] < 64,
        f"{name}: {account['files']} files, {account['threads']} threads",
    )
    memory = account["memory"]
    if len(memory) > 200:  # from some minutes on: before, the allocators of many threads still grow
        low = quarters(memory)
        text = f"{name}: memory has grown by {low[3] - low[2]:.0f} MiB from the third quarter of the run to the last"
        check(low[3] - low[2] < 30, f"{text}: {low}")


def quarters(memory: list[float]) -> list[float]:
    """Return what is resident in each quarter of a run when few calls are under way, in MiB.

    Any sample may have some tensors of 32 MiB more.
    """
    cuts = [len(memory) * i // 4 for i in range(5)]
    parts = [sorted(memory[begin:end]) for begin, end in itertools.pairwise(cuts)]
    return [part[len(part) // 10] for part in parts if part]


def summary(accounts: list[dict], faults: Faults) -> str:
    ends: collections.Counter[str] = collections.Counter()
    for account in accounts:
        ends.update(account["ends"])
    if not ends["right"]:
        raise CaseFailure("no call was answered")
    calls = f"{sum(ends.values())} calls: {ends['right']} right, {ends['failed']} failed with a mortal worker"
    counts = ", ".join(f"{count} {name}" for name, count in sorted(faults.count.items()))
    resources = "; ".join(
        f"{a['files']} files, {a['threads']} threads, {' '.join(f'{low:.0f}' for low in quarters(a['memory']))} MiB"
        for a in accounts
    )
    return f"{calls}; {counts}; {resources}"
