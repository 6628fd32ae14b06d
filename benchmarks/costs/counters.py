"""What counts: the library counters.c for allocations, mutexes and copies, and perf or callgrind for instructions."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

# Libraries of torchrpc. Functions of the C++ library that are not inlined count as ours, whoever calls them.
OURS = re.compile(r"libtorchrpc|_C\.|libstdc\+\+|torchrpc_")
COMPILE = ["-O2", "-fPIC", "-shared", "-fno-builtin", "-U_FORTIFY_SOURCE", "-Wall", "-Werror", "-pthread", "-ldl"]
KINDS = {1: "allocations", 2: "mutexes", 3: "copied_bytes"}
WORDS = 16  # of a place in the table of counters.c

Counts = dict[str, float]  # by name: "allocations" of torchrpc itself, "all_allocations" of the process, ...


@dataclass(frozen=True)
class Place:
    kind: str
    frames: tuple[int, ...]


class Library:
    """The library of counters.c, preloaded into processes that start with `variables`."""

    def __init__(self, folder: Path, depth: int = 1):
        library = folder / "counters.so"
        compiler = os.environ.get("CC", "cc")
        source = str(Path(__file__).with_name("counters.c"))
        subprocess.run([compiler, source, "-o", str(library), *COMPILE], check=True)
        self.folder = folder
        self.variables = {
            "LD_PRELOAD": " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")])),
            "TORCHRPC_COSTS_FOLDER": str(folder),
            "TORCHRPC_COSTS_DEPTH": str(depth),
        }

    def start(self, pid: int) -> None:
        with (self.folder / str(pid)).open("r+b") as file:
            file.write((1).to_bytes(8, sys.byteorder))

    def read(self, pid: int) -> dict[Place, int]:
        """Return the events, or copied bytes, of each place until now."""
        words = memoryview((self.folder / str(pid)).read_bytes()).cast("Q")
        found = {}
        for start in range(WORDS, len(words), WORDS):
            if words[start]:
                _, kind, events, copied, *frames = words[start : start + WORDS]
                found[Place(KINDS[kind], tuple(filter(None, frames)))] = (
                    copied if KINDS[kind] == "copied_bytes" else events
                )
        return found


class Modules:
    """The libraries of a process, by address."""

    def __init__(self, pid: int):
        self.ranges = []
        start_of: dict[str, int] = {}
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            addresses, access, *_, name = line.split(maxsplit=5)
            if name.startswith("/"):
                start, end = (int(each, 16) for each in addresses.split("-"))
                start_of.setdefault(name, start)
                if "x" in access:
                    self.ranges.append((start, end, name))
        self.start_of = start_of

    def of(self, address: int) -> str:
        return next((name for start, end, name in self.ranges if start <= address < end), "?")

    def is_ours(self, address: int) -> bool:
        return bool(OURS.match(Path(self.of(address)).name))

    def functions(self, addresses: set[int]) -> dict[int, str]:
        """Return the names of the functions that contain return addresses, with inlined functions where known."""
        by_module = defaultdict(list)
        for address in sorted(addresses):
            by_module[self.of(address)].append(address)
        names = {}
        for module, inside in by_module.items():
            if module == "?":
                names.update(dict.fromkeys(inside, "?"))
                continue
            offsets = [hex(address - 1 - self.start_of[module]) for address in inside]
            command = ["addr2line", "-Cfe", module, *offsets]
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            for address, function, place in zip(inside, lines[::2], lines[1::2], strict=True):
                line = "" if place.startswith("?") else " " + "/".join(place.split("/")[-2:])
                names[address] = f"{function[:100]}{line} ({Path(module).stem})"
        return names


def switches(pid: int) -> int:
    """Return how often the threads of a process have left their processor."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        total += sum(int(each) for each in re.findall(r"ctxt_switches:\s*(\d+)", status.read_text()))
    return total


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

    def stop(self) -> list[Counts]:
        for process in self.running:
            process.send_signal(signal.SIGINT)
        outputs = [process.communicate()[1] for process in self.running]
        return [{"all_instructions": float(re.search(r"^([\d.]+),", output, re.M)[1])} for output in outputs]


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

    def stop(self) -> list[Counts]:
        before = set(self.directory.iterdir())
        self._control("--dump")
        new = sorted(set(self.directory.iterdir()) - before)  # worker0's, then worker1's
        return [self._counts(path.read_text()) for path in new]

    @staticmethod
    def _counts(profile: str) -> Counts:
        """Return the instructions of a profile, and those of torchrpc's own libraries without what they call."""
        names: dict[str, str] = {}
        ours = 0
        is_ours = is_call = False
        for line in profile.splitlines():
            if line.startswith("ob="):
                number, _, name = line[3:].partition(" ")
                if name:
                    names[number] = Path(name).name
                is_ours = bool(OURS.match(names.get(number, "")))
            elif line.startswith("cob="):
                number, _, name = line[4:].partition(" ")
                if name:
                    names[number] = Path(name).name
            elif line.startswith("calls="):
                is_call = True  # the next line is the cost of the callee
            elif line[:1] in "0123456789+-*" and line:
                if is_ours and not is_call:
                    ours += int(line.split()[1]) if " " in line else 0
                is_call = False
        return {
            "all_instructions": float(re.search(r"^(?:summary|totals): (\d+)", profile, re.M)[1]),
            "instructions": float(ours),
        }

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


INSTRUCTIONS = {each.name: each for each in (Perf, Callgrind)}
