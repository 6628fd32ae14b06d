"""Groups over several hosts: network namespaces, connected by veth pairs and a bridge. Needs root and `ip`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("hosts_worker.py")
PORT = 29533


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

    def start(self, number, *command):
        env = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
        source = str(Path(__file__).parents[2] / "python")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH")]))
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[number], sys.executable, *map(str, command)],
            env={**env, "TORCHRPC_INIT_TIMEOUT": "50", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def talk(self, url):
        """Run one worker on each host; return their observations."""
        size = len(self.names)
        workers = [self.start(rank, WORKER, "talk", rank, size, url) for rank in range(size)]
        return [self.seen(worker) for worker in workers]

    @staticmethod
    def seen(process):
        out, _ = process.communicate(timeout=90)
        assert process.returncode == 0
        return json.loads(out.splitlines()[-1])


def why_not():
    if shutil.which("ip") is None:
        return "there is no `ip` (the package iproute2)"
    name = f"trpc{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return f"network namespaces cannot be made here: {made.stderr.strip()}" if made.returncode else ""


REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture
def hosts():
    with Hosts(2) as made:
        yield made


def expect_talk(seen, addresses):
    for rank, each in enumerate(seen):
        assert each["answers"] == [f"worker{rank} from worker{other}" for other in range(len(seen))]
        assert each["listening"] == [addresses(rank)]


def test_a_static_group_forms_over_tcp():
    with Hosts(3) as hosts:
        expect_talk(hosts.talk(f"tcp://{hosts.address(0)}:{PORT}"), hosts.address)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_static_group_forms_over_ipv6(hosts):
    expect_talk(hosts.talk(f"tcp://[{hosts.address6(0)}]:{PORT}"), hosts.address6)


def test_a_group_started_by_torchrun_forms(hosts):
    nodes = [
        hosts.start(
            number,
            *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"),
            *(f"--master-addr={hosts.address(0)}", f"--master-port={PORT}", WORKER, "talk"),
        )
        for number in range(2)
    ]
    expect_talk([hosts.seen(node) for node in nodes], hosts.address)


def test_a_call_ends_when_the_network_is_cut(hosts):
    url = f"tcp://{hosts.address(0)}:{PORT}"
    first, second = (hosts.start(rank, WORKER, "cut", rank, 2, url) for rank in range(2))
    assert "ready" in first.stdout.readline()
    assert "ready" in second.stdout.readline()
    ip("-n", hosts.hub, "link", "set", "port1", "down")
    first.stdin.write("cut\n")
    first.stdin.flush()
    seen = json.loads(first.stdout.readline())
    # At the call's time-out at the latest; liveness detection may end it sooner.
    assert seen["error"]
    assert seen["seconds"] < 5


def test_delay_and_loss_change_nothing_but_time(hosts):
    for number in range(2):
        netem = ["root", "netem", "delay", "10ms", "3ms", "loss", "1%"]
        command = ["tc", "-n", hosts.hub, "qdisc", "add", "dev", f"port{number}", *netem]
        shaped = subprocess.run(command, capture_output=True, text=True)
        if shaped.returncode:
            pytest.skip(f"this kernel has no netem: {shaped.stderr.strip()}")
    expect_talk(hosts.talk(f"tcp://{hosts.address(0)}:{PORT}"), hosts.address)
