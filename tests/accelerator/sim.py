"""A simulated accelerator for tests: the device type "sim", with four devices.

    import sim
    sim.load()
    torch.ones(3, device="sim:1")

The functions and classes have the names and arguments of torch.cuda, so that a test can use either module; `torch.sim`
is this module after load(). README.md says what the simulation promises. The environment variable SIM_DEVICES (4) is
the number of devices, and SIM_START_DELAY_S (0.001) the delay after which a stream starts a task.
SIMULATED_ACCELERATOR may name the extension's file; otherwise load() looks for it in the build folders of this tree.
"""

import atexit
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

import torch

NAME = "sim"
_extension = None


class NotBuiltError(ImportError):
    """The extension has not been built for this Python."""


def extension_path():
    """Return the path of the extension, or None if it is not built for this Python."""
    if named := os.environ.get("SIMULATED_ACCELERATOR"):
        return Path(named)
    builds = Path(__file__).resolve().parents[2] / "build"
    name = "simulated_accelerator" + sysconfig.get_config_var("EXT_SUFFIX")
    found = sorted(builds.glob(f"*/tests/accelerator/{name}"), key=lambda path: (path.parts[-4] != "release", path))
    return found[0] if found else None


def load(path=None):
    """Register the devices in torch, at the first call; return this module. `path` names the extension's file."""
    global _extension
    if _extension is not None:
        return sys.modules[__name__]
    path = path or extension_path()
    if path is None:
        raise NotBuiltError(
            "The simulated accelerator is not built for this Python: run "
            "`cmake --build build/release --target simulated_accelerator`."
        )
    spec = importlib.util.spec_from_file_location("simulated_accelerator", path)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    _extension = extension
    os.environ["TORCHRPC_DEVICE_PLUGINS"] = str(path)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    _prefer_cpp_meta_kernels()
    atexit.register(extension.stop)  # no thread may use torch while the process destroys it
    return sys.modules[__name__]


def _prefer_cpp_meta_kernels():
    """Restore the C++ meta kernels of operators, where torch has replaced them by slower ones in Python.

    The first call of a meta kernel in Python imports torch._dynamo, which takes seconds in each process of a test.
    """
    from torch import _meta_registrations
    from torch._decomp import global_decomposition_table

    global _meta_kernels
    _meta_registrations._meta_lib_dont_use_me_use_register_meta._destroy()
    _meta_kernels = torch.library.Library("aten", "IMPL", "Meta")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for kind in ("meta", "post_autograd", "pre_autograd"):
        keys = ["Meta", "CompositeImplicitAutograd", *(["CompositeExplicitAutograd"] if kind != "meta" else [])]
        for op, function in global_decomposition_table[kind].items():
            is_wanted = isinstance(op, torch._ops.OpOverload) and op.namespace == "aten" and not op.is_view
            if is_wanted and not any(has_kernel(op.name(), key) for key in keys):
                _meta_kernels.impl(op, function)


# Functions that torch itself calls in the module of a device.


def _is_in_bad_fork():
    return _extension.is_in_bad_fork()


def _lazy_init():
    _extension.check_usable()


init = _lazy_init


def is_initialized():
    return _extension is not None and _extension.is_initialized()


def is_available():
    return _extension is not None


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


# Devices.


def _index(device, optional=True):
    """Return the index of a device that is an index, a string, a torch.device or (the current one) None."""
    if device is None and optional:
        return current_device()
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    device = torch.device(device)
    if device.type != NAME:
        raise ValueError(f"Expected a {NAME} device, but got: {device}")
    return current_device() if device.index is None else device.index


def device_count():
    return _extension.device_count() if _extension is not None else 0


def current_device():
    return _extension.current_device()


def set_device(device):
    _extension.exchange_device(_index(device))


class device:
    """A context in which `device` is the current one; None changes nothing."""

    def __init__(self, device):
        self.index = None if device is None else _index(device)

    def __enter__(self):
        self.previous = None if self.index is None else _extension.exchange_device(self.index)
        return self

    def __exit__(self, *exc_info):
        if self.previous is not None:
            _extension.exchange_device(self.previous)


class device_of(device):
    """A context in which the device of a tensor is the current one."""

    def __init__(self, tensor):
        super().__init__(tensor.device if tensor.device.type == NAME else None)


def synchronize(device=None):
    """Wait for all streams of a device."""
    _extension.synchronize(_index(device))


def get_device_name(device=None):
    return f"simulated accelerator {_index(device)}"


def get_device_capability(device=None):
    return (9, 0)


def can_device_access_peer(device, peer):
    return _index(device) != _index(peer)


# Streams and events.


class Stream(torch.Stream):
    """A stream from the pool of a device."""

    def __new__(cls, device=None, priority=0, **kwargs):
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


def Event(enable_timing=False, blocking=False, interprocess=False):
    """Return an event of the device on whose stream it is recorded first. torch.Event allows no subclasses."""
    return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking)


def current_stream(device=None):
    return torch.accelerator.current_stream(torch.device(NAME, _index(device)))


def default_stream(device=None):
    return torch.Stream(
        stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.PrivateUse1.value
    )


def set_stream(stream):
    if stream is not None:
        torch.accelerator.set_stream(stream)


class stream:
    """A context in which `stream` is the current stream of its device, and the device the current one."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.stream.__enter__()
        return self

    def __exit__(self, *exc_info):
        if self.stream is not None:
            self.stream.__exit__(*exc_info)


def _sleep(cycles):
    """Keep the current stream busy for `cycles` nanoseconds."""
    _extension.occupy(current_stream(), cycles * 1e-9)


def hold(stream=None):
    """Keep a stream (by default the current one) from starting tasks.

    The stream continues after release() of the result, at the end of its `with` block, or after a minute.
    """
    return _extension.hold(current_stream() if stream is None else stream)


# Memory.


def memory_allocated(device=None):
    """Return how many bytes of a device's memory are in use."""
    return _extension.allocated_bytes(_index(device))


def empty_cache():
    pass


def set_memory_limit(device, limit_bytes):
    """Let allocations that would take more than `limit_bytes` of a device fail with OutOfMemoryError."""
    _extension.set_memory_limit(_index(device), limit_bytes)


OutOfMemoryError = torch.OutOfMemoryError

# Random numbers.


def _generator(device):
    return _extension.default_generator(_index(device))


def manual_seed(seed):
    _generator(None).manual_seed(seed)


def manual_seed_all(seed):
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed():
    return _generator(None).initial_seed()


def get_rng_state(device=NAME):
    return _generator(device).get_state()


def set_rng_state(state, device=NAME):
    _generator(device).set_state(state)


def get_rng_state_all():
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states):
    for index, state in enumerate(states):
        set_rng_state(state, index)


# For tests of the code that uses the devices.


def set_start_delay(seconds):
    """Set after how many seconds streams start a task; return the previous value."""
    previous = _extension.start_delay()
    _extension.set_start_delay(seconds)
    return previous


def set_strict(strict):
    """Set whether a missing synchronization makes the result poison (the default, unless SIM_STRICT=0).

    Otherwise it is only listed, and the result depends on the timing of the threads, as with a real accelerator.
    """
    _extension.set_strict(strict)


def take_conflicts():
    """Return descriptions of the missing synchronizations since the last call; README.md defines them."""
    return _extension.take_conflicts()


def fail_next_tasks(device, count=1):
    """Let kernels and copies that a device executes next fail; the next synchronization of their stream raises."""
    _extension.fail_next_tasks(_index(device), count)


def fail_next_allocations(device, count=1):
    """Let the next allocations on a device fail with OutOfMemoryError."""
    _extension.fail_next_allocations(_index(device), count)


def executed_tasks(device=None):
    """Return how many tasks a device has executed."""
    return _extension.executed_tasks(_index(device))
