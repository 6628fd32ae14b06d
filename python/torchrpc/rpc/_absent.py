"""Stand-ins for names of torch's modules that torchrpc has no use for.

A program can import them. Each use of one raises an error that says what to use instead.
"""

from typing import Any, NoReturn

CALL = "make the call by rpc_sync, rpc_async or remote"


class Absent:
    """Stands for `name`, a function or an object: its use raises NotImplementedError or AttributeError."""

    def __init__(self, name: str, instead: str) -> None:
        self.__doc__ = f"torchrpc has no {name}: {instead}."

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(self.__doc__)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self.__doc__} (It was asked for {name!r}.)")


_invoke_rpc_builtin = Absent("_invoke_rpc_builtin", CALL)
_invoke_rpc_python_udf = Absent("_invoke_rpc_python_udf", CALL)
_invoke_rpc_torchscript = Absent("_invoke_rpc_torchscript", CALL)
_invoke_remote_builtin = Absent("_invoke_remote_builtin", CALL)
_invoke_remote_python_udf = Absent("_invoke_remote_python_udf", CALL)
_invoke_remote_torchscript = Absent("_invoke_remote_torchscript", CALL)
