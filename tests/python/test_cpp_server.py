"""tutorials/cpp_server: it builds with the installed package, serves, refuses what it should, and ends on SIGTERM."""

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from test_cmake_package import assert_without_python, clean_environment, cmake, configure, free_port
from waiting import eventually

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
            MASTER_PORT=str(free_port()),
            WORLD_SIZE="3",
            TORCHRPC_SECRET=SECRET,
            OMP_NUM_THREADS="1",
            HEALTH_ADDRESS=f"127.0.0.1:{free_port()}",
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
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, (out, err)
    return out or err


# A client in Python: what it may not call is refused.
PYTHON_CLIENT = """
import dataclasses, torch, torchrpc, torchrpc.rpc as rpc

@torchrpc.cpp_struct
@dataclasses.dataclass
class Query:
    embedding: list
    count: int = 1

@torchrpc.cpp_struct
@dataclasses.dataclass
class Hit:
    id: str
    score: float

rpc.init_rpc("other", rank=2)
print(rpc.rpc_sync("search", torchrpc.cpp_function("search.find"), args=(Query([1.0, 0.0]),)))
for function in (torch.add, torchrpc.cpp_function("search.stop")):
    try:
        rpc.rpc_sync("search", function, args=(1, 2) if function is torch.add else ())
    except rpc.NotAllowedError as error:
        print("not allowed by", error.worker)
rpc.shutdown(graceful=False)
"""


@pytest.mark.timeout(600)
def test_the_server_serves_and_ends_on_sigterm(group):
    assert_without_python(group.programs / "server")
    server = group.start("server")
    # The group forms when all have come. Then each client leaves, and its place is taken by the next one.
    web = group.start("client", "web", 1, "insert", "a", 1, 0)
    other = group.start("client", "other", 2, "health")
    assert output_of(web) == "1 items\n"
    assert re.fullmatch(r"[01] items, up for \d+ s\n", output_of(other))
    assert output_of(group.start("client", "web", 1, "insert", "b", 0.5, 1)) == "2 items\n"
    assert output_of(group.start("client", "web", 1, "find", 1, 0, 2)) == "b 2\n"
    assert "another dimension than the items" in output_of(group.start("client", "web", 1, "find", 1, 0, 2, 3), 1)
    python = group.start(sys.executable, "-c", PYTHON_CLIENT)
    assert output_of(python).splitlines() == ["[Hit(id='a', score=1.0)]", *["not allowed by search"] * 2]
    with urllib.request.urlopen(f"http://{group.environment['HEALTH_ADDRESS']}/healthz", timeout=10) as answer:
        assert (answer.status, answer.read()) == (200, b"serving\n")
    server.send_signal(signal.SIGTERM)
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_by_a_signal_before_its_group_has_formed(group, sent):
    server = group.start("server")
    health = f"http://{group.environment['HEALTH_ADDRESS']}/healthz"

    def health_code():
        try:
            return urllib.request.urlopen(health, timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:  # it does not listen yet
            return None

    assert eventually(health_code) == 503  # its node waits for the other workers
    server.send_signal(sent)
    server.wait(60)
    assert "search serves" not in output_of(server)
