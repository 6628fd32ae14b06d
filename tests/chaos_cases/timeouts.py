"""Part 2: time-outs are exceptions, and RPC remains usable after them."""

import contextlib
import time

import torch

from .harness import Run, case, check
from .worker import Worker, finish, serve

SLOW_S = 3.0
NESTED_S = 6.0


def slow(seconds: float = SLOW_S) -> torch.Tensor:
    time.sleep(seconds)  # the function under test is slow
    return torch.ones(1)


class SlowModule:
    def answer(self) -> int:
        time.sleep(SLOW_S)  # the function under test is slow
        return 42

    def quick(self) -> int:
        return 7


def limited(run: Run, first_function, limit: float = 15) -> dict:
    """Return the outcome "seen" of `first_function`; check that calls and the shutdown work afterwards."""
    first, second = run.group(first_function, serve)
    first.expect("ready"), second.expect("ready")
    seen = first.expect("seen", within=limit)
    usable = first.expect("usable", within=limit)
    check(not usable["type"], f"afterwards a call fails: {usable['text']}")
    second.send_command("end")
    for process in (first, second):
        outcome = process.expect("end", within=limit)
        check(not outcome["type"], f"{process.name}'s shutdown fails: {outcome['text']}")
        check(process.exit_code(within=5) == 0, f"{process.name} ends with {process.popen.returncode}")
    return seen


def timed_out(outcome: dict, most_s: float = SLOW_S) -> str:
    check(outcome["type"], f"no error: {outcome['text']}")
    check("timed out" in outcome["text"] or "set timeout" in outcome["text"], outcome["text"][:100])
    check(outcome["seconds"] < most_s, f"only after {outcome['seconds']:.1f} s")
    return f"{outcome['type']} after {outcome['seconds']:.2f} s"


def try_and_finish(worker: Worker) -> None:
    worker.outcome("usable", lambda: worker.rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1), timeout=10))
    finish(worker)


def remote_then_fetch(to: str):
    def run(worker: Worker) -> None:
        worker.init()
        rref = worker.rpc.remote(to, slow, timeout=0.1)
        time.sleep(0.5)  # longer than the time-out
        worker.outcome("seen", rref.to_here)
        try_and_finish(worker)

    run.__name__ = f"remote_to_{to}"
    return run


remote_to_worker0 = remote_then_fetch("worker0")
remote_to_worker1 = remote_then_fetch("worker1")


@case("remote(timeout=0.1) of a slow function, then to_here(), owner is the caller")
def remote_to_self(run: Run) -> str:
    return timed_out(limited(run, remote_to_worker0))


@case("remote(timeout=0.1) of a slow function, then to_here(), owner is a peer")
def remote_to_peer(run: Run) -> str:
    return timed_out(limited(run, remote_to_worker1))


def remote_only(worker: Worker) -> None:
    worker.init()
    rref = worker.rpc.remote("worker1", slow, timeout=0.1)
    worker.outcome("seen", lambda: time.sleep(0.5))  # longer than the time-out
    try_and_finish(worker)
    del rref


@case("remote(timeout=0.1) of a slow function, then shutdown")
def remote_then_shutdown(run: Run) -> str:
    limited(run, remote_only)
    return "both leave"


def fetch_with_timeout(worker: Worker) -> None:
    worker.init()
    rref = worker.rpc.remote("worker1", slow)
    worker.outcome("seen", lambda: rref.to_here(timeout=0.2))
    assert rref.to_here(timeout=20).item() == 1  # the value arrives nevertheless
    try_and_finish(worker)


@case("to_here(timeout=0.2), then to_here() again")
def fetch(run: Run) -> str:
    return timed_out(limited(run, fetch_with_timeout)) + ", then the value"


def call_with_timeout(worker: Worker) -> None:
    worker.init()
    worker.outcome("seen", lambda: worker.rpc.rpc_sync("worker1", slow, args=(1.0,), timeout=0.2))
    answers = [worker.rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), i)).item() for i in range(200)]
    time.sleep(1.2)  # the late reply arrives
    answers += [worker.rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), i)).item() for i in range(200)]
    assert answers == [i + 1.0 for i in range(200)] * 2
    try_and_finish(worker)


@case("rpc_sync(timeout=0.2); its late reply completes no other call")
def late_answer(run: Run) -> str:
    return timed_out(limited(run, call_with_timeout)) + ", 400 right answers"


def proxy_with_timeout(worker: Worker) -> None:
    worker.init()
    rref = worker.rpc.remote("worker1", SlowModule)
    worker.outcome("seen", lambda: rref.rpc_sync(timeout=0.3).answer())
    assert rref.rpc_sync().quick() == 7
    try_and_finish(worker)


@case("a proxy's method (timeout=0.3)")
def proxy(run: Run) -> str:
    return timed_out(limited(run, proxy_with_timeout)) + ", then usable"


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        time.sleep(SLOW_S)  # the function under test is slow
        return grad


def slow_sum(x: torch.Tensor) -> torch.Tensor:
    return SlowBackward.apply(x).sum()


def backward_with_timeout(worker: Worker) -> None:
    worker.init()
    worker.rpc._set_rpc_timeout(0.5)
    x = torch.ones(2, requires_grad=True)
    keywords = {} if worker.is_torch else {"mode": "fast"}
    with worker.autograd.context() as context:
        loss = worker.rpc.rpc_sync("worker1", slow_sum, args=(x,), timeout=10)
        worker.outcome("seen", lambda: worker.autograd.backward(context, [loss], **keywords))
    with worker.autograd.context() as context:
        loss = worker.rpc.rpc_sync("worker1", torch.add, args=(x, x), timeout=10).sum()
        worker.autograd.backward(context, [loss])
        assert worker.autograd.get_gradients(context)[x].tolist() == [2, 2]
    try_and_finish(worker)


@case("backward with rpc_timeout=0.5 and a slow function on the way")
def backward(run: Run) -> str:
    return timed_out(limited(run, backward_with_timeout)) + ", the next pass is right"


def unused_result(worker: Worker) -> None:
    worker.init(rpc_timeout=2)
    x = torch.ones(2, requires_grad=True)
    with worker.autograd.context() as context:
        worker.rpc.rpc_sync("worker1", torch.mul, args=(x, x))
        loss = worker.rpc.rpc_sync("worker1", torch.add, args=(x, x)).sum()
        worker.outcome("seen", lambda: worker.autograd.backward(context, [loss]))
    try_and_finish(worker)


@case("backward of a loss that does not use a call's result")
def unused(run: Run) -> str:
    outcome = limited(run, unused_result)
    check(not outcome["type"], outcome["text"])
    return f"gradients after {outcome['seconds']:.2f} s"


def nested(seconds: float) -> float:
    """Runs on worker1: measure how long its own call to worker0 takes."""
    import sys

    rpc = sys.modules.get("torchrpc.rpc") or sys.modules["torch.distributed.rpc"]
    start = time.monotonic()
    with contextlib.suppress(RuntimeError):
        rpc.rpc_sync("worker0", time.sleep, args=(seconds,))
    NESTED.append(time.monotonic() - start)
    time.sleep(min(seconds, 0.2))  # no answer at the moment of its caller's deadline
    return NESTED[-1]


NESTED: list[float] = []


def all_nested() -> list[float]:
    return NESTED


def call_nested(worker: Worker) -> None:
    worker.init(propagate_deadlines=True)
    worker.rpc.rpc_sync("worker1", nested, args=(0,))  # so that the next call begins at once
    worker.outcome("seen", lambda: worker.rpc.rpc_sync("worker1", nested, args=(NESTED_S,), timeout=2))
    end = time.monotonic() + 2 * NESTED_S
    while len(inner := worker.rpc.rpc_sync("worker1", all_nested)) < 2 and time.monotonic() < end:
        time.sleep(0.05)  # the inner call ends by its deadline
    assert len(inner) == 2 and inner[-1] < NESTED_S, inner
    try_and_finish(worker)


@case("propagate_deadlines: a nested call ends with its caller's deadline", systems=("torchrpc",))
def deadlines(run: Run) -> str:
    return timed_out(limited(run, call_nested), NESTED_S) + ", the nested call with it"
