"""The driver of test_kills_under_launchers.py: trains in Ray actors on several nodes of a cluster on this machine.

Arguments: a folder, the options of the tutorial. When it trains, it kills the process of rank 2, and then the node on
which rank 0 runs.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster
from waiting import eventually

from torchrpc.launch import ray as launcher


def process_of(rank, folder):
    """The actor's process, by the variables that it was given."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (each / "environ").read_text().split("\0")
            if f"TEST_FOLDER={folder}" in variables and f"RANK={rank}" in variables:
                return int(each.name)
    raise RuntimeError(f"there is no actor of rank {rank}")


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main(folder, *options):
    import parameter_server  # the tutorial

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(4)]
    ray.init(address=cluster.address)
    checkpoint = Path(folder, "server.pt")
    variables = {"TORCHRPC_REPLACE": "1", "TEST_FOLDER": folder}
    with launcher.start(
        parameter_server.main, 3, args=[list(options)], strategy="STRICT_SPREAD", environment=variables
    ) as group:
        eventually(lambda: checkpoint.exists() and torch.load(checkpoint)["step"] >= 25, 200)
        os.kill(process_of(2, folder), signal.SIGKILL)
        raylet = parent_of(process_of(0, folder))
        (node,) = (each for each in nodes if raylet in (info[0].process.pid for info in each.all_processes.values()))
        cluster.remove_node(node, allow_graceful=False)
        print("killed both", flush=True)
        assert group.wait(200) == [None] * 3
    print("all have returned", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
