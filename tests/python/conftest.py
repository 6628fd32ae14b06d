"""Fixtures of all Python tests, and the order and groups in which they run at the same time.

tests/times.json has the measured seconds of each test file and of the tests that take longer than half a second
(tools/test_times.py). With --quick, tests of at least SLOW_S are left out; --slow runs only these. With -n of
pytest-xdist, tests are given out in groups, the longest first. A group is the tests of a file that share a fixture of
their module, or others of about GROUP_S seconds together.
"""

import json
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

# A worker of pytest-xdist has a __main__ without a file, like an interactive session, whose functions are sent by
# value.
sys.modules["__main__"].__dict__.setdefault("__file__", pytest.__file__)
torch.set_num_threads(1)  # a thread pool does not survive the forks of some tests
os.environ.pop("TORCHRPC_REPLACE", None)

SLOW_S = 1.0
GROUP_S = 10.0
TIMES = json.loads((Path(__file__).parents[1] / "times.json").read_text())


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help=f"leave out tests of {SLOW_S:g} s and more")
    parser.addoption("--slow", action="store_true", help="run only the tests that --quick leaves out")


def measured_seconds(item):
    """Return the time of a test; for one that was not measured by itself, the mean of the quick tests of its file."""
    file, name = item.nodeid.split("::", 1)
    row = TIMES.get(file, {"tests": 1, "seconds": 0.5, "noted": {}})
    quick_tests = max(row["tests"] - len(row["noted"]), 1)
    return row["noted"].get(name, max(row["seconds"] - sum(row["noted"].values()), 0) / quick_tests)


def shared_fixtures(item):
    """Return the names of the fixtures of its module that the test shares with others."""
    manager = item.session._fixturemanager
    definitions = ((name, manager.getfixturedefs(name, item)) for name in item.fixturenames)
    return tuple(name for name, found in definitions if found and found[-1].scope in ("class", "module"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    slow = [item for item in items if measured_seconds(item) >= SLOW_S]
    quick = [item for item in items if measured_seconds(item) < SLOW_S]
    for option, chosen, left_out in (("--quick", quick, slow), ("--slow", slow, quick)):
        if config.getoption(option):
            items[:] = chosen
            config.hook.pytest_deselected(items=left_out)
    groups, filled = {}, {}
    for item in items:
        file, fixtures, seconds = item.nodeid.split("::")[0], shared_fixtures(item), measured_seconds(item)
        filled[file] = filled.get(file, 0.0) + (0.0 if fixtures else seconds)
        name = " ".join([file, *(fixtures or [str(int(filled[file] // GROUP_S))])])
        groups.setdefault(name, []).append((seconds, item))
        item.add_marker(pytest.mark.xdist_group(name))
    longest_first = sorted(groups.values(), key=lambda group: -sum(seconds for seconds, _ in group))
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        items[:] = [item for group in longest_first for _, item in group]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item, nextitem):
    """End the fixtures that a group of tests shares with the group: other tests of the module may follow, which join a
    group of workers of their own.
    """
    groups = {each.get_closest_marker("xdist_group").args for each in (item, nextitem or item)}
    if len(groups) == 2 and hasattr(item.config, "workerinput"):
        item.session._setupstate.teardown_exact(item.session)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # pytest-xdist cannot send lone surrogates, which some tests print and log.
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--quick") and config.getoption("numprocesses", None):
        times = [seconds for file, row in TIMES.items() if file.endswith(".py") for seconds in row["noted"].values()]
        slow = [seconds for seconds in times if seconds >= SLOW_S]
        terminalreporter.write_line(
            f"Left to `make slow-test`: {len(slow)} tests of {SLOW_S:g} s or more, {sum(slow) / 60:.0f} minutes in all."
        )


@pytest.fixture(scope="session")
def hook_path(tmp_path_factory):
    """Environment variables with which `import torch` finds torchrpc's hook, also if the package is not installed."""
    source = str(Path(__file__).parents[2] / "python")
    path = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    if not any(hook.value.startswith("torchrpc.") for hook in metadata.entry_points(group="torch.backends")):
        site = tmp_path_factory.mktemp("site")
        info = site / "torchrpc-0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchrpc\nVersion: 0.0\n")
        (info / "entry_points.txt").write_text("[torch.backends]\ntorchrpc = torchrpc._autoload:autoload\n")
        path.insert(0, str(site))
    else:
        path = path[1:]  # the package is installed
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def run_python(hook_path, tmp_path):
    """Runs a Python program in a child process; returns the completed process."""
    import subprocess

    def run(*command, env=None, check=True):
        result = subprocess.run(
            [sys.executable, *map(str, command)],
            env={**hook_path, **(env or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
        if check:
            assert result.returncode == 0, result.stdout + result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def mixed_worker():
    """The program of C++ workers of mixed groups. The variable names another build of it."""
    built = Path(__file__).parents[2] / "build/release/tests/cpp/mixed_worker"
    path = Path(os.environ.get("TORCHRPC_MIXED_WORKER", built)).resolve()
    if not path.exists():
        pytest.skip(f"{path} is not built: `make test` does it")
    return path
