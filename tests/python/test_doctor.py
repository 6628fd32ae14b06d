"""`python -m torchrpc doctor`: what it says of this machine, and of machines made worse."""

import re

import pytest

from torchrpc import doctor


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Says nothing where a test does not."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHRPC_TRANSPORT", *doctor.INTERFACE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def diagnose(environment, capfd):
    """Runs the doctor with these variables; gives its exit code and what it prints."""

    def run(**variables):
        for name, value in variables.items():
            environment.setenv(name, value)
        return doctor.main([]), capfd.readouterr().out

    return run


@pytest.fixture
def calm(monkeypatch):
    """Trials are answered at once: for tests of the words alone."""
    monkeypatch.setattr(doctor, "trial", lambda *_, **__: (("native(tcp)", "native:tcp=10.1.2.3:80;host=x"), ""))


def test_on_a_machine_that_works_it_says_all_of_it(run_python):
    text = run_python("-m", "torchrpc", "doctor", env={"MASTER_ADDR": "localhost"}).stdout
    assert re.search(r"ok +torch 2\.13\.\d", text)
    assert re.search(r"ok +torchrpc \d", text)
    assert re.search(r"ok +workers listen on 127\.0\.0\.1 \(interface lo; the one that leads to MASTER_ADDR\)", text)
    assert re.search(r"ok +tensorpipe, transport uv works", text)
    assert re.search(r"note +tensorpipe, channel xth is not used: this LibTorch was built without it", text)
    assert len(re.findall(r"ok +.*: ([\d,]+) µs for torch.add of 4 numbers, [\d,]+ µs with 1 MiB", text)) == 3
    assert re.search(r"ok +descriptors: \d+", text)
    assert text.endswith("Calls work here.\n")


def test_an_interface_that_does_not_exist_means_no_calls(diagnose):
    code, text = diagnose(TORCHRPC_SOCKET_IFNAME="nope0")
    assert code == 1
    assert re.search(r"FAILED +no address to listen on \(by TORCHRPC_SOCKET_IFNAME=nope0\): no interface 'nope0'", text)
    assert "torchrpc doctor`" not in text  # which other programs are told to ask
    assert "Transports" not in text  # what cannot be tried is not shown as refused


def test_a_transport_that_does_not_exist_means_no_calls(diagnose, monkeypatch):
    monkeypatch.setattr(doctor, "TRANSPORTS", ())
    monkeypatch.setattr(doctor, "CHANNELS", ())
    code, text = diagnose(TORCHRPC_TRANSPORT="pigeon")
    assert code == 1
    assert re.search(r"FAILED +no transport as TORCHRPC_TRANSPORT=pigeon: .*'native', 'tcp' or 'tensorpipe'", text)
    assert re.search(r"FAILED +as your program would: a call .* fails: TORCHRPC_TRANSPORT is 'pigeon'", text)


def test_a_meeting_point_that_cannot_be_resolved_is_named(diagnose):
    code, text = diagnose(MASTER_ADDR="no-such-host.invalid", MASTER_PORT="1234")
    assert code == 1
    assert re.search(r"FAILED +MASTER_ADDR=no-such-host.invalid, MASTER_PORT=1234 cannot be resolved", text)


def test_a_meeting_point_is_looked_at(calm, monkeypatch):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert any("somebody listens there" in finding.text for finding in doctor.meeting_point())
    assert any("nobody listens there yet" in finding.text for finding in doctor.meeting_point())


def test_an_address_that_others_reach_comes_with_a_warning(calm):
    levels = {finding.level: finding.text for finding in doctor.address()}
    assert "10.1.2.3" in levels["ok"] and "MASTER_ADDR is not set" in levels["ok"]
    assert "not encrypted" in levels["note"]


def die(_):
    import os

    os._exit(7)


def hang(_):
    import time

    time.sleep(60)


def test_a_trial_that_dies_or_hangs_is_a_finding(monkeypatch):
    assert doctor.trial(die) == (None, "rank 0 died (exit code 7).")
    monkeypatch.setattr(doctor, "SECONDS_A_TRIAL", 0.5)
    found, reason = doctor.trial(hang)
    assert found is None and "did not end in 0.5 s" in reason


def test_few_descriptors_are_noted(calm, monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (40, 4096))
    first = next(iter(doctor.limits()))
    assert first.level == "note" and "enough for about 20 workers" in first.text and "ulimit -n 4096" in first.text


def test_without_the_extension_it_says_so_and_stops(capsys, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, globals=None, locals=None, fromlist=(), level=0):
        if "_C" in (fromlist or ()):
            raise ImportError("no such symbol")
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", without)
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "the extension torchrpc._C does not load: no such symbol" in said and "Address" not in said


def test_help_says_what_the_exit_code_means(run_python):
    assert "Exit code: 0" in run_python("-m", "torchrpc", "doctor", "--help").stdout
    assert "doctor" in run_python("-m", "torchrpc", "--help").stdout
    assert run_python("-m", "torchrpc", "doctor", "--nonsense", check=False).returncode == 2


def test_a_rendezvous_that_fails_points_to_the_doctor(run_python):
    program = "import torchrpc.rpc as rpc; rpc.init_rpc('w', rank=1, world_size=2)"
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "TORCHRPC_INIT_TIMEOUT": "0.5"}
    result = run_python("-c", program, env=env, check=False)
    assert result.returncode == 1 and "python -m torchrpc doctor" in result.stderr
