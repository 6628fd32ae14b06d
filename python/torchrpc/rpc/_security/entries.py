"""The entries of `allowed_functions`: their names in calls, and those that `init_rpc` refuses.

An entry is refused if it would allow everything: functions that run, load or look up what arrives, that read or write
memory or files as the caller says, or that are private to Python, torch or NumPy. The lists of names below cannot be
complete: an entry of another package is the judgement of the operator.
"""

import contextlib
import enum
import functools
import importlib
import importlib.util
import logging
import math
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.jit._builtins import _find_builtin

from .._calls.cpp_functions import CppFunction
from .objects import (
    LARGE_PACKAGES,
    MAIN_MODULES,
    bases_of,
    canonical_name,
    claimed_name,
    class_attribute,
    defined_attribute,
    find_loaded,
    full_name,
    functions_behind,
    is_class,
    package_of,
)

logger = logging.getLogger(__name__)

Entries: TypeAlias = Iterable[Callable[..., Any] | str]

# "module.*" stands for all that begins with "module.". A name of a class stands for its methods, too.
_UNSAFE = """
    builtins.eval builtins.exec builtins.compile builtins.__import__ builtins.getattr builtins.setattr builtins.delattr
    builtins.globals builtins.vars builtins.__build_class__ builtins.breakpoint builtins.open
    builtins.str.format builtins.str.format_map string.Formatter
    operator.attrgetter operator.methodcaller types.FunctionType types.CodeType types.MethodType
    os.system os.popen os.exec* os.spawn* os.posix_spawn* posix.system posix.exec* posix.spawn* posix.posix_spawn*
    os.open os.fdopen posix.open io.open io.open_code io.FileIO codecs.open tokenize.open
    importlib.* zipimport.* pkgutil.* imp.* runpy.* code.* codeop.* pdb.* bdb.* timeit.* trace.* profile.* cProfile.*
    doctest.* pydoc.* site.* sys.* gc.* inspect.* atexit.* logging.config.* subprocess.* _posixsubprocess.*
    multiprocessing.* pty.* marshal.* pickle.* _pickle.* shelve.* copyreg.* ctypes.* _ctypes.* mmap.* asyncio.*
    webbrowser.* unittest.* rlcompleter.* tkinter.* idlelib.* py_compile.* compileall.* modulefinder.* venv.*
    ensurepip.* lib2to3.* distutils.* typing.get_type_hints typing.ForwardRef annotationlib.*
    torch.load torch.serialization.* torch.storage.* torch.UntypedStorage torch.TypedStorage torch.hub.*
    torch.package.* torch.jit.load torch.jit.save torch.jit.CompilationUnit torch.export.load torch.export.save
    torch.frombuffer torch.from_file torch.multiprocessing.* torch.library.* torch.ops.load_library
    torch.classes.load_library torch.utils.cpp_extension.* torch._utils.* torch.utils.dlpack.* torch.from_dlpack
    torch.compile torch.compiler.* torch._dynamo.* torch._inductor.* torch.fx.* torch.Tensor.set_
    torch._C.TensorBase.set_ torch.nn.Module.compile torch.nn.modules.module.Module.compile
    torch.nn.attention.flex_attention.* torch.distributed.run.* torch.distributed.launch.* torch.distributed.launcher.*
    torch.distributed.elastic.* torch.distributed.checkpoint.*
    numpy.load numpy.save* numpy.fromfile numpy.frombuffer numpy.memmap numpy.ndarray numpy.dtype numpy.recarray
    numpy.loadtxt numpy.genfromtxt numpy.fromregex numpy.rec.* numpy.lib.*
    numpy.ctypeslib.* numpy.core.* numpy._core.* numpy.f2py.* numpy.distutils.* numpy.testing.*
    cffi.* dill.* joblib.* IPython.* setuptools.* pip.* sympy.* numexpr.* pandas.read_pickle pandas.eval
    yaml.load yaml.full_load yaml.unsafe_load
"""
_UNSAFE_NAMES = frozenset(name for name in _UNSAFE.split() if not name.endswith("*"))
_UNSAFE_PREFIXES = tuple(name[:-1] for name in _UNSAFE.split() if name.endswith("*"))
# A prefix may not name a part of a large package, except these. They do not allow what is unsafe.
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

# torch's operators. Those of `_OPERATORS` may be listed; the others, such as prim::* and inductor::*, are torch's own.
_OPERATORS = ("aten", "quantized", "prims")
_FOR_TORCH_ONLY = """
    prim c10d debug_mode_ops debugprims export inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn onnx profiler
    quantization rngprims sparse static_runtime symm_mem tensorexpr
"""
_OWN_OPERATORS_OF_TORCH = frozenset(_FOR_TORCH_ONLY.split())
# They read or write files, or let a tensor have the memory or the storage of the caller's choice.
_UNSAFE_OPERATORS = frozenset(["aten::from_file", "aten::save", "aten::load", "aten::set_", "aten::set_data"])
# No prefix covers these operators: they write to the log, change the state of a thread or of torch, read gradients of
# any context, or return memory that nobody has written.
_BY_NAME_ONLY = """
    aten::warn aten::manual_seed aten::seed aten::set_grad_enabled aten::get_gradients aten::record_stream aten::set
    aten::empty aten::empty_like aten::empty_permuted aten::empty_quantized aten::empty_strided aten::new_empty
    aten::new_empty_strided aten::resize aten::resize_ aten::resize_as aten::resize_as_ prims::empty
    prims::empty_permuted prims::empty_strided prims::resize
"""
_OPERATORS_BY_NAME_ONLY = frozenset(_BY_NAME_ONLY.split())

# Objects of `torch.ops`.
OPERATOR_OBJECTS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

# The classes that entries name, by id. An entry may find a class in another module than the class's `__module__`.
classes_of_entries: dict[int, tuple[type, set[str]]] = {}


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
    if isinstance(entry, OPERATOR_OBJECTS):
        return _operator_name(entry)
    module, name = getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)
    if not module or not name or "<" in name:
        raise ValueError(
            f"allowed_functions has {entry!r}, which has no name of its own at the top level of a module: such "
            "functions travel as code and cannot be allowed one by one."
        )
    return full_name(module, name)


def resolve(entries: Iterable[str]) -> list[str]:
    """Return the entries, and the names by which calls refer to their objects, where these names differ.

    `init_rpc` calls this function, because it imports the modules of the entries. For example, `os.getpid` is
    `posix.getpid` in calls, and `torch.add` is the operator `aten::add`. A prefix of torch's operators becomes the
    names of those that it allows.

    Raises:
        ValueError: an entry allows everything, or names nothing, so that it could never match.
    """
    names: dict[str, None] = {}
    for entry in entries:
        if entry.endswith("*") and entry.startswith(tuple(f"{space}::" for space in _OPERATORS)):
            names |= dict.fromkeys(_operators_of(entry))
            continue
        names[entry] = None
        if entry in ("", "*"):
            continue  # the core refuses them
        _refuse_if_unsafe(entry)
        if entry == "math.*":  # calls name some functions of math as operators: math.sqrt is aten::sqrt
            names |= dict.fromkeys(filter(None, map(_find_builtin, vars(math).values())))
        if "::" in entry or "(" in entry or entry.endswith("*") or entry.startswith("__torch__."):
            continue  # operators, C++ functions, prefixes and script functions are names, not objects
        owner, found = _find_entry(entry)
        _refuse_if_unsafe(entry)  # again, since its module is loaded now
        names |= dict.fromkeys(_other_names(entry, owner, found))
    return list(names)


def _other_names(entry: str, owner: Any, found: Any) -> list[str]:
    """Return the names by which calls refer to the object of an entry, and note which class the entry names."""
    if is_class(found):
        classes_of_entries.setdefault(id(found), (found, set()))[1].add(entry)
    names = []
    is_method = is_class(owner) and not is_class(found)
    if is_method:
        names.append(f"{claimed_name(owner)}.{entry.rpartition('.')[2]}")
    # A method that the class inherits from another package is allowed for this class only.
    if callable(found) and not (is_method and package_of(found) != package_of(owner)):
        with contextlib.suppress(ValueError):  # the object has no name of its own
            names.append(_name_of(found))
    return names


def _operators_of(entry: str) -> list[str]:
    """Return the names of torch's operators that the prefix "aten::*", or another one, allows."""
    prefix = entry.removesuffix("*")
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(prefix)}
    names -= _UNSAFE_OPERATORS | _OPERATORS_BY_NAME_ONLY
    if not (allowed := sorted(name for name in names if not name.partition("::")[2].startswith("_"))):
        raise ValueError(
            f"allowed_functions has {entry!r}, which can never match: no operator of torch that a prefix allows has "
            "such a name."
        )
    return allowed


def _refuse_if_unsafe(entry: str) -> None:
    if why := why_unsafe(entry):
        raise ValueError(f"allowed_functions has {entry!r}, which {why}")


def _find_entry(entry: str) -> tuple[Any, Any]:
    """Return the object that an entry names, and the object of which it is an attribute.

    Both are None if this process cannot import its module.
    """
    parts = entry.split(".")
    if len(parts) < 2 or not all(parts):
        raise ValueError(
            f"allowed_functions has {entry!r}, which can never match: write the name with its module, as in "
            "'package.module.function', or 'aten::add' for a torch operator."
        )
    is_main = parts[0] in MAIN_MODULES
    special = [part for part in (parts[1:] if is_main else parts) if part.startswith("__")]
    if special and special != parts[-1:]:
        raise ValueError(
            f"allowed_functions has {entry!r}, which goes through {special[0]}: name a function, a method or a class."
        )
    if is_main:
        # The script may define it later.
        owner, found = find_loaded(entry.rpartition(".")[0]), find_loaded(entry)
        return owner, found if found is None else _checked(entry, owner, found)
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            loaded = sys.modules.get(module) or importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if count > 1 and exc.name and module.startswith(exc.name):
                continue  # the rest may be a class and its method
            logger.warning("allowed_functions has %r, but this process has no module %s.", entry, module)
            return None, None
        except ImportError as exc:
            logger.warning("allowed_functions has %r, but its module %s cannot be imported: %s", entry, module, exc)
            return None, None
        try:
            owner = functools.reduce(getattr, parts[count:-1], loaded)
            return owner, _checked(entry, owner, getattr(owner, parts[-1]))
        except AttributeError as exc:
            raise ValueError(f"allowed_functions has {entry!r}, which can never match: {exc}.") from None
    return None, None


def _checked(entry: str, owner: Any, found: Any) -> Any:
    """Return the object that an entry names if it is a function, a method, a class or a member of an enum."""
    is_method = is_class(owner) and not is_class(found)
    is_special = entry.rpartition(".")[2].startswith("__")
    if not (callable(found) or isinstance(found, enum.Enum)) or (is_special and not is_method):
        raise ValueError(
            f"allowed_functions has {entry!r}, which can never match: it is a {type(found).__qualname__}, and neither "
            "a function nor a method nor a class."
        )
    return found


def why_unsafe(entry: str, look_up: bool = True) -> str:
    """Return why the entry may not be listed, as the end of a sentence; an empty string if it may.

    Args:
        look_up: whether to compare the object that the entry names, too. The look-up may run code, such as properties,
            so it must be False for a name from another worker.
    """
    prefix = entry.removesuffix("*") if entry.endswith("*") else None
    module = entry.removesuffix("*").removesuffix(".") + "."
    for package in ("torchrpc.", "torch.distributed.rpc.", "torch.distributed.autograd.", "cloudpickle."):
        if module.startswith(package) or (prefix is not None and package.startswith(prefix)):
            if prefix is None and (canonical_name(find_loaded(entry)) if look_up else entry) in _LISTABLE:
                return ""
            return (
                f"would let callers run parts of {package[:-1]} itself, such as its pickler, by which they can run any "
                "code: list your own functions. What the package needs for itself is always allowed."
            )
    if why := _why_operator_is_unsafe(entry, prefix):
        return why
    found = find_loaded(entry) if look_up and prefix is None else None
    names = [entry] if found is None else [entry, _public_name(entry), *_names_behind(entry, found)]
    if unsafe := _unsafe_part(prefix) if prefix is not None else _unsafe_name(names) or _unsafe_object(entry, found):
        return (
            f"would let callers run any code or reach any memory or file, by {unsafe}: list functions of your own that "
            "do what callers need. (Without allowed_functions, everything is allowed.)"
        )
    if prefix is not None:
        packages = [f"{package}." for package in LARGE_PACKAGES]
        is_large = any(prefix.startswith(package) or package.startswith(prefix) for package in packages)
        # "_test*" may begin the names of modules of Python.
        is_large = is_large or (prefix.startswith("_") and ("." not in prefix or _is_private_to_python(prefix)))
        if is_large and not prefix.startswith(_PARTS_FOR_PREFIXES):
            return (
                "would let callers run functions of a package that is not yours, and some of them run any code: name "
                "its functions one by one, or functions of your own that do what callers need."
            )
    elif _is_private(entry, found, look_up) or (found is not None and _is_hidden(entry, found)):
        return (
            "would let callers run a private function of a package that is not yours, which does not check what "
            "arrives: list functions of your own that do what callers need."
        )
    return ""


def _names_behind(entry: str, found: Any) -> list[str]:
    """Return the names of the object that the entry names and, if it is a method, of the functions that run."""
    path, _, name = entry.rpartition(".")
    owner = find_loaded(path)
    behind = functions_behind(class_attribute(owner, name)) if is_class(owner) else ()
    names = [canonical_name(each) for each in (found, *behind)]
    return [*names, *map(_public_name, names)]


def _why_operator_is_unsafe(entry: str, prefix: str | None) -> str:
    space, is_operator, name = entry.partition("::")
    operator = entry.partition(".")[0]
    if prefix is not None and not is_operator:
        spaces = [space for space in (*_OPERATORS, *_OWN_OPERATORS_OF_TORCH) if f"{space}::".startswith(prefix)]
        if not spaces or "." in prefix:
            return ""
        return f"would let callers run operators of torch, as {spaces[0]}::*: name a package, as in 'package.*'."
    if not is_operator:
        return ""
    is_private = name.startswith("_") and not name.startswith("__")
    if space in _OWN_OPERATORS_OF_TORCH or space.startswith("_") or (space in _OPERATORS and is_private):
        return (
            "would let callers run operators that torch has for itself, and which do not check what arrives: list "
            "functions of your own that do what callers need."
        )
    if operator in _UNSAFE_OPERATORS:
        return (
            f"would let callers reach any memory or file, by {operator}: list functions of your own that do what "
            "callers need."
        )
    return ""


def is_unsafe_name(name: str) -> bool:
    """Whether no entry and no prefix allows the name. Nothing is looked up."""
    return bool(_unsafe_name([name]))


def _unsafe_name(names: Iterable[str]) -> str:
    for name in names:
        if name.startswith(_UNSAFE_PREFIXES):
            return next(f"{prefix}*" for prefix in _UNSAFE_PREFIXES if name.startswith(prefix))
        while name:
            if name in _UNSAFE_NAMES:
                return name
            name = name.rpartition(".")[0]
    return ""


def _unsafe_part(prefix: str) -> str:
    """Return what is unsafe among the names that begin with the prefix; an empty string if nothing is."""
    for unsafe in _UNSAFE.split():
        if unsafe.startswith(prefix) and not unsafe.startswith(_PARTS_FOR_PREFIXES):
            return unsafe
    return _unsafe_name([prefix])


def _unsafe_object(entry: str, found: Any) -> str:
    """Return the name of an unsafe object that the entry names, or whose method it names; else an empty string."""
    if isinstance(found, OPERATOR_OBJECTS):
        name = _operator_name(found)
        return name if _why_operator_is_unsafe(name, None) else ""
    for each in (found, find_loaded(entry.rpartition(".")[0])):
        if is_class(each) and _is_memory(each):
            return claimed_name(each)
    for unsafe in _UNSAFE_NAMES:
        if found is not None and find_loaded(unsafe) is found:
            return unsafe
    return ""


def _operator_name(operator: Any) -> str:
    """Return the name of an object of `torch.ops`, without its overload: "aten::add"."""
    if isinstance(operator, torch._ops.OpOverload):
        return operator._schema.name
    return operator._qualified_op_name


def _is_memory(cls: type) -> bool:
    """Whether a class is one of torch's storages, or one of NumPy's that makes arrays of any bytes."""
    names = {claimed_name(base) for base in bases_of(cls)}
    is_storage = not names.isdisjoint(("torch.storage.UntypedStorage", "torch.storage.TypedStorage"))
    return is_storage or ("numpy.ndarray" in names and package_of(cls) == "numpy")


def _is_private(name: str, found: Any, look_up: bool = True) -> bool:
    """Whether a name is private to Python, torch or NumPy, and its object `found` has no public name there.

    C++ functions and classes have such names: `operator.add` is `_operator.add`, and `torch.Generator` is
    `torch._C.Generator`.
    """
    package = name.partition(".")[0]
    if package not in LARGE_PACKAGES and not (look_up and _is_private_to_python(package)):
        return False
    parts = name.split(".")
    if not look_up:
        return parts[-1].startswith("_")  # the object may have a public name
    return any(part.startswith("_") for part in parts) and (
        found is None or find_loaded(_public_name(name)) is not found
    )


def _is_hidden(entry: str, found: Any) -> bool:
    """Whether an entry of another package leads to an object that is private to Python, torch or NumPy.

    A method that a class inherits is not hidden, because the entry names the class.
    """
    path, _, name = entry.rpartition(".")
    owner = find_loaded(path)
    is_inherited = is_class(owner) and defined_attribute(owner, name)[0] is not owner
    if entry.partition(".")[0] in LARGE_PACKAGES or is_inherited or isinstance(found, OPERATOR_OBJECTS):
        return False
    return _is_private(canonical_name(found), found)


def _public_name(name: str) -> str:
    """Return the name that a private object of a large package would have if it was public; else an empty string."""
    package, *parts = name.split(".")
    private = [index for index, part in enumerate(parts) if part.startswith("_")]
    rest = parts[private[-1] + 1 :] if private else parts
    is_renamed = bool(private) or package.startswith("_")
    return ".".join((package.lstrip("_"), *rest)) if rest and is_renamed else ""


def _is_private_to_python(name: str) -> bool:
    """Whether a top-level module is one of Python's whose name begins with an underscore. Nothing is imported."""
    package = name.partition(".")[0]
    if not package.startswith("_") or package.startswith("__"):
        return False
    if package in sys.stdlib_module_names or package in sys.builtin_module_names:
        return True
    with contextlib.suppress(ImportError, ValueError):
        if spec := importlib.util.find_spec(package):
            place = str(spec.origin)
            return place.startswith(sysconfig.get_path("stdlib")) and "-packages" not in place
    return False
