"""Decorators and functions for tests of two workers with simulated devices; each test has its own processes.

@device_pair.in_process
@device_pair.others(SIM_SHARING="refused")  # in the environment of w1
def test_it():  # runs as w0
    rpc.rpc_sync("w1", function, (torch.ones(2, device=HERE),))
"""

import importlib
import os
import sys
from pathlib import Path

import torch

import torchrpc.rpc as rpc

sys.path.insert(0, str(Path(__file__).parent))
import device_group
import isolated
import sim
from waiting import eventually

HERE, THERE, SAME = "sim:0", "sim:1", "sim:2"
MAPS = {
    "w0": {worker: {HERE: THERE, THERE: HERE, SAME: SAME} for worker in ("w0", "w1")},
    "w1": {"w0": {THERE: HERE}},
}


def in_process(function):
    """Run the test in a process of its own, as w0 of a group with w1."""

    def run():
        isolated.run_in_new_process(_run, function.__code__.co_filename, function.__name__)

    run.__name__ = function.__name__
    run.body = function
    return run


def _run(file, name):
    sys.path.insert(0, str(Path(file).parent))
    body = getattr(importlib.import_module(Path(file).stem), name).body
    with device_group.group(getattr(body, "maps", MAPS), getattr(body, "others", {}), **getattr(body, "options", {})):
        body()
        if getattr(body, "breaks_group", False):
            os._exit(0)
        for worker in MAPS:
            assert rpc.rpc_sync(worker, take_conflicts) == []


def others(**environment):
    """Set variables in the environment of w1 only."""

    def mark(function):
        function.others = environment
        return function

    return mark


def maps(maps):
    """Set the device maps of both workers."""

    def mark(function):
        function.maps = maps
        return function

    return mark


def breaks_group(function):
    """Mark a test after which the group cannot shut down as usual."""
    function.breaks_group = True
    return function


def options(**options):
    """Set options of both workers."""

    def mark(function):
        function.options = options
        return function

    return mark


def take_conflicts():
    for index in range(sim.device_count()):
        sim.synchronize(index)
    return sim.take_conflicts()


def metrics():
    return rpc.api._get_current_rpc_agent().get_metrics()


def path(to="w1", device=HERE):
    """Return the path of tensors of the device to a worker, once both workers have agreed on it."""
    key = f"device.path.{to} {device}"

    def known_path():
        rpc.rpc_sync(to, torch.add, (torch.ones(2, device=device), 1))
        found = metrics().get(key, "not known yet")
        return found != "through host memory: not known yet" and found

    return eventually(known_path)


def lent_bytes():
    return int(metrics()["device.lent_bytes"])


def loans():
    return int(metrics()["device.loans"])


def loans_of(worker):
    return rpc.rpc_sync(worker, loans)
