"""tutorials/cpp_server: it builds with the installed package, serves, refuses what it should, and ends on SIGTERM."""

import re
import signal
import subprocess
from pathlib import Path

import pytest
from test_cmake_package import assert_without_python, clean_environment, cmake, configure, free_port

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tutorials/cpp_server"
SECRET = "a secret of the test, long enough"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    build = tmp_path_factory.mktemp("server")
    configure(SOURCE, build)
    cmake("--build", build)
    return build


class Group:
    def __init__(self, programs):
        self.programs = programs
        self.environment = clean_environment(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=free_port(),
            WORLD_SIZE="3",
            TORCHRPC_SECRET=SECRET,
            OMP_NUM_THREADS="1",
        )
        self.started = []

    def start(self, program, *arguments):
        process = subprocess.Popen(
            [self.programs / program, *map(str, arguments)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process


@pytest.fixture
def group(programs):
    group = Group(programs)
    yield group
    for process in group.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def output_of(process, code=0):
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (out, err)
    return out or err


@pytest.mark.timeout(400)
def test_the_server_serves_and_ends_on_sigterm(group):
    assert_without_python(group.programs / "server")
    server = group.start("server")
    # The group forms when all have come. Then each client leaves, and its place is taken by the next one.
    first = group.start("client", "web", 1, "insert", "a", 1, 0)
    other = group.start("client", "operator", 2, "health")
    assert output_of(first) == "1 items\n"
    assert re.fullmatch(r"[01] items, up for \d+ s\n", output_of(other))
    assert output_of(group.start("client", "web", 1, "insert", "b", 0.5, 1)) == "2 items\n"
    assert output_of(group.start("client", "web", 1, "find", 1, 0, 2)) == "b 2\n"
    assert "another dimension than the items" in output_of(group.start("client", "web", 1, "find", 1, 0, 2, 3), 1)
    assert "search.stop" in output_of(group.start("client", "web", 1, "stop"), 1)
    server.send_signal(signal.SIGTERM)
    assert output_of(server).splitlines()[-1] == "search has stopped"


@pytest.mark.timeout(400)
def test_the_operator_can_end_the_server(group):
    server = group.start("server")
    web = group.start("client", "web", 1, "health")
    operator = group.start("client", "operator", 2, "health")
    output_of(web)
    output_of(operator)
    output_of(group.start("client", "operator", 2, "stop"))
    assert output_of(server).splitlines()[-1] == "search has stopped"


def test_the_image_has_all_sources_and_the_same_build():
    text = (SOURCE / "Dockerfile").read_text()
    copied = re.search(r"^COPY (.*) /src/$", text, re.M)[1].split()
    sources = {path.name for path in SOURCE.iterdir()} - {"Dockerfile"}
    assert sources == set(copied) - {"*.whl"}
    assert "cmake --build /build && cmake --install /build" in text
    assert "install(TARGETS server client)" in (SOURCE / "CMakeLists.txt").read_text()


def test_the_server_is_short():
    assert len((SOURCE / "server.cpp").read_text().splitlines()) <= 100
