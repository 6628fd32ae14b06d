"""One process of a group. systems.Group starts it as: python worker.py JSON

worker0 writes events to the pipe that it inherits, each as a line of JSON: the installed versions, the start of each
row, and its result or error. The other workers serve calls until worker0 has finished.
"""

import contextlib
import datetime
import json
import os
import platform
import sys
import traceback

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc


def versions() -> dict[str, str]:
    out = {"python": platform.python_version(), "torch": torch.__version__}
    if rpc.rpc_sync.__module__.startswith("torchrpc"):
        import torchrpc

        out["torchrpc"] = getattr(torchrpc, "__version__", "?")
        out["from"] = os.path.dirname(torchrpc.__file__)
    return out


def last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip().splitlines()[-1]


class Worker:
    def __init__(self, rank: int, world_size: int, ports: list[int], options: dict, budget: float, fd: int, **_):
        self.rank, self.world_size, self.ports, self.options, self.budget = rank, world_size, ports, options, budget
        self.pipe = os.fdopen(fd, "w", buffering=1)

    def emit(self, **event) -> None:
        if self.rank == 0:
            print(json.dumps(event), file=self.pipe)

    def measure(self, name: str, run, *arguments) -> None:
        self.emit(begin=name)
        try:
            self.emit(row=name, value=run(*arguments))
        except Exception as error:
            traceback.print_exc()
            self.emit(row=name, error=last_line(error))

    def run_rows(self, rows) -> None:
        """Measure rows that run with RPC initialised."""
        from rows import Meter

        init_method = f"tcp://127.0.0.1:{self.ports[0]}"
        options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, **self.options)
        rpc.init_rpc(f"worker{self.rank}", rank=self.rank, world_size=self.world_size, rpc_backend_options=options)
        if self.rank == 0:
            for row in rows:
                self.measure(row.name, row.run, Meter(self.budget))
        self.emit(done=True)
        rpc.shutdown()

    def run_bare(self, rows) -> None:
        """Measure rows that initialise and shut down RPC themselves, on every worker."""
        from rows import Meter

        timeout = datetime.timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", self.ports[0], self.world_size, self.rank == 0, timeout)
        for row, port in zip(rows, self.ports[1:], strict=False):
            init_method = f"tcp://127.0.0.1:{port}"
            meter = Meter(self.budget, self.rank, self.world_size, init_method, self.options, store)
            self.measure(row.name, row.run, meter)
        self.emit(done=True)

    def run_other(self, kind: str, rows) -> None:
        """Measure rows of a system with another API, which manages its own processes."""
        import adapters
        from rows import Meter

        with contextlib.ExitStack() as stack:
            peer, version = adapters.CONNECT[kind](stack)
            self.emit(versions={**versions(), kind: version})
            for row in rows:
                self.measure(row.name, row.other, Meter(self.budget), peer)
            self.emit(done=True)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    import group_rows  # noqa: F401 - fills ROWS
    import pair_rows
    from rows import ROWS

    pair_rows.before_rpc = pair_rows.resident()
    rows = [ROWS[name] for name in arguments["rows"]]
    worker = Worker(**arguments)
    kind = arguments["kind"]
    if kind != "rpc":
        worker.run_other(kind, rows)
        return
    found = versions()
    if ("torchrpc" in found) != arguments["torchrpc"]:
        sys.exit(f"expected processes {'with' if arguments['torchrpc'] else 'without'} torchrpc, but found {found}")
    worker.emit(versions=found)
    (worker.run_bare if rows[0].bare else worker.run_rows)(rows)


if __name__ == "__main__":
    main()
