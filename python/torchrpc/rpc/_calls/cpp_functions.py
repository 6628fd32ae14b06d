"""C++ functions to call on a worker, and the C++ workers of a group: programs without Python."""

from typing import Any, NoReturn

from torchrpc._C import TensorPipeAgent, WorkerInfo

# As in csrc/api/access.h: the metadata that a C++ worker publishes, and the barrier before workers leave.
_CPP_METADATA = b"cpp"
_LEAVING_BARRIER = "leaving"


class CppFunction:
    """A function that a C++ program or library has registered by name on the callee.

    Pass it to `rpc_sync`, `rpc_async` and `remote` instead of a Python function. It runs on the callee without the GIL.
    It takes positional arguments only: None, bool, int, float, complex, str, bytes, torch.Tensor, dtype, device, RRef,
    dataclasses of `torchrpc.cpp_struct`, and lists, tuples and dicts of those.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"cpp_function({self.name!r})"

    def __call__(self, *args: Any) -> NoReturn:
        raise TypeError(f"{self!r} runs where a call sends it: rpc.rpc_sync(worker, {self!r}, args=(...))")


def cpp_function(name: str) -> CppFunction:
    """Return the C++ function of that name, for a call: `rpc.rpc_sync("ps", cpp_function("add"), args=(1, 2))`.

    Only the call checks whether the callee has the function and takes the arguments: its RuntimeError names the
    function, the worker and the argument. Any thread may call this function.

    Raises:
        TypeError: the name is not a str.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a C++ function must be a str, but is a {type(name).__name__}: {name!r}")
    return CppFunction(name)


def refuse_keywords(function: CppFunction, kwargs: dict[str, Any]) -> NoReturn:
    """Raise the TypeError of a call with keyword arguments."""
    raise TypeError(f"{function!r} takes positional arguments only, but kwargs has {sorted(kwargs)}.")


def is_cpp(agent: Any, worker: WorkerInfo) -> bool:
    """Whether a worker of the agent's group is a C++ program without Python."""
    return isinstance(agent, TensorPipeAgent) and agent._get_metadata(worker.id) == _CPP_METADATA


def wait_for_cpp_workers(agent: Any, timeout: float) -> None:
    """Block until the C++ workers of the group have reached their shutdown: they take no part in `_all_gather`.

    Args:
        timeout (float): seconds; 0: no limit.
    """
    if any(is_cpp(agent, worker) for worker in agent.get_worker_infos()):
        agent._barrier(_LEAVING_BARRIER, timeout)
