"""`python -m torchrpc doctor`: reports what torchrpc would use on this machine, and why other choices do not work.

Each trial of a transport and each call runs in a child process, forked after torch is loaded, so that a crash or hang
becomes a finding. Trials use only functions that `init_rpc` also uses.
"""

import argparse
import contextlib
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["main"]

OK, NOTE, FAILED = "ok", "note", "FAILED"
# As in csrc/transport/host_address.h: the first that is set is used.
INTERFACE_VARIABLES = ("TORCHRPC_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
TENSORPIPE_TRANSPORTS = ("shm", "ibv", "uv")
TENSORPIPE_CHANNELS = ("cma", "mpt_uv", "basic", "xth")
DESCRIPTORS_PER_PEER = 2  # one connection; two if both workers dial at the same time
TRIAL_TIMEOUT_S = 30.0
DEVICE_TRIAL_S = 5.0
WARM_UP_CALLS, TIMED_CALLS = 50, 200

DESCRIPTION = """\
Reports what torchrpc would use on this machine: versions, the address that workers would listen on, which transports
work and why others do not, limits of the system, and the time of a call between two processes. It reads the environment
variables that init_rpc reads, so run it in the environment of your program.

Exit code: 0 if calls work, 1 if they do not."""


class Finding(NamedTuple):
    level: str
    text: str


class Report:
    """Prints findings. `failed` is true after a finding which means that calls cannot work."""

    def __init__(self) -> None:
        self.failed = False

    def section(self, title: str, findings: Iterator[Finding]) -> None:
        print(f"\n{title}", flush=True)
        for level, text in findings:
            self.failed |= level == FAILED
            print(f"  {level:6}  {text}", flush=True)


# --- Trials in child processes ---


def trial(function: Callable[..., Any], *args: Any, processes: int = 1, start_method: str = "fork") -> tuple[Any, str]:
    """Run the function in child processes. Return (its result on rank 0, ""); if one fails, (None, an error text)."""
    from ._C import _ASK_DOCTOR
    from .testing import RankError, run_ranks

    # A trial uses the address that a group over several machines would use.
    env = {"MASTER_ADDR": os.environ.get("MASTER_ADDR", "")}
    try:
        values = run_ranks(
            function, processes, *args, start_method=start_method, timeout=TRIAL_TIMEOUT_S, init=False, env=env
        )
        return values[0], ""
    except RankError as error:
        text = str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")
        return None, text.removesuffix(f". {_ASK_DOCTOR}")


def published_address(_: int, options: dict[str, Any]) -> tuple[str, str]:
    """Start a worker in a group of one; return the name of its transport and the address that it publishes."""
    import torch.distributed as dist

    from .rpc import TensorPipeAgent, TensorPipeRpcBackendOptions

    store = dist.HashStore()
    agent = TensorPipeAgent(store, "doctor", 0, 1, TensorPipeRpcBackendOptions(**options), {}, [], init_timeout=10.0)
    agent.start()
    try:
        return agent.get_debug_info()["agent.transport"], store.get("worker/0").decode(errors="replace")
    finally:
        agent.shutdown()


def timed_calls(rank: int, url: str, options: dict[str, Any]) -> tuple[str, float, float]:
    """Run one of two workers. Rank 0 returns the transport and the median times (s) of calls of 16 bytes and 1 MiB."""
    import torch

    from . import rpc

    torch.set_num_threads(1)
    backend_options = rpc.TensorPipeRpcBackendOptions(init_method=url, rpc_timeout=TRIAL_TIMEOUT_S, **options)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=backend_options)
    result = ("", 0.0, 0.0)
    if rank == 0:
        used = rpc._get_debug_info()["agent.transport"]
        small, large = torch.ones(4), torch.ones(2**18)
        result = (used, median_call(rpc, small, TIMED_CALLS), median_call(rpc, large, TIMED_CALLS // 10))
    rpc.shutdown()
    return result


def device_paths(rank: int, url: str, devices: list[str]) -> dict[str, str]:
    """Run one of two workers. Rank 0 returns {device: how its tensors travel to the other worker on this machine}."""
    import torch

    from . import rpc

    backend_options = rpc.TensorPipeRpcBackendOptions(
        init_method=url, rpc_timeout=TRIAL_TIMEOUT_S, device_maps="identity"
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=backend_options)
    found: dict[str, str] = {}
    end = time.monotonic() + DEVICE_TRIAL_S
    while rank == 0 and len(found) < len(devices) and time.monotonic() < end:
        for device in devices:
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(4, device=device), 1))
            path = rpc._get_debug_info().get(f"device.path.worker1 {device}", "")
            if path and "not known yet" not in path:
                found[device] = path
        time.sleep(0.01)
    rpc.shutdown()
    return found


def median_call(rpc: Any, tensor: Any, calls: int) -> float:
    """Return the median time of `torch.add` of the tensor on worker1, in seconds."""
    import torch

    times = []
    for number in range(WARM_UP_CALLS + calls):
        start = time.perf_counter()
        rpc.rpc_sync("worker1", torch.add, args=(tensor, 1))
        if number >= WARM_UP_CALLS:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


# --- Sections ---


def versions() -> Iterator[Finding]:
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    yield Finding(OK if platform.machine() in ("x86_64", "aarch64") else NOTE, system)
    try:
        import torch
    except Exception as error:
        yield Finding(FAILED, f"torch cannot be imported: {error}")
        return
    import torchrpc

    yield Finding(OK, f"torch {torch.__version__} in {Path(torch.__file__).parent}")
    yield Finding(OK, f"torchrpc {torchrpc.__version__} in {Path(__file__).parent}")
    try:
        from . import _C

        yield Finding(OK, f"the extension {Path(_C.__file__ or '').name} loads")
    except Exception as error:
        yield Finding(FAILED, f"the extension torchrpc._C does not load: {error}. Build it again (pip install .).")
        return
    yield replacement()


def replacement() -> Finding:
    """Report whether torchrpc can replace torch.distributed.rpc in scripts."""
    if not any(hook.value.startswith("torchrpc.") for hook in metadata.entry_points(group="torch.backends")):
        return Finding(NOTE, "`import torch` does not find torchrpc (no pip install): TORCHRPC_REPLACE has no effect")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return Finding(NOTE, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps TORCHRPC_REPLACE from having an effect")
    return Finding(OK, "TORCHRPC_REPLACE=1 and `python -m torchrpc script.py` replace torch.distributed.rpc")


def address() -> Iterator[Finding]:
    yield from rendezvous()
    named = [name for name in INTERFACE_VARIABLES if os.environ.get(name)]
    if named:
        why = f"by {named[0]}={os.environ[named[0]]}"
    elif os.environ.get("MASTER_ADDR"):
        why = "the one that leads to MASTER_ADDR"
    else:
        why = "the one of the default route, as MASTER_ADDR is not set"
    found, reason = trial(published_address, {"transport": "native"})
    if found is None:
        yield Finding(FAILED, f"no address to listen on ({why}): {reason}")
        return
    match = re.search(r"tcp=\[?([^;]*?)\]?:\d+;", found[1])
    host = match[1] if match else "?"
    ports = os.environ.get("TORCHRPC_PORT", "0")
    port = "a free port" if ports == "0" else f"{ports} (TORCHRPC_PORT)"
    yield Finding(OK, f"workers listen on {host} (interface {interface_of(host)}; {why}), each on {port}")
    yield secret(host.startswith("127.") or host == "::1")
    if host.startswith("127.") or host == "::1":
        yield Finding(
            NOTE,
            "only this machine can reach it; for others set MASTER_ADDR to a name that they resolve",
        )
    else:
        yield Finding(NOTE, "traffic there is not encrypted: see the documentation, Threat model")


def secret(is_local: bool) -> Finding:
    """Report where the secret comes from. The preceding trial has checked that a secret file can be used."""
    variables = [name for name in ("TORCHRPC_SECRET_FILE", "TORCHRPC_SECRET") if os.environ.get(name)]
    if variables:
        return Finding(OK, f"workers authenticate with the secret of {variables[0]}; it does not pass the store")
    if is_local:
        return Finding(OK, "workers authenticate by a key that only processes of this user on this machine can read")
    return Finding(
        NOTE,
        "workers authenticate with a secret from the store: any process that can reach MASTER_ADDR:MASTER_PORT can "
        "join. To restrict that, set TORCHRPC_SECRET_FILE on all workers",
    )


def rendezvous() -> Iterator[Finding]:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name))
        yield Finding(NOTE, f"not set: {missing}, the rendezvous unless init_method names another")
        return
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
    except (OSError, ValueError, OverflowError) as error:
        yield Finding(FAILED, f"MASTER_ADDR={host}, MASTER_PORT={port} cannot be resolved: {error}")
        return
    yield Finding(OK, f"the rendezvous is {host}:{port} ({', '.join(sorted(map(str, found)))})")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        yield Finding(NOTE, "a process listens there: if it is not your group, choose another MASTER_PORT")
    except OSError as error:
        yield Finding(NOTE, f"no process listens there yet ({error}): rank 0 will, if {host} is its machine")


def interface_of(host: str) -> str:
    """Return the name of the network interface that has this address."""
    import fcntl

    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if ":" in host and bytes.fromhex(digits) == socket.inet_pton(socket.AF_INET6, host):
                return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return "unknown"


def transports() -> Iterator[Finding]:
    value = os.environ.get("TORCHRPC_TRANSPORT")
    setting = f"with TORCHRPC_TRANSPORT={value}" if value else "by default"
    found, reason = trial(published_address, {})
    if found is None:
        yield Finding(FAILED, f"no transport {setting}: {reason}")
    else:
        yield Finding(OK, f"{found[0]} is used {setting}")
    yield transport_finding("native", {"transport": "native"})
    for name in TENSORPIPE_TRANSPORTS:
        yield transport_finding(f"tensorpipe, transport {name}", {"transport": "tensorpipe", "_transports": [name]})
    for name in TENSORPIPE_CHANNELS:
        yield transport_finding(
            f"tensorpipe, channel {name}", {"transport": "tensorpipe", "_transports": ["uv"], "_channels": [name]}
        )
    yield transport_finding("ucx", {"transport": "ucx"})


def transport_finding(name: str, options: dict[str, Any]) -> Finding:
    """Report whether a worker with these options starts, and if not, why."""
    found, reason = trial(published_address, options)
    if found is not None:
        return Finding(OK, f"{name} works")
    # "no usable transport in …: it gives 'ibv' (ibv: no device), there are …"
    refused = re.search(r" \(\w+: (.*)\), there are ", reason)
    return Finding(NOTE, f"{name} is not used: {refused[1] if refused else reason}")


def limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hosts = soft // DESCRIPTORS_PER_PEER
    text = f"descriptors: {soft}, enough for about {hosts} workers on this machine"
    yield Finding(OK, text) if soft >= 1024 else Finding(NOTE, f"{text}; `ulimit -n {hard}` gives all there are")
    with contextlib.suppress(OSError):
        space = shutil.disk_usage("/dev/shm")
        free = f"{space.free / 2**20:,.0f} MiB free of {space.total / 2**20:,.0f}"
        yield Finding(OK, f"/dev/shm: {free} (calls share memory without it; torch's DataLoader needs it)")
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
        says = {"0": "processes of one user may read each other's memory", "1": "only after they have allowed it"}
        yield Finding(OK, f"ptrace scope {scope}: {says.get(scope, 'reading the memory of others is forbidden')} (cma)")
    except OSError:
        yield Finding(OK, "ptrace scope: not limited by Yama (cma)")


def devices() -> Iterator[Finding]:
    """Report how tensors on this machine's accelerators travel to other workers."""
    import torch

    kind = torch.accelerator.current_accelerator()
    if kind is None:
        yield Finding(OK, "no accelerator: only tensors on the CPU can be sent")
        return
    count = torch.accelerator.device_count()
    names = ", ".join(f"{kind.type}:{index}" for index in range(count)) if count <= 4 else f"{count} of {kind.type}"
    yield Finding(OK if count else NOTE, f"accelerators: {names}" if count else f"{kind.type} has no devices here")
    if not count:
        return
    try:
        torch.empty(1, pin_memory=True)
        memory = "pinned host memory"
    except RuntimeError as error:
        memory = f"host memory, which cannot be pinned ({str(error).splitlines()[0]})"
    yield Finding(OK, f"by device maps (docs: devices), tensors go to workers on other machines through {memory}")
    from .testing import free_port

    listed = [f"{kind.type}:{index}" for index in range(count)]
    url = f"tcp://127.0.0.1:{free_port()}"
    found, reason = trial(device_paths, url, listed, processes=2, start_method="spawn")
    if found is None:
        yield Finding(NOTE, f"a trial of two processes with these devices failed: {reason}")
    for device, path in sorted((found or {}).items()):
        yield Finding(OK if "shared" in path else NOTE, f"{device}: to another process of this machine {path}")


def calls() -> Iterator[Finding]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("as your program would", {}),
        ("over TCP, as between machines", {"transport": "tcp"}),
        ("tensorpipe over TCP", {"transport": "tensorpipe", "_transports": ["uv"]}),
    ]
    for name, options in kinds:
        from .testing import free_port

        found, reason = trial(timed_calls, f"tcp://127.0.0.1:{free_port()}", options, processes=2)
        if found is None:
            yield Finding(FAILED if not options else NOTE, f"{name}: a call between two processes fails: {reason}")
        else:
            used, small, large = found
            times = f"{small * 1e6:,.0f} µs for torch.add of 4 numbers, {large * 1e6:,.0f} µs with 1 MiB each way"
            yield Finding(OK, f"{name}, {used}: {times}")


def main(arguments: list[str] | None = None) -> int:
    """Print the report. Return the exit code: 1 if calls cannot work, else 0."""
    parser = argparse.ArgumentParser(
        "python -m torchrpc doctor", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    report = Report()
    report.section("Versions", versions())
    is_installed = not report.failed
    if is_installed:
        report.section("Limits", limits())
        report.section("Address", address())
    if not report.failed:  # nothing can be tried without an address
        report.section("Transports", transports())
        report.section("Calls between two processes (medians)", calls())
    if is_installed:  # last, because it may start CUDA, after which a child process cannot be forked
        report.section("Devices", devices())
    print("\nCalls cannot work here: see FAILED above." if report.failed else "\nCalls work here.")
    return int(report.failed)
