"""Logs the failures of functions that this worker runs for others, once each."""

import contextlib
import logging
import textwrap
import traceback
from typing import Any

from torchrpc._frames import PACKAGE
from torchrpc._untrusted import printable

from .names import public_module, this_worker


class _LoggedAttributes(dict):
    """The `__dict__` of an exception that this worker has logged. The type is the mark: no attribute shows it."""

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def log_raised(exc: BaseException, shown: str, caller: str, is_small: bool) -> None:
    """Log that a function which `caller` has called here raised `exc`, with the traceback.

    Each failure is logged by the worker whose function raised it; calls that pass the exception on do not log it again.
    A program without handlers logs nothing, because the caller shows the traceback: workers often share a terminal. But
    where torchrpc has replaced torch's RPC, which prints failures, logging's last resort prints one line of it.
    """
    logger = logging.getLogger("torchrpc.calls")
    has_handlers = logger.hasHandlers()
    is_shown = has_handlers or public_module("rpc") == "torch.distributed.rpc"
    if not is_shown or type(vars(exc)) is _LoggedAttributes:
        return
    # A batch, or an RRef's creation, answers several calls with one exception.
    BaseException.__setattr__(exc, "__dict__", _LoggedAttributes(vars(exc)))
    codes = [frame.f_code for frame, _ in traceback.walk_tb(exc.__traceback__)]
    codes = [code for code in codes if not code.co_filename.startswith(PACKAGE)]
    function = getattr(codes[0], "co_qualname", codes[0].co_name) if codes else "a function"
    _log_failure(function, caller, shown, exc if is_small and has_handlers else None)


def _log_failure(function: str, caller: str, shown: str, traced: BaseException | None) -> None:
    """Log the failure with the traceback of `traced`, if it is given."""
    caller, function = printable(caller), printable(function)
    fields = {"worker": this_worker(), "peer": caller, "function": function}
    whose = f"{function} for {caller}" if caller else function
    shown = printable(shown)
    if traced is not None and _can_forge_lines(traced):
        trace = printable("".join(traceback.format_exception(traced)), has_lines=True)
        traced, shown = None, f"{shown}\n{textwrap.indent(trace, '  ')}"
    logger = logging.getLogger("torchrpc.calls")
    logger.error("%s has run %s, which raised %s", fields["worker"], whose, shown, exc_info=traced, extra=fields)


def _can_forge_lines(exc: BaseException) -> bool:
    """Whether a line of its traceback could be taken for another line of the log: its text may come from a caller."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [exc]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        text = str(each)
        if "__notes__" in vars(each) or printable(text) != text:
            return True
        todo += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
    return False


def log_failed_callback(text: bytes, caller: str) -> None:
    """Log that the future of a function which `caller` has called here failed with this text. Never raises.

    Torch keeps only the text of an exception that a callback of `future.then` raises.
    """
    with contextlib.suppress(Exception):  # raised by a filter of the program
        shown = text.decode(errors="backslashreplace")
        if logging.getLogger("torchrpc.calls").hasHandlers() and "On WorkerInfo(" not in shown:
            _log_failure("a callback", caller, shown, None)
