"""benchmarks/cpp/compare: the program of torchrpc builds with the installed package and measures each row."""

import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from test_cmake_package import clean_environment, cmake, configure

SOURCE = Path(__file__).resolve().parents[2] / "benchmarks/cpp/compare"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    build = tmp_path_factory.mktemp("compare")
    configured = configure(SOURCE, build).stdout
    # Each of the other systems is built, or its absence said in one sentence.
    for program, name in (("with_grpc", "gRPC"), ("with_capnp", "Cap'n Proto")):
        built = f"{program}.cpp" in (build / "build.ninja").read_text()
        assert built != (f"{name} was not found and is not measured" in configured), configured
    cmake("--build", build, "--target", "with_torchrpc")
    return build / "with_torchrpc"


def run(program, *arguments, code=0):
    run = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=100, env=clean_environment(OMP_NUM_THREADS="1")
    )
    assert run.returncode == code, (run.stdout, run.stderr)
    return run.stdout if code == 0 else run.stderr


def rows_of(source):
    """The names of the rows in compare.h: each row() of one or of several numbers of threads, and the one in flight."""
    listed = re.search(r"void measure\(\) const \{(.*?)\n  \}", source, re.S)[1]
    names = []
    for name, threads in re.findall(r'row\("([^"]+)", (\w+)', listed):
        names += [f"{name}, {t} thread{'s'[: t > 1]}" for t in ((1, 2, 4) if threads == "threads" else (1,))]
    return {*names, "small call, 64 in flight by 1 thread"}


@pytest.mark.timeout(400)
def test_each_row_is_measured(program):
    system, *rows = map(json.loads, run(program, "--quick").splitlines())
    assert system["system"] == "torchrpc" and re.fullmatch(r"\d+\.\d+\.\d+", system["version"])
    assert {row["row"] for row in rows} == rows_of((SOURCE / "compare.h").read_text())
    assert len(rows) == 12
    assert all(row["calls_per_s"] > 0 and row["median_us"] > 0 for row in rows)


@pytest.mark.timeout(400)
def test_rows_can_be_chosen_and_unknown_options_are_refused(program):
    output = run(program, "--quick", "--transport", "tcp", "--rows", "^4 KiB")
    assert [json.loads(line).get("row") for line in output.splitlines()] == [
        None,
        "4 KiB of bytes there and back, 1 thread",
    ]
    for wrong in (["--transport", "pigeon"], ["--seconds", "0"], ["--rows"]):
        assert "--transport native|tcp" in run(program, *wrong, code=2)


def test_the_table_takes_the_faster_run_of_each_system_and_marks_a_row_that_is_not_ahead():
    driver = runpy.run_path(str(SOURCE / "__main__.py"))
    saved = {
        "date": "2026-01-01T00:00",
        "machine": {"cpus": 2, "cpu": "a processor"},
        "versions": {"torchrpc": "0.1.0", "gRPC": "1.51.1"},
        "rounds": 2,
        "seconds": 0.5,
        "others_share": [0.0, 0.1],
        "results": {
            "with_torchrpc": {"a": [[200.0, 5.0], [300.0, 3.0]], "b": [[10.0, 1e5], [10.0, 1e5]]},
            "with_grpc --transport unix --api sync": {
                "a": [[100.0, 10.0], [100.0, 10.0]],
                "b": [[9.0, 1.0], [9.0, 1.0]],
            },
            "with_grpc --transport tcp --api callback": {"a": [[50.0, 20.0]] * 2, "b": [[20.0, 5e4], [40.0, 2e4]]},
        },
    }
    text = driver["report"](saved)
    assert re.search(r"\| a +\| 250 /s, 4.00 µs +\| 100 /s, 10.0 µs +\| 2.50 \(2.00–3.00\) +\|", text), text
    assert re.search(r"\| b +\| 10.0 /s, 100 ms +\| 30.0 /s, 35.0 ms +\| 0.33 \(0.25–0.50\) ! +\|", text), text
    assert "gRPC: --transport tcp --api callback: b" in text
    assert "Cap'n Proto" not in text.partition("| row")[2].partition("\n")[0]
