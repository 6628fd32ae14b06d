"""Finds this worker's modules, functions and classes by names that other workers send.

Any thread may call these functions.
"""

import contextlib
import functools
import importlib
import inspect
import sys
import types
from typing import Any

from torchrpc import _C

from ._errors import NameNotFoundError, also

NAMED_KINDS = (type, types.FunctionType, types.BuiltinFunctionType)
_MAIN = ("__main__", "__mp_main__")
_NOTEBOOK_ADVICE = (
    " If it was defined in a notebook or an interactive session, install cloudpickle on all workers (pip install "
    "cloudpickle): then it is sent by value."
)


def public_module(name: str) -> str:
    """Return the name under which programs import torchrpc's `rpc` or `autograd`: torch's, if that was replaced."""
    upstream = f"torch.distributed.{name}"
    ours = sys.modules.get(f"torchrpc.{name}")
    return upstream if ours and sys.modules.get(upstream) is ours else f"torchrpc.{name}"


def this_worker() -> str:
    """Return this worker's name, for error texts."""
    return _C._get_current_rpc_agent().get_worker_info().name if _C._is_current_rpc_agent_set() else "this process"


def has_name(obj: Any) -> bool:
    """Whether the module of this function or class has it under its name, so that others can find theirs by it."""
    found: Any = sys.modules.get(obj.__module__)
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def find_loaded(module: str, qualified_name: str) -> Any:
    """Return the function or class of that name in a module that is loaded, or None. Nothing is imported or called."""
    found: Any = sys.modules.get("__main__" if module in _MAIN else module)
    for part in qualified_name.split("."):
        found = inspect.getattr_static(found, part, None)
    found = getattr(found, "__func__", found) if isinstance(found, (staticmethod, classmethod)) else found
    return found if isinstance(found, NAMED_KINDS) else None


def find_module(name: str) -> Any:
    """Return the module of that name; import it if necessary. `__main__` and `__mp_main__` stand for each other.

    Raises:
        NameNotFoundError, also a ModuleNotFoundError: the import failed; the text says what to do.
    """
    if name in _MAIN:
        return sys.modules.get(name) or sys.modules["__main__"]
    try:
        return importlib.import_module(name)  # blocks while another thread imports it
    except ImportError as exc:
        raise also(NameNotFoundError, ModuleNotFoundError)(
            f"{this_worker()} cannot import the module {name}: {exc}. Functions and classes travel by name: install "
            f"the module on {this_worker()} or put its folder on PYTHONPATH there."
        ) from exc


def find_global(module: str, qualified_name: str) -> Any:
    """Return the object with that (dotted) name in `module`.

    Raises:
        NameNotFoundError, also an AttributeError or a ModuleNotFoundError: the text says what to do.
    """
    # A module that another thread is importing may have the name already; then this thread need not wait for it.
    with contextlib.suppress(KeyError, AttributeError):
        return functools.reduce(getattr, qualified_name.split("."), sys.modules[module])
    found = find_module(module)
    advice = _NOTEBOOK_ADVICE if module in _MAIN else ""
    for part in qualified_name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as exc:
            raise also(NameNotFoundError, AttributeError)(
                f"{this_worker()} has no {qualified_name} in its module {module}: {exc}. The Default RPC pickler does "
                "not serialize functions and classes that have a name in a module, it sends the name. Define it on "
                f"{this_worker()}, too, at the top level of that module, and run the same code on both sides.{advice}"
            ) from exc
    return found


_LONGEST_NAME_SHOWN = 200


def shortened(name: str) -> str:
    """Return a name from another worker, shortened for error texts."""
    return name if len(name) <= _LONGEST_NAME_SHOWN else f"{name[:_LONGEST_NAME_SHOWN]}..."
