"""`torchrpc.testing.free_port`: ports that no other process takes before the test listens."""

import socket

from torchrpc.testing import free_port


def ports_of(worker, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    return {free_port() for _ in range(300)}


def test_one_can_listen_on_it():
    with socket.socket() as listener:
        listener.bind(("", free_port()))
        listener.listen()


def test_tests_that_run_at_the_same_time_choose_among_different_ports(monkeypatch):
    ports = [ports_of(f"gw{number}", monkeypatch) for number in range(8)]
    assert all(20000 <= port < 32768 for each in ports for port in each)
    assert sum(map(len, ports)) == len(set.union(*ports))


def test_without_other_workers_all_ports_may_be_chosen(monkeypatch):
    ports = ports_of("master", monkeypatch)
    assert max(ports) - min(ports) > 8000
