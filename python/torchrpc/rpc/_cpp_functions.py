"""C++ functions, and the workers of a group that are C++ programs without Python."""

from typing import Any, NoReturn

from torchrpc._C import TensorPipeAgent, WorkerInfo

_FACTS = b"native"  # what a C++ worker publishes of itself (csrc/api/access.h)
_LEAVING = "leaving"


class CppFunction:
    """A function that a C++ program or library has registered by name on the worker that is called.

    Give it to `rpc_sync`, `rpc_async` and `remote` in place of a Python function. It runs there without the GIL. It
    takes positional arguments only: None, bool, int, float, complex, str, bytes, torch.Tensor, dtype, device, RRef, and
    lists, tuples and dicts of those.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"cpp_function({self.name!r})"

    def __call__(self, *args: Any) -> NoReturn:
        raise TypeError(f"{self!r} runs where a call sends it: rpc.rpc_sync(worker, {self!r}, args=(...))")


def cpp_function(name: str) -> CppFunction:
    """The C++ function of that name, to be called on a worker: `rpc.rpc_sync("ps", cpp_function("add"), args=(1, 2))`.

    Whether there is one, and what it takes, shows in the call: RuntimeError names the function, the worker and the
    argument.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a C++ function must be a str, but is a {type(name).__name__}: {name!r}")
    return CppFunction(name)


def refuse_keywords(function: CppFunction, kwargs: dict[str, Any]) -> NoReturn:
    raise TypeError(f"{function!r} takes positional arguments only, but kwargs has {sorted(kwargs)}.")


def is_cpp(agent: Any, worker: WorkerInfo) -> bool:
    """Whether a worker of the agent's group is a C++ program without Python."""
    return isinstance(agent, TensorPipeAgent) and agent._get_facts(worker.id) == _FACTS


def wait_for_cpp_workers(agent: Any, timeout: float) -> None:
    """Block until the C++ workers of the group have come to its end, too; they cannot take part in `_all_gather`."""
    if any(is_cpp(agent, worker) for worker in agent.get_worker_infos()):
        agent._meet(_LEAVING, timeout)
