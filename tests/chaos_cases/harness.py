"""How a case runs: its processes, their reports, and their end.

A case is a function `case(run)` in this process. It starts workers (`run.group`), each of which runs a function of the
same module with a `Worker` (worker.py). They report events as lines of JSON on stdout; the case waits for events, with
time limits, sends commands and signals, and returns a text of its observations. It fails by raising. Each process has a
session of its own and is killed, with its children, when the case ends.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


class CaseFailure(Exception):
    """A case observed something wrong; the text describes it."""


@dataclass
class Settings:
    system: str = "torchrpc"
    scale: float = 0.01
    transport: str = ""
    patience: float = 1.0  # a factor of all limits on time, larger where other programs run as well


@dataclass
class Case:
    part: str
    name: str
    function: Callable[["Run"], str]
    limit: float
    systems: tuple[str, ...]


@dataclass
class Outcome:
    part: str
    name: str
    verdict: str
    seconds: float
    seen: str


CASES: list[Case] = []


def case(name: str, limit: float = 40, systems: tuple[str, ...] = ("torchrpc", "torch")) -> Callable:
    """Decorator: register a case, which may take `limit` seconds, under the part with the module's name."""

    def register(function: Callable[["Run"], str]) -> Callable:
        CASES.append(Case(function.__module__.rpartition(".")[2], name, function, limit, systems))
        return function

    return register


def run_case(case: Case, settings: Settings) -> Outcome:
    """Run a case and end its processes."""
    start = time.monotonic()
    if settings.system not in case.systems:
        return Outcome(case.part, case.name, "-", 0.0, f"cannot be done on {settings.system}")
    with tempfile.TemporaryDirectory() as folder:
        run = Run(settings, start + case.limit * settings.patience, case.function.__module__, Path(folder))
        try:
            verdict, seen = "pass", case.function(run)
        except CaseFailure as failure:
            verdict, seen = "FAIL", str(failure)
        finally:
            run.end()
    return Outcome(case.part, case.name, verdict, time.monotonic() - start, seen)


@dataclass
class Process:
    """The case's side of a worker process."""

    name: str
    popen: subprocess.Popen
    deadline: float
    patience: float
    events: "queue.Queue[dict | None]" = field(default_factory=queue.Queue)
    errors: Path = Path()

    def read(self) -> None:
        assert self.popen.stdout
        for line in self.popen.stdout:
            with contextlib.suppress(ValueError):
                self.events.put(json.loads(line))
        self.events.put(None)

    def expect(self, event: str, within: float = 30.0) -> Any:
        """Wait for that event, skip others, and return its value."""
        within *= self.patience
        end = min(time.monotonic() + within, self.deadline)
        while True:
            try:
                message = self.events.get(timeout=max(end - time.monotonic(), 0))
            except queue.Empty:
                raise CaseFailure(f"{self.name}: no '{event}' in {within:g} s{self.last_error_line()}") from None
            if message is None:
                raise CaseFailure(f"{self.name} ended ({self.popen.wait()}) before '{event}'{self.last_error_line()}")
            if message["event"] == "failed":
                raise CaseFailure(f"{self.name}: {message['error']}")
            if message["event"] == event:
                return message.get("value")

    def send_command(self, command: str) -> None:
        """Make its `wait_for_command(command)` return."""
        assert self.popen.stdin
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(command + "\n")
            self.popen.stdin.flush()

    def send_signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def exit_code(self, within: float) -> int:
        within *= self.patience
        try:
            return self.popen.wait(min(within, max(self.deadline - time.monotonic(), 0)))
        except subprocess.TimeoutExpired:
            raise CaseFailure(f"{self.name} still runs after {within:g} s") from None

    def last_error_line(self) -> str:
        """Return the last line of its stderr, in parentheses, for error texts."""
        text = self.errors.read_text(errors="replace").strip().splitlines() if self.errors.exists() else []
        return f" ({text[-1][:160]})" if text else ""


class Run:
    """One run of one case."""

    def __init__(self, settings: Settings, deadline: float, module: str, folder: Path) -> None:
        self.settings = settings
        self.system, self.scale, self.patience = settings.system, settings.scale, settings.patience
        self.deadline, self.module, self.folder = deadline, module, folder
        self.processes: list[Process] = []
        self.prefix: list[str] = []
        self._port: int | None = None

    @property
    def port(self) -> int:
        if self._port is None:
            from torchrpc.testing import free_port  # not by all processes of a case: some have torch's RPC only

            self._port = free_port()
        return self._port

    def group(self, *functions: Callable, liveness: float = 2, **options: Any) -> list[Process]:
        """Start a group of fixed size: rank i runs functions[i]."""
        return [self.start(f, rank, len(functions), liveness=liveness, **options) for rank, f in enumerate(functions)]

    def start(
        self,
        function: Callable,
        rank: int,
        size: int | None,
        liveness: float = 2,
        prefix: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> Process:
        spec = {
            "system": self.system,
            "module": self.module,
            "function": function.__name__,
            "rank": rank,
            "size": size,
            "scale": self.scale,
            "options": options,
        }
        errors = self.folder / f"stderr{len(self.processes)}"
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHRPC_LIVENESS_TIMEOUT": str(liveness),
            "TORCHRPC_TRANSPORT": self.settings.transport,
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        with errors.open("w") as stderr:
            popen = subprocess.Popen(
                [*prefix, sys.executable, "-m", "chaos_cases.worker", json.dumps(spec)],
                cwd=TESTS,
                env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        process = Process(f"worker{rank}", popen, self.deadline, self.patience, errors=errors)
        threading.Thread(target=process.read, daemon=True).start()
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
            for stream in (process.popen.stdin, process.popen.stdout):
                with contextlib.suppress(OSError):
                    assert stream
                    stream.close()


def check(condition: Any, seen: str) -> None:
    """Raise a CaseFailure with the text unless the condition holds."""
    if not condition:
        raise CaseFailure(seen)
