"""Which frames of a stack are the program's own code, for log lines, warnings and reports. Any thread may call it."""

import re
import sys
from pathlib import Path

PACKAGE = str(Path(__file__).parent)

# Files outside the program's own code: those of this package, of parts of torch and of Python's standard library.
_PLUMBING = re.compile(
    r"[/\\]torchrpc[/\\](rpc|autograd|optim|nn|profiler|observe|testing|launch|cli)[/\\]"
    r"|[/\\]torchrpc[/\\]\w+\.py$"
    r"|[/\\]cloudpickle[/\\]"
    r"|[/\\]torch[/\\](futures|distributed|_jit_internal|utils)[/\\.]"
    r"|[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)"
    r"|^<frozen |^<string>$"
)


def is_of_program(file: str) -> bool:
    """Return whether a frame of this file is in the program's own code."""
    return not _PLUMBING.search(file)


def program_stacklevel() -> int:
    """Return the `stacklevel` with which a warning of the calling function points at the code that called torchrpc."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and not is_of_program(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level
