"""A worker of a case: `python -m chaos_cases.worker SPEC` runs one function of the case's module.

It runs on torchrpc or on torch's own RPC; `Worker.rpc` and `Worker.autograd` are the modules of that system.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch


class Worker:
    """The argument of a case's functions: the worker's rank and options, and its pipe to the case."""

    def __init__(self, spec: dict) -> None:
        self.system, self.rank, self.size, self.scale = (spec[key] for key in ("system", "rank", "size", "scale"))
        self.options = spec["options"]
        self.name = f"worker{self.rank}"
        self.is_torch = self.system == "torch"
        base = "torch.distributed" if self.is_torch else "torchrpc"
        self.rpc: Any = importlib.import_module(f"{base}.rpc")
        self.autograd: Any = importlib.import_module(f"{base}.autograd")

    @property
    def optimizer(self) -> Any:
        return importlib.import_module("torch.distributed.optim" if self.is_torch else "torchrpc.optim")

    def init(self, **more: Any) -> None:
        options = {"rpc_timeout": 60, **self.options, **more}
        self.rpc.init_rpc(
            self.name,
            rank=self.rank,
            world_size=self.size,
            rpc_backend_options=self.rpc.TensorPipeRpcBackendOptions(**options),
        )
        self.report("ready", os.getpid())

    def report(self, event: str, value: Any = None) -> None:
        """Send an event to the case, as a line of JSON on stdout."""
        print(json.dumps({"event": event, "value": value}), flush=True)

    def wait_for_command(self, command: str) -> None:
        """Block until the case sends the command."""
        for line in sys.stdin:
            if line.strip() == command:
                return
        os._exit(7)  # the case's process has ended

    def outcome(self, event: str, call: Callable[[], Any]) -> None:
        """Report the outcome of a call: the type and text of its error (or its result), the seconds it took."""
        start = time.monotonic()
        try:
            outcome = {"type": "", "text": repr(call())[:80], "worker": ""}
        except Exception as exc:
            outcome = {"type": type(exc).__name__, "text": str(exc), "worker": getattr(exc, "worker", "")}
        self.report(event, {**outcome, "seconds": time.monotonic() - start})


def serve(worker: Worker) -> None:
    """Serve calls until the case sends "end"."""
    worker.init()
    worker.wait_for_command("end")
    finish(worker)


def finish(worker: Worker) -> None:
    """Shut down and report the outcome."""
    worker.outcome("end", worker.rpc.shutdown)


# --- functions that workers call on each other ---


def hang(seconds: float = 1000) -> None:
    time.sleep(seconds)  # the function under test hangs


def value() -> torch.Tensor:
    return torch.ones(2)


def memory_mib() -> float:
    """Return the resident memory of this process, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def main() -> None:
    spec = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    torch.set_num_threads(1)
    worker = Worker(spec)
    function = getattr(importlib.import_module(spec["module"]), spec["function"])
    try:
        function(worker)
    except Exception as exc:
        traceback.print_exc()
        print(json.dumps({"event": "failed", "error": f"{type(exc).__name__}: {exc}"[:300]}), flush=True)
        raise


if __name__ == "__main__":
    main()
