"""What functions, classes and attributes of classes are: their names, their packages, and the functions that run.

The allow-list decides by these facts. The functions here run no code of the objects, except where they say so. Any
thread may call them.
"""

import contextlib
import functools
import inspect
import sys
import types
from typing import Any

NOTHING: Any = object()
MAIN_MODULES = ("__main__", "__mp_main__")
# Packages that are not the program's, and in which functions for many purposes lie side by side.
LARGE_PACKAGES = sys.stdlib_module_names | {"torch", "numpy"}

_MODULE_OF_TYPE: Any = vars(type)["__module__"]
_NAME_OF_TYPE: Any = vars(type)["__qualname__"]
_MRO_OF_TYPE: Any = vars(type)["__mro__"]
_DICT_OF_TYPE: Any = vars(type)["__dict__"]
# pybind11 makes the methods of its classes of this type, which has no name in `types`.
_INSTANCE_METHOD = ("builtins", "instancemethod")
_LRU_CACHE = type(functools.lru_cache(lambda: None))
_METHODS_OF_C = (types.MethodDescriptorType, types.ClassMethodDescriptorType, types.WrapperDescriptorType)


def full_name(module: str, name: str) -> str:
    """Return the name with its module. `__mp_main__` is `__main__`."""
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"


def claimed_parts(obj: Any) -> tuple[str, str]:
    """Return the module and the qualified name that a function or class gives for itself, or two empty strings.

    A metaclass cannot change the name that is read from a class.
    """
    if is_class(obj):
        try:
            module, name = _MODULE_OF_TYPE.__get__(obj), _NAME_OF_TYPE.__get__(obj)
        except AttributeError:
            return "", ""
    else:
        module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    return (module, name) if type(module) is str and type(name) is str else ("", "")


def claimed_name(obj: Any) -> str:
    """Return the name that a function or class gives for itself; an empty string if it gives none."""
    module, name = claimed_parts(obj)
    return full_name(module, name) if name else ""


def canonical_name(obj: Any) -> str:
    """Return the name of a function or class in the module or class that defines it; an empty string if it has none.

    For example, the name of `OwnText.format`, which a class inherits from str, is "builtins.str.format".
    """
    if isinstance(obj, _METHODS_OF_C):
        return f"{claimed_name(obj.__objclass__)}.{obj.__name__}"
    if isinstance(obj, types.BuiltinFunctionType) and not obj.__module__:
        owner = obj.__self__ if is_class(obj.__self__) else type(obj.__self__)
        return f"{claimed_name(owner)}.{obj.__name__}"
    return claimed_name(obj)


def package_of(obj: Any) -> str:
    """Return the top-level package of a function or class, from its name; an empty string if it has none."""
    return claimed_name(obj).partition(".")[0]


def is_class(obj: Any) -> bool:
    """Whether the object is a class, whatever it says of itself."""
    return issubclass(type(obj), type)


def class_attribute(kind: type, name: str) -> Any:
    """Return the attribute of that name as the class, or one of its bases, stores it; None if there is none.

    No code of the class runs.
    """
    return defined_attribute(kind, name)[1]


def defined_attribute(kind: type, name: str) -> tuple[type, Any]:
    """Return the class that defines an attribute of a class, and the attribute as that class stores it.

    The attribute is None, and the class is `kind`, if there is none. No code of the class runs.
    """
    for base in _MRO_OF_TYPE.__get__(kind):
        found = _DICT_OF_TYPE.__get__(base).get(name, NOTHING)
        if found is not NOTHING:
            return base, found
    return kind, None


def bases_of(kind: type) -> tuple[type, ...]:
    """Return the class and its bases, in the order in which attributes are looked up."""
    return _MRO_OF_TYPE.__get__(kind)


def functions_behind(found: Any) -> tuple:
    """Return the functions that a call of this attribute of a class runs; none if it is not a method.

    A decorated function stands for the function that its decorator has kept (`__wrapped__`). Objects with a `__call__`,
    bound methods, partial objects, script functions and the functions of other compilers count as no methods: nothing
    says which code they run.
    """
    waiting, behind, seen = [found], [], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if kind in (staticmethod, classmethod) or (kind.__module__, kind.__name__) == _INSTANCE_METHOD:
            waiting.append(each.__func__)
        elif kind is functools.partialmethod:
            waiting.append(each.func)
        elif kind is functools.singledispatchmethod:
            waiting += [each.func, *each.dispatcher.registry.values()]
        elif kind in (types.FunctionType, _LRU_CACHE) and "__wrapped__" in vars(each):
            waiting.append(vars(each)["__wrapped__"])
        elif kind in (types.FunctionType, types.BuiltinFunctionType, *_METHODS_OF_C):
            behind.append(each)
        else:
            return ()
    return tuple(behind)


def is_defined_by(function: Any, definer: type, packages: set[str]) -> bool:
    """Whether a function that is an attribute of a class was defined for that class or in one of the packages."""
    if isinstance(function, _METHODS_OF_C):
        return function.__objclass__ is definer
    if isinstance(function, types.BuiltinFunctionType) and not function.__module__:
        return function.__self__ is definer
    return function.__module__ is not None and package_of(function) in packages


def find_loaded(name: str) -> Any:
    """Return the object of that name if its module is loaded; else None. Properties and the like run."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if module := sys.modules.get(".".join(parts[:count])):
            with contextlib.suppress(AttributeError):
                return functools.reduce(getattr, parts[count:], module)
    return None


def is_own_name(name: str) -> bool:
    """Whether a loaded module of the program defines a function, class or method of that name itself.

    The name of an object that the module has from elsewhere is not its own, such as "package.module.os.system". Nothing
    is imported, and no properties run.
    """
    if not _is_of_program(name.partition(".")[0]):
        return False
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module: Any = sys.modules.get(".".join(parts[:count]))
        if type(module) is types.ModuleType:
            # A module may be known under a name that is not its own.
            is_own = module.__dict__.get("__name__") in (".".join(parts[:count]), *MAIN_MODULES)
            return is_own and canonical_name(_find_in(module, parts[count:])) == name
    return False


def _find_in(module: types.ModuleType, path: list[str]) -> Any:
    """Return the function or class that the path through classes of the module leads to; else None."""
    found: Any = module.__dict__.get(path[0])
    for part in path[1:]:
        found = class_attribute(found, part) if is_class(found) else None
    if type(found) is _LRU_CACHE:
        found = inspect.unwrap(found)
    elif type(found) in (staticmethod, classmethod):
        found = found.__func__
    return found if is_class(found) or isinstance(found, (types.FunctionType, types.BuiltinFunctionType)) else None


def _is_of_program(package: str) -> bool:
    """Whether a top-level module is of the program: loaded, and not of Python, torch or an installed package."""
    if package in MAIN_MODULES:
        return True
    spec = getattr(sys.modules.get(package), "__spec__", None)
    if package in LARGE_PACKAGES or not spec:
        return False
    places = [str(spec.origin), *(spec.submodule_search_locations or ())]
    return not any(folder in place for place in places for folder in ("site-packages", "dist-packages"))
