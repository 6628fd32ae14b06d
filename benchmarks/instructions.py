"""Counts the instructions that one call executes on the caller and on the callee, with all threads and Python.

    python benchmarks/instructions.py [--systems torch,torchrpc] [--calls 300] [--keep DIRECTORY]
    python benchmarks/instructions.py --systems metrics --inside 'CallMetrics::on'   # of which in these functions

Uses the processor's instruction counter through perf if it is available, otherwise callgrind (valgrind), which takes a
minute or two to start a process. The default transport is TCP, where a waiting thread executes nothing (torchrpc is set
not to spin); over shared memory the counts would include TensorPipe's polling. With --keep, callgrind's profiles are
kept for callgrind_annotate or KCachegrind. Only instructions in user space are counted. Counts of perf vary by a few
percent, those of callgrind by less.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("compare")))
from systems import KNOWN, TRANSPORTS, free_ports

CALLS = {
    "torch.add": "rpc_sync of torch.add, two tensors of 4 floats",
    "python": "rpc_sync of a Python function, the same tensors",
    "many torch.add": "rpc_async of torch.add, all at once",
    "many python": "rpc_async of the Python function, all at once",
    "autograd": "torch.add of two tensors of 4 floats that require a gradient, then backward",
}


# --- the two processes -----------------------------------------------------------------------------------------------
def add(a, b):
    return a + b


def serve(rank: int, port: int, transport: dict) -> None:
    """Run a worker. For each line of its input, worker0 makes the calls that the line names, then prints "done"."""
    import torch
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc

    torch.set_num_threads(1)
    method = f"tcp://127.0.0.1:{port}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=method, rpc_timeout=600, **transport)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    arguments = torch.ones(4), torch.ones(4)
    parameters = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)

    def differentiate() -> None:
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("worker1", torch.add, args=parameters).sum()
            dist_autograd.backward(context, [loss])

    functions = {"torch.add": torch.add, "python": add}
    if rank == 0:
        print("ready", rpc.rpc_sync.__module__, flush=True)
        for line in sys.stdin:
            name, count = line.rsplit(maxsplit=1)
            if name == "autograd":
                for _ in range(int(count)):
                    differentiate()
                print("done", flush=True)
                continue
            many, function = name.startswith("many "), functions[name.removeprefix("many ")]
            call = rpc.rpc_async if many else rpc.rpc_sync
            made = [call("worker1", function, args=arguments) for _ in range(int(count))]
            if many:
                torch.futures.wait_all(made)
            print("done", flush=True)
    rpc.shutdown()


# --- the two counters ------------------------------------------------------------------------------------------------
class Perf:
    name, event = "perf", "instructions:u"

    def __init__(self, _directory: Path):
        self.pids: list[int] = []
        self.running: list[subprocess.Popen] = []

    @classmethod
    def works(cls) -> bool:
        if not shutil.which("perf"):
            return False
        run = subprocess.run(["perf", "stat", "-x,", "-e", cls.event, "true"], capture_output=True, text=True)
        return run.returncode == 0 and bool(re.search(r"^\d+,", run.stderr, re.M))

    def command(self, _rank: int) -> list[str]:
        return []

    def attach(self, pids: list[int]) -> None:
        self.pids = pids

    def start(self) -> None:
        command = ["perf", "stat", "-x,", "-e", self.event, "-p"]
        self.running = [subprocess.Popen([*command, str(pid)], stderr=subprocess.PIPE, text=True) for pid in self.pids]
        time.sleep(0.5)  # perf needs time to attach; the workers are idle meanwhile

    def stop(self) -> list[int]:
        for process in self.running:
            process.send_signal(signal.SIGINT)
        outputs = [process.communicate()[1] for process in self.running]
        return [int(float(re.search(r"^([\d.]+),", output, re.M)[1])) for output in outputs]


class Callgrind:
    name = "callgrind"

    def __init__(self, directory: Path):
        self.directory = directory
        self.pids: list[int] = []

    @classmethod
    def works(cls) -> bool:
        return bool(shutil.which("valgrind") and shutil.which("callgrind_control"))

    def command(self, rank: int) -> list[str]:
        out = f"--callgrind-out-file={self.directory}/callgrind.worker{rank}"
        return ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", "--fair-sched=yes", out]

    def attach(self, pids: list[int]) -> None:
        self.pids = pids
        self._control("--instr=on")  # never turned off again: with threads, later counts would be wrong

    def start(self) -> None:
        self._control("--zero")

    def stop(self) -> list[int]:
        before = set(self.directory.iterdir())
        self._control("--dump")
        new = sorted(set(self.directory.iterdir()) - before)  # worker0's, then worker1's
        return [int(re.search(r"^summary: (\d+)", path.read_text(), re.M)[1]) for path in new]

    def inside(self, functions: str, number: int) -> list[int]:
        """Return the instructions in functions whose names match, and in their callees: worker0's, then worker1's."""
        counts = []
        for rank in range(2):
            profile = self.directory / f"callgrind.worker{rank}.{number}"
            command = ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(profile)]
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found = re.finditer(rf"^ *([\d,]+) \([^)]*\) +\S*:[^(\n]*(?:{functions})", lines, re.M)
            counts.append(sum(int(match[1].replace(",", "")) for match in found))
        return counts

    def _control(self, option: str) -> None:
        for pid in self.pids:
            subprocess.run(["callgrind_control", option, str(pid)], check=True, capture_output=True, timeout=60)


# --- counting --------------------------------------------------------------------------------------------------------
def count(system: str, transport: str, calls: int, counter) -> dict[str, list[float]]:
    """Return the instructions per call of the caller and the callee, for each of CALLS."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHRPC_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TORCHRPC_SPIN_US": "0", **KNOWN[system].environment}
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(2):
            options = json.dumps(KNOWN[system].options(transport))
            command = [sys.executable, __file__, "--serve", str(rank), str(port), options]
            process = subprocess.Popen(
                [*counter.command(rank), *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            processes.append(process)
        caller = processes[0]
        expect(caller, "ready torchrpc" if KNOWN[system].is_torchrpc else "ready torch.")
        counter.attach([process.pid for process in processes])
        counts = {}
        for name in CALLS:
            make(caller, name, 50)
            counter.start()
            make(caller, name, calls)
            counts[name] = [total / calls for total in counter.stop()]
        caller.stdin.close()
        for process in processes:
            process.wait(60)
        return counts


def make(caller: subprocess.Popen, name: str, calls: int) -> None:
    print(name, calls, file=caller.stdin, flush=True)
    expect(caller, "done")


def expect(caller: subprocess.Popen, start: str) -> None:
    line = caller.stdout.readline()
    if not line.startswith(start):
        sys.exit(f"worker0 should have printed {start!r}, but printed {line!r}")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
        return
    counters = {each.name: each for each in (Perf, Callgrind) if each.works()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--systems", default="torch,torchrpc", help="a list of torch, torchrpc, tensorpipe (%(default)s)"
    )
    parser.add_argument(
        "--calls", type=int, default=300, help="the number of calls of each kind to count (%(default)s)"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="tcp")
    parser.add_argument("--counter", choices=counters, default=next(iter(counters), None))
    parser.add_argument("--keep", type=Path, help="an empty directory to keep callgrind's profiles in")
    parser.add_argument("--inside", metavar="REGEX", help="also count what these functions execute; needs callgrind")
    arguments = parser.parse_args()
    if arguments.inside and arguments.counter != Callgrind.name:
        parser.error("--inside needs callgrind")
    if not counters:
        parser.error("needs perf with an instruction counter, or valgrind; neither is available")
    with tempfile.TemporaryDirectory() as temporary:
        print(f"instructions per call, {arguments.transport}, {arguments.counter}, {arguments.calls} calls\n")
        print("| system | call | caller | callee | both |\n|-|-|-|-|-|")
        for system in arguments.systems.split(","):
            directory = (arguments.keep or Path(temporary)) / system
            directory.mkdir(parents=True)
            counter = counters[arguments.counter](directory)
            counts = count(system, arguments.transport, arguments.calls, counter)
            for number, (name, (caller, callee)) in enumerate(counts.items(), 1):
                row = [system, CALLS[name], f"{caller:,.0f}", f"{callee:,.0f}", f"{caller + callee:,.0f}"]
                if arguments.inside:
                    inside = sum(counter.inside(arguments.inside, number)) / arguments.calls
                    row.append(f"{inside:,.0f} inside, {inside / (caller + callee - inside):.2%} of the rest")
                print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
