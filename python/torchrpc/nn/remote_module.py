"""RemoteModule: a proxy of an `nn.Module` that another worker owns; its forward runs on the owner.

It holds an RRef to the module and two callables, `forward` and `forward_async`, which hold the RRef themselves. They
are not bound methods: an object with its own bound methods in its `__dict__` would keep itself and the remote module
alive until Python collects cycles.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import _remote_device
from torch.utils import _pytree as pytree

from torchrpc._frames import program_stacklevel
from torchrpc.rpc import api
from torchrpc.rpc._calls.checks import check_arguments
from torchrpc.rpc._security.allow_list import check_callable, check_method, local_value
from torchrpc.rpc.api import RRef
from torchrpc.rpc.internal import _internal_rpc_pickler

from ._scripting import check_interface, compilable

__all__ = ["RemoteModule"]

# The attributes of a RemoteModule that are sent; the receiver makes `forward` and `forward_async` from them.
_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "module_interface",
    "module_rref",
)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# Attributes that every RemoteModule has and that are not sent. The attributes of nn.Module are empty.
_UNSENT_ATTRIBUTES = _MODULE_ATTRIBUTES | {"forward_async", "forward", "generated_methods"}

# Methods of nn.Module that a RemoteModule does not forward: they raise ValueError.
_UNSUPPORTED = """
    add_module apply bfloat16 buffers children cpu cuda double extra_repr float get_buffer get_parameter get_submodule
    half ipu load_state_dict modules mtia named_buffers named_children named_modules named_parameters
    register_backward_hook register_buffer register_forward_hook register_forward_pre_hook register_full_backward_hook
    register_full_backward_pre_hook register_module register_parameter requires_grad_ share_memory state_dict to
    to_empty type xpu zero_grad
"""


# --- Functions that run on the owner ---


def _create_module(module_cls: Callable[..., Any], args: tuple, kwargs: dict, device: str, interface: Any) -> nn.Module:
    check_callable(module_cls)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance "
            f"of {type(module)}."
        )
    try:
        module.to(device)
    except Exception as exc:
        worker = api.get_worker_info().name
        raise RuntimeError(f"{worker} cannot place a {type(module).__name__} on its device {device}: {exc}") from exc
    if interface is None:
        return module
    compiled = torch.jit.script(module)
    _remember_source(compiled, type(module))
    return compiled


# The id of a script module -> a weak reference to it, and the class of the module from which it was compiled. An
# allow-list names that class, because all script modules have the same class of torch.
_sources: dict[int, tuple[weakref.ref, type]] = {}


def _remember_source(compiled: nn.Module, source: type) -> None:
    key = id(compiled)
    _sources[key] = weakref.ref(compiled, lambda _: _sources.pop(key, None)), source


def _checked_module(rref: RRef, method: str) -> nn.Module:
    """Return the module. Raise NotAllowedError if other workers may not call that method of it."""
    module = local_value(rref)
    reference, source = _sources.get(id(module), (None, None))
    kind = source if reference is not None and reference() is module else None
    check_method(module, method, kind, base=nn.Module)
    return module


def _run_forward(rref: RRef, device: str, is_device_map_set: bool, args: tuple, kwargs: dict) -> Any:
    module = _checked_module(rref, "forward")
    if torch.device(device).type == "cpu":
        return module.forward(*args, **kwargs)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    result = module.forward(*args, **kwargs)
    # Without a device map only CPU tensors can be sent.
    return result if is_device_map_set else pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, result)


def _parameter_rrefs(rref: RRef, recurse: bool) -> list[RRef]:
    return [RRef(parameter) for parameter in _checked_module(rref, "parameters").parameters(recurse)]


def _set_training(rref: RRef, mode: bool) -> None:
    _checked_module(rref, "train").train(mode)


# --- The proxy ---


class _Forward:
    """Calls the module's forward on its owner. Returns the result if `blocking`, else a future of the result."""

    def __init__(self, rref: RRef, device: str, is_device_map_set: bool, blocking: bool) -> None:
        self.bound = (rref, device, is_device_map_set)
        self.blocking = blocking

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        future = api.rpc_async(self.bound[0].owner(), _run_forward, args=(*self.bound, args, kwargs))
        return future.wait() if self.blocking else future


class _RemoteModule(nn.Module):
    """A RemoteModule that `torch.jit.script` can compile.

    The arguments are those of RemoteModule, and `_module_interface_cls`, a class decorated by `torch.jit.interface`
    that declares the types of `forward`. The module on the owner is compiled, too. TorchScript code can call `forward`
    and `forward_async` of the compiled object. A call of `forward_async` occupies a thread of torch's inter-op pool
    until the call ends.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        if not callable(module_cls):
            raise TypeError(f"module_cls must be a class or function that makes a module, but is {module_cls!r}.")
        self._set_location(remote_device, _module_interface_cls)
        arguments = (module_cls, *check_arguments(args, kwargs), self.device, _module_interface_cls)
        self._refer_to(api.remote(self.on, _create_module, args=arguments))

    # Subclasses that are written for torch call the methods whose names and meaning are upstream's: _prepare_init,
    # _init_template, _install_generated_methods, _check_attribute_picklability.

    def _set_location(self, remote_device: str, interface: Any) -> None:
        """Set the attributes that name the module's worker and device, and its interface."""
        self._prepare_init(remote_device)
        self._init_template(interface)

    def _prepare_init(self, remote_device: str) -> bool:
        """Set the attributes that name the module's worker and device. Return whether the device is not the CPU."""
        if not api._is_current_rpc_agent_set():
            raise RuntimeError("RemoteModule only works in RPC. Call init_rpc first.")
        location = _remote_device(remote_device)
        agent = api._get_current_rpc_agent()
        self.on = location.rank() if location.worker_name() is None else location.worker_name()
        if self.on is None:
            self.on = agent.get_worker_info().name
        self.device = str(location.device())
        self.is_device_map_set = bool(agent._get_device_map(api._to_worker_info(self.on)))
        self._init_template(None)
        return torch.device(self.device).type != "cpu"

    def _init_template(self, interface: Any, _moves_tensors: bool = False) -> None:
        self.is_scriptable = interface is not None
        self.module_interface = interface
        if interface is not None:
            check_interface(interface)

    def _check_attribute_picklability(self) -> None:
        """Raise AttributeError if this object has attributes that are not sent with it."""
        if unsent := self._unsent_attributes():
            raise AttributeError(f"A RemoteModule is sent without attributes that were added to it: {unsent}.")

    def _unsent_attributes(self) -> list[str]:
        return sorted(vars(self).keys() - _UNSENT_ATTRIBUTES - set(_REMOTE_MODULE_PICKLED_ATTRIBUTES))

    def _refer_to(self, rref: Any) -> None:
        self.module_rref = rref
        self._install_generated_methods()

    def _install_generated_methods(self) -> None:
        """Set `forward` and `forward_async`, which call the module that `module_rref` refers to."""
        rref = self.module_rref
        self.forward_async = _Forward(rref, self.device, self.is_device_map_set, blocking=False)
        self.forward = _Forward(rref, self.device, self.is_device_map_set, blocking=True)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef, _module_interface_cls: Any = None
    ) -> "RemoteModule":
        """Return a RemoteModule of an existing module; several RemoteModules can share one module.

        Args:
            remote_device (str): as for the constructor; the device must be the module's. The worker is always the owner
                of `module_rref`, whatever `remote_device` says.
            module_rref (RRef): an RRef to the module, for example from `get_module_rref()`.

        Raises:
            RuntimeError, ValueError, TypeError: as the constructor.
        """
        module = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(module)
        module._set_location(remote_device, _module_interface_cls)
        module.on = module_rref.owner_name()
        module._refer_to(module_rref)
        return module

    def remote_parameters(self, recurse: bool = True) -> list[RRef]:
        """Return RRefs to the parameters, for DistributedOptimizer. Without `recurse`, leave out those of submodules.

        Raises:
            Exception: the error of the module's constructor; RuntimeError for a lost worker or a time-out.
        """
        return api.rpc_sync(self.module_rref.owner(), _parameter_rrefs, args=(self.module_rref, recurse))

    def get_module_rref(self) -> RRef:
        """Return the RRef to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> "_RemoteModule":
        """Set the module's training mode and wait until it is set. Returns this object."""
        api.rpc_sync(self.module_rref.owner(), _set_training, args=(self.module_rref, mode))
        self.training = mode
        return self

    def eval(self) -> "_RemoteModule":
        """Call `train(False)`. Returns this object."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULE_ATTRIBUTES:
            return super().__getattr__(name)
        # A RemoteModule that was sent here gets the attributes of nn.Module when one of them is used.
        for each, value in vars(nn.Module()).items():
            self.__dict__.setdefault(each, value)
        return self.__dict__[name]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, device={self.device!r})"

    def __getstate__(self) -> Any:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        )

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError(
            "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled when using RPC"
        )

    def __prepare_scriptable__(self) -> nn.Module:
        if not self.is_scriptable:
            raise RuntimeError(
                "torch.jit.script cannot compile this RemoteModule: it was made without _module_interface_cls, which "
                "declares the types of forward."
            )
        return compilable(self.module_interface, self.forward_async)


def _unsupported(name: str) -> Callable[..., Any]:
    remedy = ". Please use ``remote_parameters`` instead." if name == "parameters" else ""

    def method(self: _RemoteModule, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule{remedy}")

    method.__name__, method.__qualname__ = name, f"_RemoteModule.{name}"
    return method


for _name in [*_UNSUPPORTED.split(), "parameters"]:
    setattr(_RemoteModule, _name, _unsupported(_name))


class RemoteModule(_RemoteModule):
    """A module on another worker, used like a local one.

    The constructor starts the creation of the module on its owner and returns at once. If the creation fails, the first
    use of the module raises the error. Distributed autograd records the calls; gradients stay on the owner, with the
    parameters. A RemoteModule can be sent in calls and results, alone or inside other objects, and refers to the same
    module on every worker. It cannot be pickled in another way.

    Two attributes call the module, with the arguments of the module's own forward. `forward(...)`, or a call of the
    object, blocks and returns the result; `forward_async(...)` returns a Future of the result. If the module is on a
    device other than the CPU, tensors among the arguments are moved to that device, and results are returned on the CPU
    unless the group has a device map for the owner. Other methods of nn.Module except `train` and `eval` raise
    ValueError.

    Args:
        remote_device (str): "WORKER", "WORKER/DEVICE", "rank:RANK" or "rank:RANK/DEVICE", as in "worker1/cuda:0";
            "cpu" is the default device. A device alone means this worker.
        module_cls (class or function): creates the module; called on the owner.
        args (tuple): positional arguments of `module_cls`.
        kwargs (dict): keyword arguments of `module_cls`.

    Raises:
        RuntimeError: RPC is not initialized, the group has no such worker, or the device name is wrong.
        ValueError, TypeError: `remote_device` or `module_cls` has a wrong form.

    Any thread may call it, several at a time if the module allows that.

    Example:
        >>> layer = RemoteModule("worker1", nn.Linear, args=(20, 30))
        >>> layer(torch.randn(128, 20)).shape
        torch.Size([128, 30])
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.05)
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


# --- How a RemoteModule is pickled ---


def _rebuild(kind: type[_RemoteModule], attributes: tuple) -> _RemoteModule:
    module = object.__new__(kind)
    module.__dict__.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, attributes, strict=True))
    module._refer_to(module.module_rref)
    return module


def _reduce(module: _RemoteModule) -> tuple:
    if unsent := module._unsent_attributes():
        text = f"A RemoteModule is sent without the attributes that were added to it: {unsent}."
        warnings.warn(text, stacklevel=program_stacklevel())
    attributes = tuple(vars(module)[name] for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES)
    return _rebuild, (type(module), attributes)


for _kind in (_RemoteModule, RemoteModule):
    _internal_rpc_pickler._register_reducer(_kind, _reduce)
