"""The calls that are counted, and the two workers that make and serve them. A Group starts: python calls.py JSON"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "compare"))
from systems import KNOWN, free_ports

ROWS = {
    "torch.add": "rpc_sync of torch.add, two tensors of 4 floats",
    "nothing": "rpc_sync of a Python function, nothing in or out",
    "tensors": "rpc_sync of a Python function, two tensors of 4 floats",
    "dict": "the same with a dict of ints, lists, a tensor",
    "many torch.add": "rpc_async of torch.add, 2,000 at once",
    "many nothing": "rpc_async of a Python function, nothing in or out, 2,000 at once",
    "to oneself": "rpc_sync of a Python function, nothing in or out, to the caller itself",
    "remote": "remote of a Python function, then to_here",
    "method": "rref.rpc_sync() of a method",
    "autograd fast": "autograd: one torch.add forward and backward, mode fast",
    "autograd smart": "the same, mode smart",
    "cpp function": "C++: call of a function, an int in and out",
    "cpp tensors": "C++: call of a function, two tensors of 4 floats",
    "cpp remote": "C++: remote of a function, then toHere",
    "cpp method": "C++: call of a method of an RRef",
}
BURST = 2000
CPP_WORKER = Path(__file__).parents[2] / "build/release/tests/cpp/torchrpc_costs"  # `make test` builds it


def is_cpp(row: str) -> bool:
    return row.startswith("cpp ")


def nothing() -> None:
    pass


def add(a, b):
    return a + b


def echo(value):
    return value


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def increment(self) -> int:
        self.value += 1
        return self.value


def serve(rank: int, port: int, options: dict) -> None:
    """Run a worker. For each line of its input, worker0 makes the calls that the line names, then prints "done"."""
    import gc

    import torch
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc

    torch.set_num_threads(1)
    # The threads of a worker share a core. On several, the scheduler decides how often they find each other waiting.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    method = f"tcp://127.0.0.1:{port}"
    rpc_options = rpc.TensorPipeRpcBackendOptions(init_method=method, rpc_timeout=600, **options)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc_options)
    pair = torch.ones(4), torch.ones(4)
    parameters = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    data = {"ints": [1, 2, 3], "lists": [[1, 2], [3]], "tensor": torch.ones(4)}

    def differentiate(**mode) -> None:
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("worker1", torch.add, args=parameters).sum()
            dist_autograd.backward(context, [loss], **mode)

    def burst(function, arguments) -> None:
        torch.futures.wait_all([rpc.rpc_async("worker1", function, args=arguments) for _ in range(BURST)])

    if rank == 0:
        counter = rpc.remote("worker1", Counter)
        functions: dict[str, Callable[[], object]] = {
            "torch.add": lambda: rpc.rpc_sync("worker1", torch.add, args=pair),
            "nothing": lambda: rpc.rpc_sync("worker1", nothing),
            "tensors": lambda: rpc.rpc_sync("worker1", add, args=pair),
            "dict": lambda: rpc.rpc_sync("worker1", echo, args=(data,)),
            "many torch.add": lambda: burst(torch.add, pair),
            "many nothing": lambda: burst(nothing, ()),
            "to oneself": lambda: rpc.rpc_sync("worker0", nothing),
            "remote": lambda: rpc.remote("worker1", nothing).to_here(),
            "method": lambda: counter.rpc_sync().increment(),
            "autograd fast": differentiate,
            "autograd smart": lambda: differentiate(mode="smart"),
        }
        print("ready", rpc.rpc_sync.__module__, torch.__version__, flush=True)
        for line in sys.stdin:
            name, calls = line.rsplit(maxsplit=1)
            function = functions[name]
            gc.collect()
            for _ in range(int(calls)):
                function()
            print("done", flush=True)
        del counter
    else:
        sys.stdin.read()
    rpc.shutdown()


class Group:
    """Two workers of a system, each started with a command before it and variables beside its environment.

    `in_cpp`: they make the rows of C++ calls, or else those of Python's.
    """

    def __init__(
        self, system: str, transport: str, in_cpp: bool, before: Callable[[int], list[str]], variables: dict[str, str]
    ):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHRPC_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TORCHRPC_SPIN_US": "0"}
        environment |= {**KNOWN[system].environment, **variables}
        (port,) = free_ports(1)
        options = KNOWN[system].options("tcp" if transport == "tcp" else "default")
        self.processes = []
        for rank in range(2):
            command = [sys.executable, __file__, json.dumps([rank, port, options])]
            if in_cpp:
                command = [str(CPP_WORKER), str(rank), str(port), options.get("transport", "")]
            self.processes.append(
                subprocess.Popen(
                    [*before(rank), *command], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        self.torch = self._expect("ready torchrpc" if KNOWN[system].is_torchrpc else "ready torch.").split()[-1]

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def make(self, row: str, calls: int) -> int:
        """Make at least so many calls of a row, whole bursts of those that are made in bursts; return the number."""
        burst = BURST if row.startswith("many ") else 1
        rounds = -(-calls // burst)
        print(row, rounds, file=self.processes[0].stdin, flush=True)
        self._expect("done")
        return rounds * burst

    def _expect(self, start: str) -> str:
        line = self.processes[0].stdout.readline()
        if not line.startswith(start):
            sys.exit(f"worker0 should have printed {start!r}, but printed {line!r}")
        return line.strip()


def rows_of(system: str) -> Iterator[str]:
    """Yield the rows of a system. Those of C++ need their program, and a system without options of Python."""
    for row in ROWS:
        if is_cpp(row):
            if KNOWN[system].is_torchrpc and not KNOWN[system].has_certificate and CPP_WORKER.exists():
                yield row
        elif KNOWN[system].is_torchrpc or row != "autograd smart":
            yield row


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
