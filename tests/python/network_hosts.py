"""Several hosts on this machine: network namespaces, connected by veth pairs and a bridge. Needs root and `ip`."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


class Hosts:
    """Two or more hosts in one network, each with an IPv4 and an IPv6 address."""

    def __init__(self, count):
        self.prefix = f"trpc{os.getpid()}"
        self.hub = f"{self.prefix}hub"
        self.names = [f"{self.prefix}h{number}" for number in range(count)]
        self.processes = []

    def __enter__(self):
        try:
            ip("netns", "add", self.hub)
            ip("-n", self.hub, "link", "add", "name", "bridge", "type", "bridge")
            ip("-n", self.hub, "link", "set", "bridge", "up")
            for number, name in enumerate(self.names):
                port = f"port{number}"
                ip("netns", "add", name)
                ip("-n", name, "link", "add", "name", "wire", "type", "veth", "peer", "name", port, "netns", self.hub)
                ip("-n", self.hub, "link", "set", port, "master", "bridge", "up")
                ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "wire")
                if Path("/proc/net/if_inet6").exists():
                    ip("-n", name, "address", "add", f"{self.address6(number)}/64", "dev", "wire", "nodad")
                ip("-n", name, "link", "set", "wire", "up")
                ip("-n", name, "link", "set", "lo", "up")
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        for number in range(len(self.names)):
            self.kill_all(number)
        for process in self.processes:
            process.kill()
            process.communicate()
        for name in [self.hub, *self.names]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)

    @staticmethod
    def address(number):
        return f"10.77.0.{number + 1}"

    @staticmethod
    def address6(number):
        return f"fd77::{number + 1}"

    def start(self, number, *command, env=None, prefix=(), **options):
        """Start Python on a host; `env` are more variables, `options` those of Popen. `prefix` is a command that gets
        Python's command line as its arguments and runs it.
        """
        clean = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
        source = str(Path(__file__).parents[2] / "python")
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, [source, clean.get("PYTHONPATH")]))
        clean |= {"TORCHRPC_INIT_TIMEOUT": "50", "OMP_NUM_THREADS": "1", **(env or {})}
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, **options}
        return self.spawn(number, *prefix, sys.executable, *command, env=clean, **options)

    def spawn(self, number, *command, **options):
        """Start any program on a host; `options` are those of Popen."""
        process = subprocess.Popen(["ip", "netns", "exec", self.names[number], *map(str, command)], **options)
        self.processes.append(process)
        return process

    def connect(self, number, state):
        """Plug a host's cable in (`"up"`) or out (`"down"`): its processes notice nothing but silence."""
        ip("-n", self.hub, "link", "set", f"port{number}", state)

    def kill_all(self, number):
        """Kill (SIGKILL) all processes of a host, those included that nobody has waited for."""
        pids = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True).stdout
        for pid in map(int, pids.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def why_not():
    if shutil.which("ip") is None:
        return "there is no `ip` (the package iproute2)"
    name = f"trpc{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return f"network namespaces cannot be made here: {made.stderr.strip()}" if made.returncode else ""


REASON = why_not()
