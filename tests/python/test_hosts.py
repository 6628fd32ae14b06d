"""Groups over several hosts: network namespaces, connected by veth pairs and a bridge. Needs root and `ip`."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from network_hosts import REASON, Hosts, ip

WORKER = Path(__file__).with_name("hosts_worker.py")
ADDRESSES = Path(__file__).with_name("hosts_addresses.py")
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


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", ""])
def test_a_group_forms_whose_master_listens_on_all_interfaces(hosts, host):
    urls = [f"tcp://{host}:{PORT}", f"tcp://{hosts.address(0)}:{PORT}"]
    workers = [hosts.start(rank, WORKER, "talk", rank, 2, url) for rank, url in enumerate(urls)]
    for rank, each in enumerate(map(seen, workers)):
        assert each["answers"] == [f"worker{rank} from worker{other}" for other in range(2)]
        assert hosts.address(rank) in each["listening"]
        assert set(each["listening"]) <= {hosts.address(rank), "::" if rank == 0 else ""}  # the store, of rank 0


ALL_INTERFACES = ["0.0.0.0", "[::]", "[::ffff:0.0.0.0]", "", "0", "everywhere", "everywhere6"]
LOOPBACK = ["127.0.0.1", "127.1", "localhost"]


def cut_off(host):
    """A machine without a network."""
    ip("-n", host, "link", "set", "wire", "down")


def add_default_route(host):
    """Another interface, with the default route."""
    ip("-n", host, "link", "add", "name", "aside", "type", "veth", "peer", "name", "other")
    ip("-n", host, "address", "add", "10.78.0.1/24", "dev", "aside")
    ip("-n", host, "link", "set", "other", "up")
    ip("-n", host, "link", "set", "aside", "up")
    ip("-n", host, "route", "add", "default", "dev", "aside")


def leave_ipv6_only(host):
    ip("-n", host, "address", "flush", "dev", "wire", "scope", "global")
    ip("-n", host, "address", "add", "fd77::1/64", "dev", "wire", "nodad")


def leave_as_it_is(host):
    """One interface with IPv4 and IPv6, and no default route."""


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("change", "address"),
    [
        (leave_as_it_is, "10.77.0.1"),
        (add_default_route, "10.78.0.1"),
        (leave_ipv6_only, "fd77::1"),
        (cut_off, "127.0.0.1"),
    ],
)
def test_a_master_on_all_interfaces_listens_where_other_hosts_reach_it(hosts, tmp_path, change, address):
    change(hosts.names[0])
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n0.0.0.0 everywhere\n:: everywhere6\n")
    urls = [f"tcp://{host}:{PORT + number}" for number, host in enumerate([*ALL_INTERFACES, *LOOPBACK])]
    # `ip netns exec` has given the process mounts of its own.
    mount = ["sh", "-c", f'mount --bind {names} /etc/hosts && exec "$@"', "sh"]
    found = seen(hosts.start(0, ADDRESSES, *urls, prefix=mount))
    expected = [[address]] * len(ALL_INTERFACES) + [["127.0.0.1"]] * len(LOOPBACK)
    assert dict(zip(urls, found, strict=True)) == dict(zip(urls, expected, strict=True))


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
