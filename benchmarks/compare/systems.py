"""The compared systems, and groups of fresh processes that run rows on them."""

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from adapters import CONNECT
from rows import Row

TRANSPORTS = ("default", "tcp")
TENSORPIPE_TCP = {"_transports": ["uv"], "_channels": ["basic"]}
OURS = {"TORCHRPC_REPLACE": "1"}
WORKER = Path(__file__).with_name("worker.py")
START_SECONDS, STOP_SECONDS = 120, 30


@dataclass(frozen=True)
class System:
    label: str
    environment: dict[str, str] = field(default_factory=dict)  # variables added to the environment of its processes
    kind: str = "rpc"  # "rpc": torch.distributed.rpc's API; or one of adapters.CONNECT
    tcp: dict = field(default_factory=lambda: TENSORPIPE_TCP)  # the options that mean TCP
    has_certificate: bool = False  # its workers use TLS

    def runs(self, row: Row, transport: str) -> bool:
        """Return whether the system runs the row. Systems with another API do so only for the default transport."""
        return self.kind == "rpc" or (row.other is not None and transport == "default")

    def options(self, transport: str) -> dict:
        return self.tcp if transport == "tcp" else {}

    @property
    def is_torchrpc(self) -> bool:
        return "TORCHRPC_REPLACE" in self.environment


KNOWN = {
    "torch": System("torch"),
    "torchrpc": System("torchrpc", OURS, tcp={"transport": "tcp"}),
    "encrypted": System("encrypted", {**OURS, "TORCHRPC_ENCRYPTION": "on"}, tcp={"transport": "tcp"}),
    "metrics": System("metrics", {**OURS, "TORCHRPC_METRICS": "1"}, tcp={"transport": "tcp"}),
    "tls": System("tls", OURS, tcp={"transport": "tcp"}, has_certificate=True),
    "tensorpipe": System("tensorpipe", {**OURS, "TORCHRPC_TRANSPORT": "tensorpipe"}),
    **{kind: System(kind, kind=kind) for kind in CONNECT},
}


def installed() -> list[str]:
    return ["torch", "torchrpc", *(kind for kind in CONNECT if importlib.util.find_spec(kind) is not None)]


@functools.cache
def tls_environment() -> dict[str, str]:
    """Return the variables for workers named worker0, worker1 and so on, with a certificate made by openssl."""
    folder = Path(tempfile.mkdtemp(prefix="torchrpc-benchmark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key)
    subject = ("-subj", "/CN=benchmark", "-addext", "subjectAltName=DNS:worker")
    command = ("openssl", "req", "-x509", "-days", "2", *new_key, *subject, "-out", certificate)
    subprocess.run(command, check=True, capture_output=True)
    files = {"CERTIFICATE": certificate, "KEY": key, "CA": certificate, "NAMES": "{base}"}
    return {f"TORCHRPC_TLS_{name}": str(value) for name, value in files.items()}


class Failed(Exception):
    """A group of processes ended or hung. The text ends with the last line that they printed."""


class Group:
    """Fresh processes that run rows of one session. They run worker.py."""

    def __init__(self, system: System, transport: str, rows: list[Row], budget: float, row_seconds: float):
        self.rows, self.row_seconds = rows, row_seconds
        size = rows[0].world_size if system.kind == "rpc" else 1
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHRPC_")}
        environment |= {"OMP_NUM_THREADS": "1", **system.environment}
        if system.has_certificate:
            environment |= tls_environment()
        arguments = {
            "kind": system.kind,
            "torchrpc": system.is_torchrpc,
            "world_size": size,
            "ports": free_ports(1 + len(rows)),
            "options": system.options(transport),
            "budget": budget,
            "rows": [row.name for row in rows],
        }
        self.stderr = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115 - closed in __exit__
        self.pipe, child_end = os.pipe()
        self.processes = [
            subprocess.Popen(
                [sys.executable, WORKER, json.dumps({**arguments, "rank": rank, "fd": child_end})],
                env=environment,
                pass_fds=[child_end],
                stdout=subprocess.DEVNULL,
                stderr=self.stderr[rank],
                start_new_session=True,
            )
            for rank in range(size)
        ]
        os.close(child_end)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(self.pipe)
        for file in self.stderr:
            file.close()

    def events(self) -> Iterator[dict]:
        """Yield the events of worker0 until it is done. Raise Failed if a process ends or a row exceeds its time."""
        deadline = time.monotonic() + START_SECONDS
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while True:
                if not selector.select(0.2):
                    self._check_alive()
                    if time.monotonic() > deadline:
                        raise Failed(f"no answer within {self.row_seconds:.0f} s" + self._last_line())
                    continue
                data = os.read(self.pipe, 1 << 16)
                if not data:
                    raise Failed("worker0 ended early" + self._last_line())
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if "done" in event:
                        return
                    deadline = time.monotonic() + self.row_seconds
                    yield event

    def stop(self) -> None:
        """Wait up to STOP_SECONDS for the processes to end by themselves."""
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))

    def _check_alive(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll():
                raise Failed(f"worker{rank} ended with {process.returncode}" + self._last_line(rank))

    def _last_line(self, *ranks: int) -> str:
        for rank in ranks or range(len(self.stderr)):
            self.stderr[rank].seek(0)
            lines = self.stderr[rank].read().decode(errors="replace").strip().splitlines()
            if lines:
                return ": " + lines[-1].strip()
        return ""


def run_session(system: System, transport: str, rows: list[Row], budget: float, row_seconds: float) -> Iterator[tuple]:
    """Yield ("versions", dict), (name of a row, value) or (name of a row, Failed); every row once.

    When a group fails in a row, a new group continues with the rows after it.
    """
    left = list(rows)
    while left:
        current_row = None
        with Group(system, transport, left, budget, row_seconds) as group:
            try:
                for event in group.events():
                    if "versions" in event:
                        yield "versions", event["versions"]
                    elif "begin" in event:
                        current_row = event["begin"]
                    else:
                        left = [row for row in left if row.name != event["row"]]
                        current_row = None
                        yield event["row"], Failed(event["error"]) if "error" in event else event["value"]
                group.stop()
                return
            except Failed as failure:
                broken = [row for row in left if current_row in (row.name, None)]  # all rows, if no row had started
                left = [row for row in left if row not in broken]
                for row in broken:
                    yield row.name, failure


def free_ports(count: int) -> list[int]:
    """Return ports that are still free when the processes have loaded torch: no outgoing connection gets them."""
    from torchrpc.testing import free_port

    return [free_port() for _ in range(count)]
