"""Part 1: a worker is killed, stopped, or cut off; everything that depends on it fails, the other workers continue."""

import os
import signal
import subprocess
import time

import torch

from .harness import Process, Run, case, check
from .worker import Worker, finish, hang, serve, value

KILLED_LIMIT_S, STOPPED_LIMIT_S = 5.0, 5.0  # until a loss is reported; the second with liveness_timeout=2


# --- functions that run on the workers ---


def call_until_lost(worker: Worker) -> None:
    worker.init()
    worker.rpc.rpc_sync("worker1", value)
    future = worker.rpc.rpc_async("worker1", hang)
    worker.report("calling")
    worker.outcome("lost", future.wait)
    worker.outcome("other", lambda: worker.rpc.rpc_sync("worker2", value, timeout=10))
    finish(worker)


def hold_until_lost(worker: Worker) -> None:
    """Hold an RRef whose owner never finishes the value."""
    worker.init()
    made = worker.rpc.remote("worker1", value)
    made.to_here()
    rref = worker.rpc.remote("worker1", hang)
    worker.report("calling")
    worker.outcome("lost", lambda: rref.to_here(timeout=60))
    worker.outcome("held", lambda: made.to_here(timeout=10))
    worker.outcome("other", lambda: worker.rpc.rpc_sync("worker2", value, timeout=10))
    finish(worker)


def remote_sum(x: torch.Tensor) -> torch.Tensor:
    return HangsInBackward.apply(x).sum()


class HangsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        time.sleep(1000)  # the function under test hangs
        return grad


def backward_until_lost(worker: Worker) -> None:
    worker.init()
    x = torch.ones(2, requires_grad=True)
    with worker.autograd.context() as context:
        loss = worker.rpc.rpc_sync("worker1", remote_sum, args=(x,))
        worker.report("calling")
        worker.outcome("lost", lambda: worker.autograd.backward(context, [loss]))
    worker.outcome("other", lambda: worker.rpc.rpc_sync("worker2", value, timeout=10))
    finish(worker)


def parameter() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


class SlowSGD(torch.optim.SGD):
    def step(self, *args):
        time.sleep(1000)  # the function under test hangs


def times_two(rref, x: torch.Tensor) -> torch.Tensor:
    return (rref.local_value() * x).sum()


def step_until_lost(worker: Worker) -> None:
    worker.init()
    rref = worker.rpc.remote("worker1", parameter)
    rref.to_here()
    optimizer = worker.optimizer.DistributedOptimizer(SlowSGD, [rref], lr=0.1)
    with worker.autograd.context() as context:
        loss = worker.rpc.rpc_sync("worker1", times_two, args=(rref, torch.ones(2)))
        worker.autograd.backward(context, [loss])
        worker.report("calling")
        worker.outcome("lost", lambda: optimizer.step(context))
    worker.outcome("other", lambda: worker.rpc.rpc_sync("worker2", value, timeout=10))
    finish(worker)


# --- the cases ---


def named(outcome: dict, seconds: float, system: str) -> str:
    """Check for a WorkerLostError that names worker1, within `seconds`."""
    seen = f"{outcome['type'] or 'no error'} after {outcome['seconds']:.1f} s: {outcome['text'][:70]}"
    check(outcome["type"], seen)
    check(outcome["seconds"] <= seconds, seen)
    check("worker1" in outcome["text"], f"no worker is named: {seen}")
    if system == "torchrpc":
        check(outcome["type"] == "WorkerLostError" and outcome["worker"] == "worker1", seen)
    return f"{outcome['type']} after {outcome['seconds']:.2f} s"


def lose(run: Run, survivor, number: signal.Signals) -> str:
    first, victim, third = run.group(survivor, serve, serve)
    for process in (first, victim, third):
        process.expect("ready")
    first.expect("calling")
    time.sleep(0.3)  # until the call is under way
    victim.send_signal(number)
    limit = KILLED_LIMIT_S if number == signal.SIGKILL else STOPPED_LIMIT_S
    seen = named(first.expect("lost", within=limit + 20), limit * run.patience, run.system)
    other = first.expect("other")
    check(not other["type"], f"the other workers cannot call each other: {other['text']}")
    third.send_command("end")
    return f"{seen}; shutdown {ended(first, third, run)}"


def ended(first: Process, third: Process, run: Run) -> str:
    """Check that both survivors shut down in time with an error that names worker1."""
    outcomes = [process.expect("end", within=15) for process in (first, third)]
    for outcome in outcomes:
        check(outcome["seconds"] <= 8 * run.patience, f"shutdown took {outcome['seconds']:.1f} s")
        if run.system == "torchrpc":
            check(
                outcome["type"] == "WorkerLostError" and "worker1" in outcome["text"],
                f"shutdown said: {outcome['text']}",
            )
    for process in (first, third):
        process.exit_code(within=5)
    return f"{max(outcome['seconds'] for outcome in outcomes):.1f} s"


SURVIVORS = {
    "call": call_until_lost,
    "to_here": hold_until_lost,
    "backward": backward_until_lost,
    "optimizer step": step_until_lost,
}

for name, survivor in SURVIVORS.items():
    case(f"killed in {name}", limit=60)(lambda run, survivor=survivor: lose(run, survivor, signal.SIGKILL))
    case(f"stopped in {name}", limit=60)(lambda run, survivor=survivor: lose(run, survivor, signal.SIGSTOP))


@case("a worker with a long job, with or without the GIL, does not count as lost", systems=("torchrpc",))
def busy_is_alive(run: Run) -> str:
    first, second = run.group(call_the_busy, serve, liveness=1)
    second.expect("ready")
    outcome = first.expect("done", within=30)
    check(not outcome["type"], outcome["text"])
    second.send_command("end")
    first.expect("end"), second.expect("end")
    return f"answered after {outcome['seconds']:.1f} s with liveness_timeout=1"


def keep_the_gil(seconds: float) -> None:
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def call_the_busy(worker: Worker) -> None:
    worker.init()

    def call() -> None:
        worker.rpc.rpc_sync("worker1", hang, args=(3,))
        worker.rpc.rpc_sync("worker1", keep_the_gil, args=(3,))

    worker.outcome("done", call)
    finish(worker)


# --- RRefs and contexts of lost workers ---


class Watched:
    alive = 0

    def __init__(self) -> None:
        Watched.alive += 1

    def __del__(self) -> None:
        Watched.alive -= 1


def count_alive() -> int:
    return Watched.alive


def contexts() -> int:
    import sys

    base = "torchrpc" if "torchrpc.rpc" in sys.modules else "torch.distributed"
    autograd = sys.modules[f"{base}.autograd"]
    return int(autograd._get_debug_info()["num_autograd_contexts"])


def hold(worker: Worker) -> None:
    worker.init()
    rref = worker.rpc.remote("worker0", Watched)
    rref.confirmed_by_owner()
    x = torch.ones(2, requires_grad=True)
    with worker.autograd.context():
        worker.rpc.rpc_sync("worker0", torch.add, args=(x, x))
        worker.report("holding")
        worker.wait_for_command("never")


def wait_for_release(worker: Worker) -> None:
    worker.init()
    worker.wait_for_command("check")
    start = time.monotonic()
    while count_alive() + contexts() and time.monotonic() < start + 10:
        time.sleep(0.05)  # what is left after 10 s is reported
    worker.report("left", [count_alive(), contexts(), time.monotonic() - start])
    worker.rpc.shutdown(graceful=False)


def released(run: Run, number: signal.Signals) -> str:
    first, victim = run.group(wait_for_release, hold)
    victim.expect("holding")
    time.sleep(0.3)  # until the other holds the values, too
    victim.send_signal(number)
    first.send_command("check")
    values, open_contexts, seconds = first.expect("left", within=15)
    seen = f"{values} values and {open_contexts} contexts left after {seconds:.1f} s"
    check(values == 0 and open_contexts == 0, seen)
    return seen


@case("RRefs and contexts of a killed worker are released")
def released_of_killed(run: Run) -> str:
    return released(run, signal.SIGKILL)


@case("RRefs and contexts of a stopped worker are released")
def released_of_stopped(run: Run) -> str:
    return released(run, signal.SIGSTOP)


# --- shutdown ---


def leave(worker: Worker) -> None:
    worker.init()
    worker.wait_for_command("end")
    finish(worker)


def shut_down_without(run: Run, number: signal.Signals, victim_rank: int) -> str:
    processes = run.group(leave, leave, leave)
    for process in processes:
        process.expect("ready")
    processes[victim_rank].send_signal(number)
    name = f"worker{victim_rank}"
    survivors = [process for rank, process in enumerate(processes) if rank != victim_rank]
    for process in survivors:
        process.send_command("end")
    seen = []
    for process in survivors:
        outcome = process.expect("end", within=20)
        seen.append(outcome["seconds"])
        check(outcome["seconds"] <= 10 * run.patience, f"{process.name} took {outcome['seconds']:.1f} s")
        if run.system == "torchrpc":
            check(name in outcome["text"], f"{process.name} does not name {name}: {outcome['text']}")
    return f"{max(seen):.1f} s, naming {name}"


for rank in (1, 0):
    role = "worker0, which serves the store and leads," if rank == 0 else "worker1"
    case(f"shutdown with {role} killed")(lambda run, rank=rank: shut_down_without(run, signal.SIGKILL, rank))
    case(f"shutdown with {role} stopped")(lambda run, rank=rank: shut_down_without(run, signal.SIGSTOP, rank))


@case("shutdown waits for a live worker's long job")
def shutdown_waits(run: Run) -> str:
    first, second = run.group(work_at_the_end, leave)
    first.expect("ready"), second.expect("ready")
    second.send_command("end")
    job = first.expect("job", within=20)
    check(not job["type"], f"the job failed: {job['text']}")
    outcome = second.expect("end", within=10)
    check(not outcome["type"], f"shutdown failed: {outcome['text']}")
    return f"{outcome['seconds']:.1f} s, no error"


def work_at_the_end(worker: Worker) -> None:
    worker.init()
    future = worker.rpc.rpc_async("worker1", hang, args=(5,))
    worker.outcome("job", future.wait)
    finish(worker)


# --- restart ---


def member(worker: Worker) -> None:
    """Be a member of a group without a fixed size."""
    worker.init(init_method=worker.options.get("init_method", "env://"))
    worker.wait_for_command("end")
    finish(worker)


def member_with_reference(worker: Worker) -> None:
    worker.init()
    worker.wait_for_command("refer")
    rref = worker.rpc.remote("worker1", value)
    rref.to_here()
    worker.report("refers")
    worker.wait_for_command("call")
    worker.outcome("called", lambda: worker.rpc.rpc_sync("worker1", value, timeout=10))
    worker.outcome("stale", lambda: rref.to_here(timeout=10))
    worker.outcome("fresh", lambda: worker.rpc.remote("worker1", value).to_here(timeout=10))
    finish(worker)


def restart(run: Run, number: signal.Signals) -> str:
    first = run.start(member_with_reference, 0, None)
    first.expect("ready")
    victim = run.start(member, 1, None)
    victim.expect("ready")
    first.send_command("refer")
    first.expect("refers")
    victim.send_signal(number)
    again = run.start(member, 1, None)
    again.expect("ready", within=20)
    first.send_command("call")
    called, stale, fresh = (first.expect(event) for event in ("called", "stale", "fresh"))
    check(not called["type"], f"the new worker1 cannot be called: {called['text']}")
    check(stale["type"] == "WorkerLostError" and "worker1" in stale["text"], f"the old RRef: {stale['text']}")
    check(not fresh["type"], f"a new RRef: {fresh['text']}")
    if number == signal.SIGSTOP:
        victim.send_signal(signal.SIGCONT)  # the old process must not disturb the group
    first.expect("end")
    again.send_command("end")
    left = again.expect("end", within=15)
    check(not left["type"], f"the new worker1 leaves: {left['text']}")
    return "joins under its name; the old RRef says: " + stale["text"][:60]


@case("a killed worker is started again under its name", systems=("torchrpc",))
def restart_killed(run: Run) -> str:
    return restart(run, signal.SIGKILL)


@case("a stopped worker is replaced under its name, then continues", systems=("torchrpc",))
def restart_stopped(run: Run) -> str:
    return restart(run, signal.SIGSTOP)


# --- cut off ---


@case("cut off: the link between two hosts (network namespaces) goes down", limit=60)
def cut_off(run: Run) -> str:
    check(os.geteuid() == 0, "needs root, for network namespaces")
    here, there = f"chaos{os.getpid()}a", f"chaos{os.getpid()}b"
    ip(f"netns add {here}", f"netns add {there}")
    try:
        ip(
            f"link add va netns {here} type veth peer name vb netns {there}",
            *(f"-n {name} link set lo up" for name in (here, there)),
            f"-n {here} addr add 10.9.8.1/24 dev va",
            f"-n {there} addr add 10.9.8.2/24 dev vb",
            f"-n {here} link set va up",
            f"-n {there} link set vb up",
        )
        env = {"MASTER_ADDR": "10.9.8.1"}
        enter = {name: ("ip", "netns", "exec", name) for name in (here, there)}
        first = run.start(call_until_lost, 0, 3, prefix=enter[here], env={**env, **interface("va")})
        victim = run.start(serve, 1, 3, prefix=enter[there], env={**env, **interface("vb")})
        third = run.start(serve, 2, 3, prefix=enter[here], env={**env, **interface("va")})
        first.expect("calling")
        time.sleep(0.3)  # until the call is under way
        ip(f"-n {here} link set va down")
        limit = STOPPED_LIMIT_S
        seen = named(first.expect("lost", within=limit + 20), limit * run.patience, run.system)
        check(not first.expect("other")["type"], "the other workers cannot call each other")
        third.send_command("end")
        victim.send_command("end")
        return f"{seen}; shutdown {ended(first, third, run)}"
    finally:
        ip(f"netns del {here}", f"netns del {there}")


def interface(name: str) -> dict[str, str]:
    return {"TP_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name}


def ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)
