"""Values of a program's frames and objects, read without running code of the program."""

import ast
import inspect
import sys
import types

MISSING = object()
_MODULE_NAMESPACE = vars(types.ModuleType)["__dict__"]
_PLAIN_LOOKUPS = (vars(object)["__getattribute__"], vars(types.ModuleType)["__getattribute__"])
_HAS_PROXIES = sys.version_info >= (3, 13)  # f_locals is a proxy, not a copy


def evaluate(expression: ast.expr, frame: types.FrameType, child: "types.FrameType | None" = None) -> object:
    """Return the value of a name, attribute or item in a frame, or `MISSING`. `child`: the next inner frame."""
    if isinstance(expression, ast.Name):
        return variable(frame, expression.id, child)
    if isinstance(expression, ast.Attribute):
        return _named_attribute(evaluate(expression.value, frame, child), expression.attr)
    if isinstance(expression, ast.Subscript):
        index = expression.slice
        key = index.value if isinstance(index, ast.Constant) else evaluate(index, frame, child)
        return _static_item(evaluate(expression.value, frame, child), key)
    return MISSING


def variable(frame: types.FrameType, name: str, child: "types.FrameType | None" = None) -> object:
    found = _local_variable(frame, name, child)
    if found is MISSING and isinstance(frame.f_globals, dict):
        found = dict.get(frame.f_globals, name, MISSING)
    return found


def _local_variable(frame: types.FrameType, name: str, child: "types.FrameType | None") -> object:
    code = frame.f_code
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    if is_function and name not in code.co_varnames + code.co_cellvars + code.co_freevars:
        return MISSING
    variables = frame.f_locals
    if not is_function:  # a module or a class; its namespace may be of any type
        return dict.get(variables, name, MISSING) if type(variables) is dict else MISSING
    found = variables.get(name, MISSING)
    # Before Python 3.13 the frame keeps this copy of its variables, which would keep objects alive that the function
    # deletes later. So clear the copy, unless a function of sys.setprofile (it takes three arguments) runs for this
    # frame: then Python writes the copy back.
    if not _HAS_PROXIES and sys.getrefcount(variables) <= 3 and (child is None or not _takes_three(child.f_code)):
        variables.clear()
    return found


def _takes_three(code: types.CodeType) -> bool:
    return code.co_argcount >= 3 or bool(code.co_flags & inspect.CO_VARARGS)


def first_argument(frame: types.FrameType) -> object:
    code = frame.f_code
    return _local_variable(frame, code.co_varnames[0], None) if code.co_argcount else MISSING


def _mro(cls: type) -> tuple[type, ...]:
    return type.__dict__["__mro__"].__get__(cls)


def _class_attribute(cls: type, name: str) -> object:
    for base in _mro(cls):
        found = type.__dict__["__dict__"].__get__(base).get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


def static_attribute(value: object, name: str) -> object:
    """Return the attribute that a plain lookup finds, or `MISSING` if there is none or the lookup would run code."""
    if value is MISSING:
        return MISSING
    cls = type(value)
    if type in _mro(cls):  # a class
        found = _class_attribute(value, name)  # type: ignore[arg-type]
        return MISSING if _class_attribute(type(found), "__get__") is not MISSING else found
    lookup = _class_attribute(cls, "__getattribute__")
    if not any(lookup is each for each in _PLAIN_LOOKUPS):
        return MISSING
    found = _class_attribute(cls, name)
    if type(found) is types.MemberDescriptorType:  # a slot
        try:
            return found.__get__(value, cls)
        except AttributeError:
            return MISSING
    if found is not MISSING and _class_attribute(type(found), "__set__") is not MISSING:  # a property
        return MISSING
    namespace = _class_attribute(cls, "__dict__")
    held: object = MISSING
    if type(namespace) is types.GetSetDescriptorType or namespace is _MODULE_NAMESPACE:
        held = dict.get(namespace.__get__(value, cls), name, MISSING)
    if held is not MISSING:
        return held
    return MISSING if _class_attribute(type(found), "__get__") is not MISSING else found


def _named_attribute(value: object, name: str) -> object:
    """Return the attribute with that name in the source: `__x` in a class C is `_C__x`."""
    if name.startswith("__") and not name.endswith("__") and value is not MISSING:
        for cls in _mro(type(value)):
            found = static_attribute(value, f"_{type.__dict__['__name__'].__get__(cls).lstrip('_')}{name}")
            if found is not MISSING:
                return found
    return static_attribute(value, name)


def _static_item(value: object, key: object) -> object:
    if type(value) in (list, tuple) and type(key) is int:
        return value[key] if -len(value) <= key < len(value) else MISSING  # type: ignore[index, arg-type]
    if type(value) is dict and type(key) in (int, str) and len(value) <= 1000:
        return next((each for name, each in list(value.items()) if type(name) is type(key) and name == key), MISSING)
    return MISSING


def is_a(value: object, cls: type) -> bool:
    return cls in _mro(type(value))
