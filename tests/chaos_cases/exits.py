"""Part 3: a process can end, or be interrupted, at any time: no abort, no hang of more than 5 s."""

import signal
import sys
import time

import torch

from .harness import Run, case, check
from .worker import Worker, hang, value

LIMIT_S = 5.0  # from the end of the program, or the signal, to the end of the process


def serve(worker: Worker) -> None:
    worker.init()
    worker.wait_for_command("end")
    worker.rpc.shutdown(graceful=False)


def ends(run: Run, first_function, codes: tuple[int, ...], number: signal.Signals | None = None, **options) -> str:
    """Check how the first worker ends after its event "last", perhaps by a signal."""
    first, second = run.group(first_function, serve, **options)
    first.expect("last")
    start = time.monotonic()
    if number:
        time.sleep(0.5)  # until the process has begun to do what the case is about
        start = time.monotonic()
        first.send_signal(number)
    code = first.exit_code(within=LIMIT_S + 3)
    seconds = time.monotonic() - start
    check(
        code in codes and seconds <= LIMIT_S * run.patience,
        f"exit code {code} after {seconds:.1f} s{first.last_error_line()}",
    )
    second.send_command("end")
    return f"exit code {code} after {seconds:.1f} s"


# --- without shutdown ---


def call_self_and_end(worker: Worker) -> None:
    worker.init()
    worker.rpc.rpc_async("worker0", hang)
    time.sleep(0.3)  # until the function runs
    worker.report("last")


def call_self_briefly_and_end(worker: Worker) -> None:
    """The functions end while the interpreter shuts down."""
    worker.init()
    for i in range(20):
        worker.rpc.rpc_async("worker0", hang, args=(0.5 + i / 10,))
    time.sleep(0.3)  # until the functions run
    worker.report("last")


def call_peer_and_end(worker: Worker) -> None:
    worker.init()
    worker.futures = [worker.rpc.rpc_async("worker1", hang), worker.rpc.remote("worker1", hang)]
    time.sleep(0.3)  # until the functions run
    worker.report("last")


def init_and_end(worker: Worker) -> None:
    worker.init()
    worker.rpc.rpc_sync("worker1", value)
    worker.report("last")


def raise_at_the_end(worker: Worker) -> None:
    call_peer_and_end(worker)
    raise ValueError("injected")


def exit_in_a_call(worker: Worker) -> None:
    call_self_and_end(worker)
    sys.exit(3)


def serve_and_end(worker: Worker) -> None:
    worker.init()
    worker.rpc.rpc_sync("worker1", call_back)
    time.sleep(0.5)  # the call back is served meanwhile
    worker.report("last")


def call_back() -> None:
    module = sys.modules.get("torchrpc.rpc") or sys.modules["torch.distributed.rpc"]
    module.rpc_async("worker0", hang)


def exit_case(name: str, function, codes: tuple[int, ...]) -> None:
    case(name, limit=30)(lambda run: ends(run, function, codes))


exit_case("end without shutdown()", init_and_end, (0,))
exit_case("end with a call to itself outstanding", call_self_and_end, (0,))
exit_case("end with calls to itself that end meanwhile", call_self_briefly_and_end, (0,))
exit_case("end with calls to a peer outstanding", call_peer_and_end, (0,))
exit_case("end while a peer's call runs here", serve_and_end, (0,))
exit_case("end by an exception, calls outstanding", raise_at_the_end, (1,))
exit_case("sys.exit(3), a call to itself outstanding", exit_in_a_call, (3,))


# --- signals ---


def in_call(worker: Worker) -> None:
    worker.init()
    worker.report("last")
    worker.rpc.rpc_sync("worker1", hang)


def in_future(worker: Worker) -> None:
    worker.init()
    future = worker.rpc.rpc_async("worker1", hang)
    worker.report("last")
    future.wait()


def in_wait_all(worker: Worker) -> None:
    worker.init()
    futures = [worker.rpc.rpc_async("worker1", hang) for _ in range(3)]
    worker.report("last")
    torch.futures.wait_all(futures)


def in_fetch(worker: Worker) -> None:
    worker.init()
    rref = worker.rpc.remote("worker1", hang)
    worker.report("last")
    rref.to_here()


def in_own_fetch(worker: Worker) -> None:
    worker.init()
    rref = worker.rpc.remote("worker0", hang)
    worker.report("last")
    rref.to_here()


class HangsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        time.sleep(1000)  # the function under test hangs
        return grad


def hanging_sum(x: torch.Tensor) -> torch.Tensor:
    return HangsInBackward.apply(x).sum()


def in_backward(worker: Worker) -> None:
    worker.init()
    x = torch.ones(2, requires_grad=True)
    with worker.autograd.context() as context:
        loss = worker.rpc.rpc_sync("worker1", hanging_sum, args=(x,))
        worker.report("last")
        worker.autograd.backward(context, [loss])


class SlowSGD(torch.optim.SGD):
    def step(self, *args):
        time.sleep(1000)  # the function under test hangs


def parameter() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def in_step(worker: Worker) -> None:
    worker.init()
    rref = worker.rpc.remote("worker1", parameter)
    rref.to_here()
    optimizer = worker.optimizer.DistributedOptimizer(SlowSGD, [rref], lr=0.1)
    with worker.autograd.context() as context:
        worker.report("last")
        optimizer.step(context)


def in_shutdown(worker: Worker) -> None:
    worker.init()
    worker.report("last")
    worker.rpc.shutdown()


def in_shutdown_serving(worker: Worker) -> None:
    """A function of this worker still runs."""
    worker.init()
    worker.rpc.rpc_async("worker0", hang)
    time.sleep(0.3)  # until the function runs
    worker.report("last")
    worker.rpc.shutdown()


INTERRUPTED = (130, 1, -signal.SIGINT)
WAITS = {
    "rpc_sync": in_call,
    "future.wait()": in_future,
    "wait_all": in_wait_all,
    "to_here()": in_fetch,
    "to_here() of a local RRef": in_own_fetch,
    "backward": in_backward,
    "an optimizer's step": in_step,
    "shutdown()": in_shutdown,
    "shutdown() while a function runs here": in_shutdown_serving,
}
for name, function in WAITS.items():
    case(f"Ctrl-C in {name}", limit=30)(
        lambda run, function=function: ends(run, function, INTERRUPTED, signal.SIGINT, rpc_timeout=600)
    )
case("SIGTERM in rpc_sync", limit=30)(
    lambda run: ends(run, in_call, (-signal.SIGTERM,), signal.SIGTERM, rpc_timeout=600)
)


# --- several groups in a process ---


def init_again(worker: Worker) -> None:
    worker.init()
    for _ in range(5 + int(45 * worker.scale)):
        worker.rpc.rpc_sync(f"worker{1 - worker.rank}", value)
        worker.rpc.shutdown()
        worker.init()
    worker.rpc.shutdown()
    worker.report("last", open_files())


def open_files() -> int:
    import os

    return len(os.listdir("/proc/self/fd"))


@case("init, shutdown, init again on one port, many times", limit=120)
def again(run: Run) -> str:
    first, second = run.group(init_again, init_again)
    files = [process.expect("last", within=100) for process in (first, second)]
    check(max(files) < 60, f"{files} files are open at the end")
    for process in (first, second):
        check(process.exit_code(within=10) == 0, f"{process.name} ends with {process.popen.returncode}")
    return f"{files} files open at the end"
