"""The allow-list of a worker that was started with `allowed_functions`: the functions that its callers may run there,
and the classes of which they may send objects.

The extension checks operators, script functions and C++ functions (csrc/node/allow_list.h) and calls these functions
for Python objects, on any thread. A refused name is not looked up, so nothing is imported for it. `_plain_objects`
makes the objects.
"""

import contextlib
import enum
import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.jit._builtins import _find_builtin

from torchrpc import _C

from .._calls.cpp_functions import CppFunction
from .._errors import NotAllowedError
from .._values.names import find_global, find_module
from .._values.names import shortened as shortened

logger = logging.getLogger(__name__)

# Functions that the package itself calls on other workers: to join and leave a group, for RRefs, profiles, optimizers
# and remote modules. A call may run them, but they cannot be sent as values. Those that run a user's function check it
# against the list.
_OWN = """
    rpc.rref_proxy._call_method
    rpc.api._gather_to_leader rpc.api._broadcast_to_followers rpc.api._gathering_numbers rpc.api._rref_typeof_on_owner
    rpc._utils._update_group_membership
    optim._parts._make optim._parts._step optim._parts._state optim._parts._load
    nn.remote_module._create_module nn.remote_module._run_forward nn.remote_module._parameter_rrefs
    nn.remote_module._set_training
    profiler._start profiler._stop profiler._clock
"""
CALLED_BY_THE_PACKAGE = frozenset(f"torchrpc.{name}" for name in _OWN.split())
# The functions of `_OWN` that clients may run, too. In gatherings and joins, a worker acts only for itself.
_OF_CLIENTS = """
    rpc.rref_proxy._call_method rpc.api._rref_typeof_on_owner rpc.api._gather_to_leader
    rpc.api._gathering_numbers rpc._utils._update_group_membership
    nn.remote_module._create_module nn.remote_module._run_forward nn.remote_module._parameter_rrefs
    nn.remote_module._set_training
"""
_FOR_CLIENTS = frozenset(f"torchrpc.{name}" for name in _OF_CLIENTS.split())
# Each of these would allow everything: it runs, loads or looks up anything that arrives with the call, or it reads and
# writes memory or storages without checks of what arrives. "module.*" stands for all that begins with "module.".
_RUNS_ANYTHING = """
    builtins.eval builtins.exec builtins.compile builtins.__import__ builtins.getattr builtins.setattr builtins.delattr
    builtins.globals builtins.vars builtins.__build_class__ builtins.breakpoint
    operator.attrgetter operator.methodcaller types.FunctionType types.CodeType types.MethodType
    os.system os.popen os.exec* os.spawn* os.posix_spawn* posix.system posix.exec* posix.spawn* posix.posix_spawn*
    importlib.* zipimport.* pkgutil.* imp.* runpy.* code.* codeop.* pdb.* bdb.* timeit.* trace.* profile.* cProfile.*
    doctest.* pydoc.* site.* sys.* gc.* inspect.* atexit.* logging.config.* subprocess.* _posixsubprocess.*
    multiprocessing.* pty.* marshal.* pickle.* _pickle.* shelve.* copyreg.* ctypes.* _ctypes.* mmap.*
    torch.load torch.serialization.* torch.storage.* torch.UntypedStorage torch.TypedStorage torch.hub.*
    torch.package.* torch.jit.load torch.export.load torch.frombuffer torch.from_file torch.multiprocessing.*
    torch.library.* torch.ops.load_library torch.classes.load_library torch.utils.cpp_extension.* torch._utils.*
    torch.utils.dlpack.* torch.from_dlpack
    numpy.load numpy.fromfile numpy.frombuffer numpy.memmap numpy.ndarray numpy.dtype numpy.lib.*
    numpy.ctypeslib.* numpy.core.* numpy._core.* numpy.f2py.* numpy.distutils.* numpy.testing.*
    cffi.* dill.* joblib.* IPython.* pandas.read_pickle yaml.load yaml.full_load yaml.unsafe_load
"""
# Packages in which functions for many purposes lie side by side. A prefix may not name a part of them, except these.
_LARGE_PACKAGES = sys.stdlib_module_names | {"torch", "numpy"}
_PARTS_FOR_PREFIXES = ("math.", "cmath.", "torch.nn.", "torch.optim.")
# The package's functions that may be listed. The others are its pickler, its checks and their parts.
_LISTABLE = frozenset(
    [
        "torchrpc.rpc.api.rpc_sync",
        "torchrpc.rpc.api.rpc_async",
        "torchrpc.rpc.api.remote",
        "torchrpc.rpc.api.get_worker_info",
        "torchrpc.profiler.profile",
    ]
)

# The classes that entries name, by id. An entry may find a class in another module than the class's `__module__`.
_classes_of_entries: dict[int, tuple[type, set[str]]] = {}


Entries: TypeAlias = Iterable[Callable[..., Any] | str]


def allowances_of(
    allowed_functions: Entries | Mapping[str, Entries | None] | None,
) -> list[tuple[str, list[str] | None]]:
    """Return `allowed_functions` as pairs: a pattern of callers' names, and the names of the entries in calls.

    None instead of the names allows everything. Without pairs, all callers may run everything.

    Raises:
        TypeError: an entry is neither a callable nor a str, or a pattern is not a str.
        ValueError: a function has no name of its own at the top level of a module, or a pattern is empty.
    """
    if allowed_functions is None:
        return []
    if not isinstance(allowed_functions, Mapping):
        return [("*", _names_of(allowed_functions))]
    if not allowed_functions:
        raise ValueError("allowed_functions is an empty dict: to allow nothing, give an empty list.")
    for pattern in allowed_functions:
        if not isinstance(pattern, str):
            raise TypeError(f"allowed_functions has the key {pattern!r}, which is no str: keys are patterns of names.")
        if not pattern:
            raise ValueError(
                "allowed_functions has an empty key: keys are patterns of callers' names, such as 'client-*'."
            )
    return [
        (pattern, None if entries is None else _names_of(entries)) for pattern, entries in allowed_functions.items()
    ]


def _names_of(entries: Entries) -> list[str]:
    if isinstance(entries, str):
        raise TypeError(f"allowed_functions must be a list of functions and names, but is the str {entries!r}.")
    return [_name_of(entry) for entry in entries]


def _name_of(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, CppFunction):
        return f"cpp_function({entry.name})"
    if isinstance(entry, torch.jit.ScriptFunction):
        return entry.qualified_name
    if not callable(entry):
        raise TypeError(f"allowed_functions has {entry!r}, which is neither a function nor the name of one.")
    # Calls name an operator only for functions of C. Those that torch has written in Python travel by their names.
    if isinstance(entry, types.BuiltinFunctionType) and (operator := _find_builtin(entry)) is not None:
        return operator
    module, name = getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)
    if not module or not name or "<" in name:
        raise ValueError(
            f"allowed_functions has {entry!r}, which has no name of its own at the top level of a module: such "
            "functions travel as code and cannot be allowed one by one."
        )
    return _full_name(module, name)


def resolve(entries: Iterable[str]) -> list[str]:
    """Return the entries, and the names by which calls refer to their objects, where these names differ.

    `init_rpc` calls this function, because it imports the modules of the entries. For example, `os.getpid` is
    `posix.getpid` in calls, and `torch.add` is the operator `aten::add`.

    Raises:
        ValueError: an entry allows everything, or names nothing, so that it could never match.
    """
    names: dict[str, None] = {}
    for entry in entries:
        names[entry] = None
        if entry in ("", "*"):
            continue  # the core refuses them
        _refuse_if_unsafe(entry)
        if "::" in entry or "(" in entry or entry.endswith("*") or entry.startswith("__torch__."):
            continue  # operators, C++ functions, prefixes and script functions are names, not objects
        found = _find_entry(entry)
        _refuse_if_unsafe(entry)  # again, since its module is loaded now
        if isinstance(found, type):
            _classes_of_entries.setdefault(id(found), (found, set()))[1].add(entry)
        if callable(found):
            with contextlib.suppress(ValueError):  # the object has no name of its own
                names[_name_of(found)] = None
    return list(names)


def _refuse_if_unsafe(entry: str) -> None:
    if why := _why_unsafe(entry):
        raise ValueError(f"allowed_functions has {entry!r}, which {why}")


def _find_entry(entry: str) -> Any:
    """Return the object that an entry names; None if this process cannot import its module."""
    parts = entry.split(".")
    if len(parts) < 2 or not all(parts):
        raise ValueError(
            f"allowed_functions has {entry!r}, which can never match: write the name with its module, as in "
            "'package.module.function', or 'aten::add' for a torch operator."
        )
    if parts[0] in ("__main__", "__mp_main__"):
        return None  # the script may define it later
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            found = sys.modules.get(module) or importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if count > 1 and exc.name and module.startswith(exc.name):
                continue  # the rest may be a class and its method
            logger.warning("allowed_functions has %r, but this process has no module %s.", entry, module)
            return None
        except ImportError as exc:
            logger.warning("allowed_functions has %r, but its module %s cannot be imported: %s", entry, module, exc)
            return None
        try:
            return functools.reduce(getattr, parts[count:], found)
        except AttributeError as exc:
            raise ValueError(f"allowed_functions has {entry!r}, which can never match: {exc}.") from None
    return None


def _why_unsafe(entry: str, look_up: bool = True) -> str:
    """Return why the entry may not be listed, as the end of a sentence; an empty string if it may.

    Args:
        look_up: whether to compare the object that the entry names, too. The look-up may run code, such as properties,
            so it must be False for a name from another worker.
    """
    prefix = entry.removesuffix("*") if entry.endswith("*") else None
    module = entry.removesuffix("*").removesuffix(".") + "."
    for package in ("torchrpc.", "torch.distributed.rpc.", "torch.distributed.autograd.", "cloudpickle."):
        if module.startswith(package) or (prefix is not None and package.startswith(prefix)):
            if prefix is None and (_canonical_name(entry) if look_up else entry) in _LISTABLE:
                return ""
            return (
                f"would let callers run parts of {package[:-1]} itself, such as its pickler, by which they can run any "
                "code: list your own functions. What the package needs for itself is always allowed."
            )
    names = {entry, _canonical_name(entry)} if look_up else {entry}
    for unsafe in _RUNS_ANYTHING.split():
        if unsafe.endswith("*"):
            covers = any(name.startswith(unsafe[:-1]) for name in names)
        else:
            covers = unsafe in names or (look_up and _is_same_object(entry, unsafe))
        if covers or (prefix is not None and unsafe.startswith(prefix)):
            return (
                f"would let callers run any code or reach any memory, by {unsafe}: list functions of your own that do "
                "what callers need. (Without allowed_functions, everything is allowed.)"
            )
    if prefix is not None:
        packages = [f"{package}." for package in _LARGE_PACKAGES]
        is_large = any(prefix.startswith(package) or package.startswith(prefix) for package in packages)
        if is_large and not prefix.startswith(_PARTS_FOR_PREFIXES):
            return (
                "would let callers run functions of a package that is not yours, and some of them run any code: name "
                "its functions one by one, or functions of your own that do what callers need."
            )
    elif entry.partition(".")[0] in _LARGE_PACKAGES and entry.rpartition(".")[2].startswith("_"):
        return (
            "would let callers run a private function of a package that is not yours, which does not check what "
            "arrives: list functions of your own that do what callers need."
        )
    return ""


def _is_of_program(name: str) -> bool:
    """Whether a name seems to be of a module of the program: loaded, and not of Python, torch or another package."""
    top = name.partition(".")[0]
    if top in ("__main__", "__mp_main__"):
        return True
    spec = getattr(sys.modules.get(top), "__spec__", None)  # a name that is not loaded is not looked up
    if top in _LARGE_PACKAGES or not spec:
        return False
    places = [str(spec.origin), *(spec.submodule_search_locations or ())]
    return not any(folder in place for place in places for folder in ("site-packages", "dist-packages"))


def _find_loaded(name: str) -> Any:
    """Return the object of that name if its module is loaded; else None."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if module := sys.modules.get(".".join(parts[:count])):
            with contextlib.suppress(AttributeError):
                return functools.reduce(getattr, parts[count:], module)
    return None


def _canonical_name(name: str) -> str:
    found = _find_loaded(name)
    return _full_name(getattr(found, "__module__", "") or "", getattr(found, "__qualname__", "") or "")


def _is_same_object(entry: str, name: str) -> bool:
    found = _find_loaded(entry)
    return found is not None and found is _find_loaded(name)


def _full_name(module: str, name: str) -> str:
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"


def claimed_name(obj: Any) -> str:
    """Return the name that a function or class gives for itself; an empty string if it gives none."""
    module, name = _claimed_parts(obj)
    return _full_name(module, name) if name else ""


def _claimed_parts(obj: Any) -> tuple[str, str]:
    """Return the module and the qualified name that a function or class gives for itself, or two empty strings.

    A metaclass cannot change the name that is read from a class.
    """
    if isinstance(type(obj), type) and issubclass(type(obj), type):
        try:
            module, name = _MODULE_OF_TYPE.__get__(obj), _NAME_OF_TYPE.__get__(obj)
        except AttributeError:
            return "", ""
    else:
        module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    return (module, name) if type(module) is str and type(name) is str else ("", "")


_MODULE_OF_TYPE: Any = vars(type)["__module__"]
_NAME_OF_TYPE: Any = vars(type)["__qualname__"]


def refused(name: str, allowed: _C._AllowList) -> NotAllowedError:
    """Return the error for a name that is not on the list."""
    name = shortened(name)
    if not allowed.callers:
        return NotAllowedError(
            f"{allowed.worker} does not let this caller run or send {name}: no pattern in its allowed_functions "
            "matches the caller's name.",
            allowed.worker,
        )
    is_for_all = allowed.callers == "*"
    start = (
        f"{allowed.worker} does not let {'others' if is_for_all else 'this caller'} run or send {name}: its "
        f"allowed_functions do not have it{'' if is_for_all else f' for workers named {allowed.callers!r}'}"
    )
    if why := _why_unsafe(name, look_up=False):
        return NotAllowedError(f"{start}, and cannot have it: it {why}", allowed.worker)
    if name.rpartition(".")[2].startswith("__") or not _is_of_program(name):
        return NotAllowedError(
            f"{start}. If they may, let a function of your own do what callers need, and list that function.",
            allowed.worker,
        )
    return NotAllowedError(
        f"{start}. If they may, start {allowed.worker} with TensorPipeRpcBackendOptions(allowed_functions="
        + (f"[..., {name!r}])." if is_for_all else f"{{{allowed.callers!r}: [..., {name!r}]}})."),
        allowed.worker,
    )


def find_allowed(module: str, qualified_name: str, allowed: _C._AllowList | None = None) -> Any:
    """Return the function of a call: one of the package's own, or one on the list.

    Args:
        allowed: default: the list in force.

    Raises:
        NotAllowedError: the list does not allow the name; nothing has been imported.
    """
    allowed = allowed or _C._allow_list()
    name = f"{module}.{qualified_name}"
    if allowed is None or name in CALLED_BY_THE_PACKAGE:
        if allowed is not None:
            check_member(name, allowed)
        return find_global(module, qualified_name)
    return find_listed(module, qualified_name, allowed)


def check_member(name: str, allowed: _C._AllowList) -> None:
    """Raise NotAllowedError if the caller is a client, and only members may run this function of the package."""
    if allowed.is_for_member or name in _FOR_CLIENTS:
        return
    raise NotAllowedError(
        f"{allowed.worker} does not let a client run {name}: only members of the group may. Give the caller an "
        "identity with the role member if it may.",
        allowed.worker,
    )


def find_listed(module: str, qualified_name: str, allowed: _C._AllowList) -> Any:
    """Return a function, class or member of an enum that the list has.

    Raises:
        NotAllowedError: the list does not allow the name; nothing has been imported.
    """
    name = _full_name(module, qualified_name)
    if not (entry := _entry_for(module, qualified_name, allowed)):
        raise refused(name, allowed)
    if entry == name:
        found = find_global(module, qualified_name)
    else:
        found = _find_defined(module, qualified_name)
        # "package.*" allows the objects that the package defines, not those that it has imported from elsewhere.
        if found is None or claimed_name(found) != name:
            raise refused(name, allowed)
    if not (callable(found) or isinstance(found, enum.Enum)):
        raise refused(name, allowed)
    return found


def _entry_for(module: str, qualified_name: str, allowed: _C._AllowList) -> str:
    """Return the entry that allows the name; an empty string if there is none.

    A prefix allows no functions, classes and methods whose name, or whose class's name, begins with an underscore.
    """
    name = _full_name(module, qualified_name)
    entry = allowed.entry_for(name)
    is_private = any(part.startswith("_") for part in qualified_name.split("."))
    return "" if is_private and entry != name else entry


def _find_defined(module: str, qualified_name: str) -> Any:
    """Return the function or class of that name; None if the module does not define it itself.

    No properties and no other descriptors run.
    """
    if module.endswith(".__main__"):
        return None  # importing it runs a program
    found: Any = find_module(module)
    first, *rest = qualified_name.split(".")
    if not isinstance(found, types.ModuleType):
        return None
    if first not in vars(found) and not rest:
        return find_global(module, qualified_name)  # raises, or finds what the module makes at its first use
    found = vars(found).get(first)
    for part in rest:
        if not isinstance(found, type) or not isinstance(class_attribute(found, part), _PARTS_OF_CLASSES):
            return None
        found = getattr(found, part)
    return found


_PARTS_OF_CLASSES = (type, types.FunctionType, classmethod, staticmethod)


def class_attribute(kind: type, name: str) -> Any:
    """Return the attribute of that name as the class, or one of its bases, stores it; None if there is none.

    No code of the class runs.
    """
    for base in _MRO_OF_TYPE.__get__(kind):
        found = _DICT_OF_TYPE.__get__(base).get(name, _NOTHING)
        if found is not _NOTHING:
            return found
    return None


def hidden_name(kind: type, names: Iterable[str]) -> str | None:
    """Return the first of these names of attributes that the state of a received object may not have; None if it may
    have all.

    Names such as `__array_interface__` and `__reduce_ex__` tell Python and libraries what to do with an object. An
    attribute would hide a method, a property or another descriptor of its class, or a callable used as a method.
    """
    for name in names:
        if name.startswith("__") and name.endswith("__"):
            return name
        found = class_attribute(kind, name)
        is_needed = hasattr(type(found), "__get__") or (callable(found) and not isinstance(found, type))
        if is_needed and name not in (class_attribute(kind, "__dataclass_fields__") or ()):
            return name
    return None


_MRO_OF_TYPE: Any = vars(type)["__mro__"]
_DICT_OF_TYPE: Any = vars(type)["__dict__"]
_NOTHING: Any = object()


def check_allowed(name: str, allowed: _C._AllowList) -> None:
    """Raise NotAllowedError unless an entry allows this name, which does not name a Python object."""
    if not allowed.entry_for(name):
        raise refused(name, allowed)


def is_listed_class(kind: type, allowed: _C._AllowList) -> bool:
    """Whether the list has this very class, and not only a class whose name this one claims."""
    found, entries = _classes_of_entries.get(id(kind), (None, ()))
    if found is kind and any(allowed.entry_for(entry) for entry in entries):
        return True
    module, name = _claimed_parts(kind)
    return bool(name and _entry_for(module, name, allowed)) and _find_loaded(_full_name(module, name)) is kind


def check_callable(function: Any) -> None:
    """Raise NotAllowedError if a function of the package may not call this function or class for another worker."""
    if (allowed := _C._allow_list()) is None:
        return
    if isinstance(function, type):
        if is_listed_class(function, allowed):
            return
    elif isinstance(function, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        module, name = _claimed_parts(function)
        if name and _entry_for(module, name, allowed) and _find_loaded(_full_name(module, name)) == function:
            return
    else:
        raise refused(f"{claimed_name(type(function))}.__call__", allowed)
    raise refused(claimed_name(function) or "a function without a name", allowed)


def check_method(value: Any, name: str, kind: type | None = None) -> None:
    """Raise NotAllowedError if other workers may not call this method of an object that an RRef refers to.

    A method is allowed if its class is and its name does not begin with an underscore, or if "module.Class.method" is.
    A prefix allows no method whose name begins with an underscore. Properties are no methods, and do not run.

    Args:
        kind: the class that the list must have; default: the object's.
    """
    if (allowed := _C._allow_list()) is None:
        return
    kind = kind or type(value)
    module, class_name = _claimed_parts(kind)
    if type(name) is not str:
        raise refused(f"a method of {_full_name(module, class_name)}", allowed)
    if not name.startswith("_") and is_listed_class(kind, allowed):
        is_allowed = True
    else:
        is_allowed = (
            bool(class_name and _entry_for(module, f"{class_name}.{name}", allowed))
            and _find_loaded(_full_name(module, class_name)) is kind
        )
    if not is_allowed or not _is_method_of_class(value, name):
        raise refused(f"{_full_name(module, class_name)}.{name}", allowed)


def _is_method_of_class(value: Any, name: str) -> bool:
    """Whether `value.name` is the attribute of that name of the class, and a function.

    An attribute of the object itself is not a method of the class: the object's state may come from another worker.
    """
    found = class_attribute(type(value), name)
    if isinstance(found, type) or not (callable(found) or isinstance(found, _WRAPPED_METHODS)):
        return False  # a class, a property or another descriptor, or nothing
    try:
        own = object.__getattribute__(value, "__dict__").get(name, _NOTHING)
    except AttributeError:
        return True  # the class has __slots__
    if own is _NOTHING or hasattr(type(found), "__set__"):
        return True
    return type(own) is torch._C.ScriptMethod  # script modules keep the methods that they have looked up


_WRAPPED_METHODS = (classmethod, staticmethod, functools.partialmethod, functools.singledispatchmethod)


def local_value(rref: Any) -> Any:
    """Return the value of an RRef that another worker has sent. With an allow-list, `rref` must be a real RRef."""
    if (allowed := _C._allow_list()) is None:
        return rref.local_value()
    if not issubclass(type(rref), _C.PyRRef):
        raise NotAllowedError(
            f"{allowed.worker} does not let others send a {type(rref).__qualname__} in the place of an RRef.",
            allowed.worker,
        )
    return _C.PyRRef.local_value(rref)
