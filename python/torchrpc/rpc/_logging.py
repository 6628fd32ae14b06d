"""The package's loggers: their levels, from the environment variable TORCHRPC_LOG, and the records of the C++ core."""

import logging
import os
import sys
import traceback

from torchrpc import _C
from torchrpc._frames import PACKAGE, is_of_program
from torchrpc._untrusted import printable

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure() -> None:
    """Make the core log to Python. Give `torchrpc` the level of TORCHRPC_LOG, and a handler if the program has none.

    Raises:
        ValueError: the variable is not the name of a level.
    """
    _C._log_to_python()
    name = os.environ.get("TORCHRPC_LOG")
    if not name:
        return
    if name not in _LEVELS:
        raise ValueError(f"TORCHRPC_LOG must be one of {', '.join(_LEVELS)}, but is {name!r}.")
    logger = logging.getLogger("torchrpc")
    logger.setLevel(_LEVELS[name])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter())
        logger.addHandler(handler)


class _Formatter(logging.Formatter):
    """Formats lines like those of the core: "torchrpc info: worker1 is rank 1 of 4 workers"."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"torchrpc {record.levelname.lower()}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def log_record(
    level: str, text: str, worker: str, peer: str, function: str, age_s: float, made_at: str, thread: int
) -> None:
    """Write a record of the core. A record about a call goes to the logger `torchrpc.calls`, and has the fields
    `worker`, `peer` and `function`; `age_s` unless negative; `made_at` unless empty; and `line` if `thread` runs Python
    code outside torchrpc.
    """
    text = printable(text)
    logger = logging.getLogger("torchrpc.calls" if function else "torchrpc.core")
    fields: dict[str, object] = {"worker": worker, "peer": peer, "function": function} if function else {}
    if age_s >= 0:
        fields["age_s"] = age_s
    if made_at:
        fields["made_at"] = made_at
    if line := _line_of(thread):
        fields["line"] = line
        text = f"{text}, at {line}"
    if logger.hasHandlers():
        logger.log(_LEVELS[level], "%s", text, extra=fields)
    elif logger.isEnabledFor(_LEVELS[level]):
        sys.stderr.write(f"torchrpc {level}: {text}\n")


def _line_of(thread: int) -> str:
    """Return "file:line" of a thread's innermost frame in the program's own code, else of the innermost frame that is
    not torchrpc's; "" if there is none.
    """
    frame = sys._current_frames().get(thread) if thread else None
    codes = [(each.f_code.co_filename, line) for each, line in traceback.walk_stack(frame)] if frame else []
    of_program = [(file, line) for file, line in codes if is_of_program(file)]
    outside = [(file, line) for file, line in codes if not file.startswith(PACKAGE)]
    return next((f"{file}:{line}" for file, line in [*of_program, *outside]), "")
