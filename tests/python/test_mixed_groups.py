"""Groups of Python and C++ workers: calls, RRefs, autograd and optimizers between the two; see cpp_group.py.

TORCHRPC_MIXED_WORKER is the path of the C++ worker, for example of an asan build.
"""

import os
import subprocess
from pathlib import Path

import pytest

from torchrpc.testing import free_port

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [
    "python_calls_cpp",
    "values_of_each_type_cross",
    "errors_name_what_is_wrong",
    "objects_stay_in_cpp",
    "cpp_calls_python",
    "cpp_calls_methods_of_python",
    "errors_have_codes_in_cpp",
    "errors_have_types",
    "rrefs_pass_both_ways",
    "named_objects_cross",
    "autograd_and_optimizer_cross",
    "cpp_trains_what_python_owns",
]


# The worker with the smallest name leads gatherings of Python workers; rank 0 serves the store.
@pytest.mark.parametrize(("name", "rank"), [("cpp", 1), ("a_cpp", 0), ("cpp", 2)])
def test_python_and_cpp_work_in_one_group(mixed_worker, run_python, name, rank):
    run = run_python(
        ROOT / "tests/python/cpp_group.py",
        mixed_worker,
        free_port(),
        name,
        rank,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert [line for line in run.stdout.splitlines() if line.endswith("holds")] == [f"{c} holds" for c in CHECKS]
    assert f"{name} is done" in run.stdout


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_costs_the_others_one_line_each_that_names_it(mixed_worker, victim):
    port = free_port()
    processes = [
        subprocess.Popen(
            [mixed_worker, f"worker{rank}", str(rank), "3", str(port), "4"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in processes:
            assert "has joined" in process.stdout.readline()
        processes[victim].kill()
        for rank, process in enumerate(processes):
            _, err = process.communicate(timeout=60)
            if rank == victim:
                continue
            assert process.returncode == 1
            # Neither c10d's own lines nor a backtrace.
            [line] = err.splitlines()
            assert line.startswith(f"worker{rank}: ")
            assert f"worker{victim}" in line
    finally:
        for process in processes:
            process.kill()
            process.communicate()
