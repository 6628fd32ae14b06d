"""Rows between two workers: latency, throughput, large tensors, RRefs, autograd, processor time, memory.

Each session has fresh processes, and no other part of the benchmark runs at the same time.
"""

import concurrent.futures
import os
import statistics
import time

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from rows import CPU_SECONDS, MEBIBYTES, PERCENT, RATE, Meter, row

PEER = "worker1"
A, B = torch.ones(4), torch.full((4,), 2.0)
MIB = 1 << 18  # floats


def nothing():
    pass


def add(a, b):
    return a + b


def echo(x):
    return x


def mixed(data):
    return {"seen": len(data["ids"]), "data": data}


class Counter:
    def __init__(self):
        self.values = torch.zeros(1000)

    def get(self):
        return self.values


# --- one call at a time ---------------------------------------------------------------------------------------------
@row("rpc_sync of torch.add, two tensors of 4 floats", "calls", targets=(10, 5))
def builtin_call(meter: Meter):
    return meter.latency(lambda: rpc.rpc_sync(PEER, torch.add, args=(A, B)))


@row("a Python function, nothing in or out", "calls", targets=(8, 5), other=lambda m, peer: m.latency(peer.nothing))
def empty_call(meter: Meter):
    return meter.latency(lambda: rpc.rpc_sync(PEER, nothing))


@row("the same by rpc_async and wait()", "calls", targets=(8, 5))
def waited_call(meter: Meter):
    return meter.latency(lambda: rpc.rpc_async(PEER, nothing).wait())


@row("a Python function, two tensors of 4 floats", "calls", targets=(8, 6), other=lambda m, peer: m.latency(peer.add))
def tensor_call(meter: Meter):
    return meter.latency(lambda: rpc.rpc_sync(PEER, add, args=(A, B)))


@row("the same with a dict of ints, lists, a tensor", "calls", targets=(8, 6))
def mixed_call(meter: Meter):
    data = {"ids": list(range(20)), "step": 7, "rate": 0.1, "names": ["a", "b"], "x": A}
    return meter.latency(lambda: rpc.rpc_sync(PEER, mixed, args=(data,)))


@row("torch.add on oneself", "self", targets=(20, 20))
def builtin_call_to_self(meter: Meter):
    return meter.latency(lambda: rpc.rpc_sync("worker0", torch.add, args=(A, B)))


@row("a Python function on oneself", "self", targets=(20, 20))
def call_to_self(meter: Meter):
    return meter.latency(lambda: rpc.rpc_sync("worker0", add, args=(A, B)))


# --- tensors --------------------------------------------------------------------------------------------------------
def _echo_row(size, floats, targets=()):
    def other_echo(meter: Meter, peer):
        x = torch.ones(floats)
        return meter.latency(lambda: peer.echo(x))

    @row(f"echo of a tensor of {size}", "tensors", targets=targets, other=other_echo)
    def echo_call(meter: Meter):
        x = torch.ones(floats)
        return meter.latency(lambda: rpc.rpc_sync(PEER, echo, args=(x,)))


_echo_row("64 KiB", MIB // 16)
_echo_row("256 KiB", MIB // 4)
_echo_row("1 MiB", MIB, (2.5, 1.5))
_echo_row("16 MiB", 16 * MIB, (3, 2.5))
_echo_row("64 MiB", 64 * MIB, (3, 2))


@row("echo of a list of 1,000 tensors of 16 floats", "lists")
def many_tensors(meter: Meter):
    tensors = [torch.ones(16) for _ in range(1000)]
    return meter.latency(lambda: rpc.rpc_sync(PEER, echo, args=(tensors,)))


@row("the last of 20 echoes of 1 MiB sent at once", "lists")
def buckets(meter: Meter):
    tensors = [torch.ones(MIB) for _ in range(20)]
    return meter.latency(lambda: torch.futures.wait_all([rpc.rpc_async(PEER, echo, args=(x,)) for x in tensors]))


# --- many at once ---------------------------------------------------------------------------------------------------
@row(
    "2,000 rpc_async at once, a Python function",
    "async",
    unit=RATE,
    targets=(12, 10),
    other=lambda m, peer: m.rate(peer.many, 2000),
)
def many_calls(meter: Meter):
    return meter.rate(lambda n: torch.futures.wait_all([rpc.rpc_async(PEER, nothing) for _ in range(n)]), 2000)


@row("2,000 rpc_async at once, torch.add", "async", unit=RATE, targets=(15, 15))
def many_builtin_calls(meter: Meter):
    def burst(n):
        torch.futures.wait_all([rpc.rpc_async(PEER, torch.add, args=(A, B)) for _ in range(n)])

    return meter.rate(burst, 2000)


def work(seconds):
    """Keep the processor busy for `seconds`; return the time that it took."""
    begin = time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        pass
    return spent


@row("what a call adds to a function of 1 ms, 1 ms after the last", "pauses")
def call_after_pause(meter: Meter):
    added = []
    end = time.perf_counter() + meter.budget
    while time.perf_counter() < end:
        time.sleep(0.001)
        begin = time.perf_counter()
        spent = rpc.rpc_sync(PEER, work, args=(0.001,))
        added.append(time.perf_counter() - begin - spent)
    return statistics.median(added)


waiting: list[torch.futures.Future] = []  # on the callee


@rpc.functions.async_execution
def reply_later():
    waiting.append(torch.futures.Future())
    return waiting[-1]


def reply_all():
    while waiting:
        waiting.pop().set_result(None)


def _queue_row(count):
    @row(f"a Python function while {count:,} calls wait for their answers", "queue")
    def call_beside_others(meter: Meter):
        others = [rpc.rpc_async(PEER, reply_later) for _ in range(count)]
        while rpc.rpc_sync(PEER, len_waiting) < count:
            time.sleep(0.01)
        try:
            return meter.latency(lambda: rpc.rpc_sync(PEER, nothing))
        finally:
            rpc.rpc_sync(PEER, reply_all)
            torch.futures.wait_all(others)


def len_waiting():
    return len(waiting)


for _count in (0, 100, 1000):
    _queue_row(_count)


# --- Threads that call at once --------------------------------------------------------------------------------------
def _threads_row(count, name):
    @row(f"{name} with one rpc_sync after the other, a Python function", "threads", unit=RATE)
    def calls_of_threads(meter: Meter):
        def call(times):
            for _ in range(times):
                rpc.rpc_sync(PEER, nothing)

        def burst(calls):
            futures = [pool.submit(call, calls // count) for _ in range(count)]
            for future in futures:
                future.result()

        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return meter.rate(burst, 2000)


for _count, _name in ((1, "one thread"), (2, "two threads"), (8, "eight threads")):
    _threads_row(_count, _name)


# --- RRefs, autograd ------------------------------------------------------------------------------------------------
@row("remote, then to_here", "rrefs", targets=(8, 5))
def remote_call(meter: Meter):
    return meter.latency(lambda: rpc.remote(PEER, add, args=(A, B)).to_here())


@row("rref.rpc_sync().method() returning 1,000 floats", "rrefs", targets=(8, 6))
def rref_method(meter: Meter):
    counter = rpc.remote(PEER, Counter)
    return meter.latency(lambda: counter.rpc_sync().get())


def _autograd_row(name, function):
    @row(f"autograd: one remote op forward and backward, {name}", "autograd", targets=(8, 5))
    def forward_and_backward(meter: Meter):
        a, b = (torch.ones(4, requires_grad=True) for _ in range(2))

        def once():
            with dist_autograd.context() as context_id:
                loss = rpc.rpc_sync(PEER, function, args=(a, b)).sum()
                dist_autograd.backward(context_id, [loss])

        return meter.latency(once)


_autograd_row("torch.add", torch.add)
_autograd_row("Python", add)


# --- resource usage -------------------------------------------------------------------------------------------------
def resident() -> float:
    """Return the resident memory of this process in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


before_rpc = resident()  # updated by worker.py


def resident_for_rpc() -> float:
    return resident() - before_rpc


def sum_of_both(function):
    return function() + rpc.rpc_sync(PEER, function)


@row("CPU time of both for 10,000 torch.add", "cost", unit=CPU_SECONDS)
def processor_time_of_calls(meter: Meter):
    def run(n):
        for _ in range(n):
            rpc.rpc_sync(PEER, torch.add, args=(A, B))

    used = []

    def measured(n):
        begin = sum_of_both(time.process_time)
        run(n)
        used.append(sum_of_both(time.process_time) - begin)

    count, _ = meter.long_run(measured)
    return used[-1] / count * 10_000


@row("CPU time of a worker that has nothing to do", "cost", unit=PERCENT)
def idle(meter: Meter):
    seconds = max(1.0, 3 * meter.budget)
    begin = sum_of_both(time.process_time)
    time.sleep(seconds)
    return (sum_of_both(time.process_time) - begin) / 2 / seconds * 100


@row("memory of a worker: what init_rpc adds", "memory", unit=MEBIBYTES)
def memory_of_init(meter: Meter):
    return sum_of_both(resident_for_rpc) / 2


@row("memory of a worker: after 10,000 calls", "memory", unit=MEBIBYTES)
def memory_of_calls(meter: Meter):
    for _ in range(10 if meter.budget >= 0.5 else 1):
        torch.futures.wait_all([rpc.rpc_async(PEER, add, args=(A, B)) for _ in range(1000)])
    return sum_of_both(resident_for_rpc) / 2


@row("memory of a worker: after 30 echoes of 16 MiB", "memory", unit=MEBIBYTES)
def memory_of_tensors(meter: Meter):
    x = torch.ones(16 * MIB)
    for _ in range(30):
        rpc.rpc_sync(PEER, echo, args=(x,))
    del x
    return sum_of_both(resident_for_rpc) / 2
