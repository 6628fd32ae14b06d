"""`python -m torchrpc doctor`: its report on this machine, and under simulated problems."""

import re

import pytest
import torch

from torchrpc import doctor


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """An environment without the variables that the doctor reads, unless a test sets them."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHRPC_TRANSPORT", *doctor.INTERFACE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def diagnose(environment, capfd):
    """Runs the doctor with environment variables; returns its exit code and output."""

    def run(**variables):
        for name, value in variables.items():
            environment.setenv(name, value)
        return doctor.main([]), capfd.readouterr().out

    return run


@pytest.fixture
def fixed_trials(monkeypatch):
    """Replaces trials by a fixed answer, for tests of the texts."""
    monkeypatch.setattr(doctor, "trial", lambda *_, **__: (("native(tcp)", "native:tcp=10.1.2.3:80;host=x"), ""))


def test_devices_of_this_machine(run_python):
    text = run_python("-m", "torchrpc", "doctor").stdout
    kind = torch.accelerator.current_accelerator()
    assert ("no accelerator: only tensors on the CPU can be sent" if kind is None else kind.type) in text


def test_a_working_machine_gives_a_full_report(run_python):
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
    assert "torchrpc doctor`" not in text  # that advice is for other programs
    assert "Transports" not in text  # no trial has run, so none may be reported


def test_a_transport_that_does_not_exist_means_no_calls(diagnose, monkeypatch):
    monkeypatch.setattr(doctor, "TENSORPIPE_TRANSPORTS", ())
    monkeypatch.setattr(doctor, "TENSORPIPE_CHANNELS", ())
    code, text = diagnose(TORCHRPC_TRANSPORT="pigeon")
    assert code == 1
    assert re.search(r"FAILED +no transport with TORCHRPC_TRANSPORT=pigeon: .*'native', 'tcp'.*'tensorpipe'", text)
    assert re.search(r"FAILED +as your program would: a call .* fails: TORCHRPC_TRANSPORT is 'pigeon'", text)


def test_a_rendezvous_that_cannot_be_resolved_is_named(diagnose):
    code, text = diagnose(MASTER_ADDR="no-such-host.invalid", MASTER_PORT="1234")
    assert code == 1
    assert re.search(r"FAILED +MASTER_ADDR=no-such-host.invalid, MASTER_PORT=1234 cannot be resolved", text)


def test_a_process_that_listens_at_the_rendezvous_is_reported(fixed_trials, monkeypatch):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert any("a process listens there" in finding.text for finding in doctor.rendezvous())
    assert any("no process listens there yet" in finding.text for finding in doctor.rendezvous())


def test_an_address_that_other_machines_reach_has_a_warning(fixed_trials):
    levels = {finding.level: finding.text for finding in doctor.address()}
    assert "10.1.2.3" in levels["ok"] and "MASTER_ADDR is not set" in levels["ok"]
    assert "not encrypted" in levels["note"]


def die(_):
    import os

    os._exit(7)


def hang(_):
    import time

    time.sleep(60)  # the function under test hangs


def test_a_trial_that_dies_or_hangs_is_a_finding(monkeypatch):
    assert doctor.trial(die) == (None, "rank 0 died (exit code 7).")
    monkeypatch.setattr(doctor, "TRIAL_TIMEOUT_S", 0.5)
    found, reason = doctor.trial(hang)
    assert found is None and "did not end in 0.5 s" in reason


def test_few_descriptors_are_noted(fixed_trials, monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (40, 4096))
    first = next(iter(doctor.limits()))
    assert first.level == "note" and "enough for about 20 workers" in first.text and "ulimit -n 4096" in first.text


def test_a_missing_extension_is_reported(capsys, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, globals=None, locals=None, fromlist=(), level=0):
        if "_C" in (fromlist or ()):
            raise ImportError("no such symbol")
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", without)
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "the extension torchrpc._C does not load: no such symbol" in output and "Address" not in output


def test_help_says_what_the_exit_code_means(run_python):
    assert "Exit code: 0" in run_python("-m", "torchrpc", "doctor", "--help").stdout
    assert "doctor" in run_python("-m", "torchrpc", "--help").stdout
    assert run_python("-m", "torchrpc", "doctor", "--nonsense", check=False).returncode == 2


def test_a_rendezvous_that_fails_points_to_the_doctor(run_python):
    program = "import torchrpc.rpc as rpc; rpc.init_rpc('w', rank=1, world_size=2)"
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "TORCHRPC_INIT_TIMEOUT": "0.5"}
    result = run_python("-c", program, env=env, check=False)
    assert result.returncode == 1 and "python -m torchrpc doctor" in result.stderr
