"""The levels of the package's loggers, by the environment variable TORCHRPC_LOG. The C++ core reads it by itself."""

import logging
import os

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure() -> None:
    """Give the logger `torchrpc` the level of TORCHRPC_LOG, and a handler if the program has set up none.

    Raises:
        ValueError: the variable has another value.
    """
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
    """Lines as those of the core: "torchrpc info: worker1 is rank 1 of 4 workers"."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"torchrpc {record.levelname.lower()}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def log_call(text: str, worker: str, peer: str, function: str, age_s: float, made_at: str) -> None:
    """Write a warning about a call. The record has the fields `worker`, `peer` and `function`; `age_s` unless it is
    negative; and `made_at` unless it is empty.
    """
    fields: dict[str, object] = {"worker": worker, "peer": peer, "function": function}
    if age_s >= 0:
        fields["age_s"] = age_s
    if made_at:
        fields["made_at"] = made_at
    logging.getLogger("torchrpc.calls").warning("%s", text, extra=fields)
