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

import torch

from torchrpc import _C

from .._errors import NameNotFoundError, also

NAMED_KINDS = (type, types.FunctionType, types.BuiltinFunctionType)
_MAIN = ("__main__", "__mp_main__")
_MAIN_RULE = (
    'Define it at the top level of that file, outside of `if __name__ == "__main__":`, because the other workers load '
    "the file without that block."
)
_NOTEBOOK_RULE = (
    "Install cloudpickle on all workers (pip install cloudpickle), because functions and classes of a notebook or an "
    "interactive session are sent by value with it; or define it in a module that all workers can import."
)
_MODULE_RULE = "Define it at the top level of that module there, too: run the same code on both sides."


def public_module(name: str) -> str:
    """Return the name under which programs import torchrpc's `rpc` or `autograd`: torch's, if that was replaced."""
    upstream = f"torch.distributed.{name}"
    ours = sys.modules.get(f"torchrpc.{name}")
    return upstream if ours and sys.modules.get(upstream) is ours else f"torchrpc.{name}"


def replaces_torch() -> bool:
    """Whether torchrpc has replaced torch's RPC in this process."""
    return public_module("rpc") != "torchrpc.rpc"


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
    for part in qualified_name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as exc:
            file = getattr(find_module(module), "__file__", None)
            is_main = module in _MAIN
            rule = _MODULE_RULE if not is_main else _MAIN_RULE if file else _NOTEBOOK_RULE
            where = f"module {module} ({file or 'which has no file'})"
            raise also(NameNotFoundError, AttributeError)(
                f"{this_worker()} has no {qualified_name} in its {where}. {rule} The Default RPC pickler does not "
                f"serialize functions and classes that have a name in a module, it sends the name. ({exc})"
            ) from exc
    return found


def rule_for_variable(name: str, variables: dict[str, Any]) -> str:
    """Return what to do if code of another worker's script uses a global variable of that name, which the script of
    this worker does not have. Empty if `variables`, those that the code sees, are not the ones of the script.
    """
    if variables.get("__name__") not in _MAIN or not (file := variables.get("__file__")):
        return ""
    return f"{this_worker()} has no {name} in its module __main__ ({file}). {_MAIN_RULE}"


_LONGEST_NAME_SHOWN = 200


def shortened(name: str) -> str:
    """Return a name from another worker, shortened for error texts."""
    return name if len(name) <= _LONGEST_NAME_SHOWN else f"{name[:_LONGEST_NAME_SHOWN]}..."


# What the names of the script functions of a program's script have for a module: the second in the processes that
# multiprocessing has started.
_MAIN_MODULES = ("", "__mp_main__")


def find_script_function(qualified_name: str, imports: bool = True) -> torch.jit.ScriptFunction:
    """Return the script function of that name.

    Args:
        imports: whether to import the module that may compile it.

    Raises:
        NameNotFoundError, also an AttributeError: there is none.
    """
    compiled = torch.jit._state._python_cu
    if (found := compiled.find_function(qualified_name)) is None:
        module, _, name = qualified_name.removeprefix("__torch__.").rpartition(".")
        if module in _MAIN_MODULES:
            found = compiled.find_function(f"__torch__.{name}" if module else f"__torch__.__mp_main__.{name}")
        elif imports:
            find_module(module)
            found = compiled.find_function(qualified_name)
        if found is None:
            place = "script" if module in _MAIN_MODULES else f"module {module}"
            raise also(NameNotFoundError, AttributeError)(
                f"attempted to get undefined function {name}: {this_worker()} has no such script function in its "
                f"{place}. Define it there, too, at the top level."
            )
    return found
