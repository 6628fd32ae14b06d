"""Groups over several hosts: network namespaces, connected by veth pairs and a bridge. Needs root and `ip`."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from network_hosts import REASON, Hosts

WORKER = Path(__file__).with_name("hosts_worker.py")
PORT = 29533


def talk(hosts, url):
    """Run one worker on each host; return their observations."""
    size = len(hosts.names)
    workers = [hosts.start(rank, WORKER, "talk", rank, size, url) for rank in range(size)]
    return [seen(worker) for worker in workers]


def seen(process):
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


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
        expect_talk(talk(hosts, f"tcp://{hosts.address(0)}:{PORT}"), hosts.address)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_static_group_forms_over_ipv6(hosts):
    expect_talk(talk(hosts, f"tcp://[{hosts.address6(0)}]:{PORT}"), hosts.address6)


def test_a_group_started_by_torchrun_forms(hosts):
    nodes = [
        hosts.start(
            number,
            *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"),
            *(f"--master-addr={hosts.address(0)}", f"--master-port={PORT}", WORKER, "talk"),
        )
        for number in range(2)
    ]
    expect_talk([seen(node) for node in nodes], hosts.address)


def test_a_call_ends_when_the_network_is_cut(hosts):
    url = f"tcp://{hosts.address(0)}:{PORT}"
    first, second = (hosts.start(rank, WORKER, "cut", rank, 2, url) for rank in range(2))
    assert "ready" in first.stdout.readline()
    assert "ready" in second.stdout.readline()
    hosts.connect(1, "down")
    first.stdin.write("cut\n")
    first.stdin.flush()
    seen = json.loads(first.stdout.readline())
    # At the call's time-out at the latest; liveness detection may end it sooner.
    assert seen["error"]
    assert seen["seconds"] < 5


def test_a_host_that_is_away_for_20_s_is_waited_for_or_counts_as_lost_and_is_called_again():
    with Hosts(3) as hosts:
        workers = [hosts.start(rank, WORKER, "away", rank, 3, f"tcp://{hosts.address(0)}:{PORT}") for rank in range(3)]
        patient, _, other = workers
        for worker in (patient, other):
            assert "ready" in worker.stdout.readline()
        hosts.connect(1, "down")
        for worker in (patient, other):
            worker.stdin.write("cut\n")
            worker.stdin.flush()
        time.sleep(20)  # the time without a network is what is tested
        assert all(worker.poll() is None for worker in workers)
        hosts.connect(1, "up")
        waited, _, called_again = [seen(worker) for worker in workers]
    # Within the default liveness time-out nothing has happened but a call that took long.
    assert (waited["answer"], waited["changes"]) == ("again from worker1", [])
    assert waited["seconds"] > 19
    # With a time-out of 4 s it was named, and a call with retries was answered when it was back.
    assert called_again["lost"] == "worker1" and called_again["lost_after"] < 19
    assert called_again["answer"] == "again from worker1"
    assert called_again["changes"] == [["worker1", "lost"], ["worker1", "joined"]]


def test_delay_and_loss_change_nothing_but_time(hosts):
    for number in range(2):
        netem = ["root", "netem", "delay", "10ms", "3ms", "loss", "1%"]
        command = ["tc", "-n", hosts.hub, "qdisc", "add", "dev", f"port{number}", *netem]
        shaped = subprocess.run(command, capture_output=True, text=True)
        if shaped.returncode:
            pytest.skip(f"this kernel has no netem: {shaped.stderr.strip()}")
    expect_talk(talk(hosts, f"tcp://{hosts.address(0)}:{PORT}"), hosts.address)
