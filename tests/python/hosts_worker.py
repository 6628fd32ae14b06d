"""A worker of test_hosts.py: joins, runs a scenario, prints its observations as one line of JSON.

Arguments: the scenario; then, unless torchrun started the worker, rank, world size and URL.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from waiting import eventually

import torchrpc
import torchrpc.rpc as rpc

sys.path.insert(0, str(Path(__file__).parents[1]))
from chaos_cases import unauthenticated_peers


def say(**seen):
    print(json.dumps(seen), flush=True)


def greet(name):
    return f"{name} from {rpc.get_worker_info().name}"


def talk(size):
    """Call all workers, with small and large arguments."""
    me = rpc.get_worker_info().name
    answers = [rpc.rpc_sync(f"worker{rank}", greet, args=(me,)) for rank in range(size)]
    large = torch.arange(300_000.0)
    sums = [rpc.rpc_sync(f"worker{rank}", torch.add, args=(large, 1)).sum().item() for rank in range(size)]
    assert set(sums) == {(large + 1).sum().item()}
    return answers


def cut_off(size):
    """Call without a network: the test sets the link down when it has read `ready`."""
    say(ready=True)
    sys.stdin.readline()
    begin = time.monotonic()
    try:
        rpc.rpc_sync("worker1", greet, args=("again",), timeout=2)
        return {"error": "", "seconds": time.monotonic() - begin}
    except RuntimeError as exc:
        return {"error": str(exc), "seconds": time.monotonic() - begin}


def call_one_that_is_away(liveness_s):
    """Call worker1, whose host is cut off for a while: it is waited for, or counts as lost and is called again."""
    changes = []
    torchrpc.on_member_change(lambda worker, change: changes.append((worker.name, change)))
    rpc.rpc_sync("worker1", greet, args=("first",))
    say(ready=True)
    sys.stdin.readline()
    begin = time.monotonic()
    lost = ""
    if liveness_s < 20:
        try:
            rpc.rpc_sync("worker1", greet, args=("now",), timeout=60)
        except rpc.WorkerLostError as exc:
            lost = exc.worker
    lost_after = time.monotonic() - begin
    policy = rpc.RetryPolicy(retries=1000, max_delay_s=0.5, breaker_losses=0)
    answer = rpc.rpc_sync("worker1", greet, args=("again",), timeout=60, **({"retries": policy} if lost else {}))
    seconds = time.monotonic() - begin
    if lost:
        eventually(lambda: len(changes) >= 2)
    return {"lost": lost, "lost_after": lost_after, "answer": answer, "seconds": seconds, "changes": changes}


def main(scenario, rank=None, world_size=None, url="env://"):
    rank = int(os.environ["RANK"] if rank is None else rank)
    size = int(os.environ["WORLD_SIZE"] if world_size is None else world_size)
    liveness_s = 4 if (scenario, rank) == ("away", 2) else 30
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, rpc_timeout=30, liveness_timeout=liveness_s)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    listening = sorted({address for address, _ in unauthenticated_peers.listening()})
    if scenario == "talk":
        answers = talk(size)
        rpc.shutdown()
        say(listening=listening, answers=answers)
    elif scenario == "away":
        seen = call_one_that_is_away(liveness_s) if rank != 1 else {"pid": os.getpid()}
        rpc.shutdown()
        say(**seen)
    elif rank == 0:
        say(**cut_off(size))
        os._exit(0)
    else:
        say(ready=True)
        sys.stdin.readline()
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
