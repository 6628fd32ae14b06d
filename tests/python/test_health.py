"""Health checks over HTTP, and the limit on calls of all callers together: options of the worker that serves."""

import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc.observe import health_address
from torchrpc.rpc import HealthOptions, QuotaExceededError, TensorPipeRpcBackendOptions
from torchrpc.testing import workers

answers = {"check": None}


def check():
    answer = answers["check"]
    if isinstance(answer, Exception):
        raise answer
    return answer


def probe(address, path="/healthz"):
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def answer_there(answer):
    answers["check"] = answer
    return health_address()


def test_a_probe_learns_whether_the_worker_serves_calls():
    with workers(2, health=HealthOptions(address="127.0.0.1:0", check=check)):
        address = rpc.rpc_sync("worker1", answer_there, args=(None,))
        assert address.startswith("127.0.0.1:") and address != health_address()
        assert probe(address) == (200, "serving\n")
        rpc.rpc_sync("worker1", answer_there, args=("the model is not loaded",))
        assert probe(address) == (503, "not serving: the model is not loaded\n")
        rpc.rpc_sync("worker1", answer_there, args=(ValueError("no model"),))
        status, text = probe(address)
        assert status == 503 and "ValueError: no model" in text
        rpc.rpc_sync("worker1", answer_there, args=(3,))
        assert probe(address)[0] == 503 and "returned 3, which is neither a text nor None" in probe(address)[1]
        assert probe(address, "/other")[0] == 404
        assert probe(health_address())[0] == 200  # the check of this worker


def test_without_the_option_there_is_no_address():
    with workers(1):
        assert health_address() == ""
    with pytest.raises(rpc.ShutdownError):
        health_address()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"address": 1.5}, TypeError, "address must be a str or a port, but is a float"),
        ({"address": True}, TypeError, "address must be a str or a port"),
        ({"address": "x", "check": "y"}, TypeError, "check must be a function"),
    ],
)
def test_wrong_health_options(arguments, error, text):
    with pytest.raises(error, match=text):
        HealthOptions(**arguments)


def test_an_address_that_is_none_is_refused_by_name():
    with (
        pytest.raises(RuntimeError, match="with a numeric host, but is 'nowhere'"),
        workers(1, health=HealthOptions(address="nowhere")),
    ):
        pass


def hold(begun, go):
    Path(begun).touch()
    eventually(lambda: os.path.exists(go))
    return 1


def call_worker1(function, *args):
    return rpc.rpc_sync("worker1", function, args=args)


def is_refused():
    try:
        return call_worker1(len, "abc") == 0
    except QuotaExceededError as error:
        return "max_calls" in str(error)


def test_calls_beyond_max_calls_fail_whoever_makes_them(tmp_path):
    one, two, go = (str(tmp_path / name) for name in ("one", "two", "go"))
    with workers(3, max_calls=2):
        first = rpc.rpc_async("worker1", hold, args=(one, go))
        second = rpc.rpc_async("worker2", call_worker1, args=(hold, two, go))
        eventually(lambda: os.path.exists(one) and os.path.exists(two))
        assert is_refused()
        Path(go).touch()
        assert first.wait() + second.wait() == 2
        assert call_worker1(len, "abc") == 3


@pytest.mark.parametrize("value", [0, -1])
def test_max_calls_must_be_positive(value):
    with pytest.raises(RuntimeError, match=f"max_calls must be positive, but got {value}"):
        TensorPipeRpcBackendOptions(max_calls=value)
