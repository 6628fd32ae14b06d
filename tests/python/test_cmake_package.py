"""find_package(torchrpc) against the installed package, as a user's project does it; and the C++ tutorials."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import blocks

import torchrpc
from torchrpc.testing import free_port

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(torchrpc.cmake_prefix_path)

PAGE = blocks(ROOT / "docs/cpp.md")
CMAKE, PROGRAM, COMMANDS = (next(b.code for b in PAGE if b.language == language) for language in ("cmake", "cpp", "sh"))


def cmake(*arguments, check=True):
    if not (PACKAGE / "share/cmake/torchrpc").exists():
        pytest.skip("torchrpc is not installed with its headers: `make package` does it")
    ccache = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if "-S" in arguments and shutil.which("ccache") else []
    # Without the environment variables that could select another LibTorch.
    run = subprocess.run(
        ["cmake", *map(str, arguments), *ccache], capture_output=True, text=True, timeout=300, env=clean_environment()
    )
    if check:
        assert run.returncode == 0, run.stdout + run.stderr
    return run


def clean_environment(**more):
    return {**{k: v for k, v in os.environ.items() if k not in ("CMAKE_PREFIX_PATH", "LD_LIBRARY_PATH")}, **more}


def configure(source, build, *arguments, prefix=PACKAGE, **options):
    return cmake("-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}", *arguments, **options)


def libraries(program):
    return subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout


def assert_without_python(program):
    linked = libraries(program)
    assert "libtorchrpc.so" in linked and "not found" not in linked, linked
    assert not re.search(r"libpython|libtorch_python", linked), linked


@pytest.fixture
def consumer(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    (tmp_path / "example.cpp").write_text(PROGRAM)
    return tmp_path


@pytest.mark.timeout(400)
def test_the_project_on_the_page_builds_and_two_processes_run(consumer):
    configure(consumer, consumer / "build")
    cmake("--build", consumer / "build")
    program = consumer / "build/example"
    assert_without_python(program)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    second = subprocess.Popen([program, "b"], env=clean_environment(**here, RANK="1"))
    first = subprocess.run(
        [program, "a"], env=clean_environment(**here, RANK="0"), capture_output=True, text=True, timeout=60
    )
    assert first.stdout == COMMANDS.rsplit("# ", 1)[1], first.stderr
    assert second.wait(60) == 0


def flags(*arguments):
    if not shutil.which("pkg-config"):
        pytest.skip("pkg-config is not installed")
    environment = clean_environment(PKG_CONFIG_PATH=str(PACKAGE / "lib/pkgconfig"))
    found = subprocess.run(
        ["pkg-config", *arguments, "torchrpc"], capture_output=True, text=True, env=environment, check=True
    )
    return found.stdout.split()


@pytest.mark.timeout(400)
def test_a_program_is_built_with_the_flags_of_pkg_config(consumer):
    command = ["c++", "-std=c++20", consumer / "example.cpp", "-o", consumer / "example", *flags("--cflags", "--libs")]
    subprocess.run(command, check=True, timeout=300)
    assert_without_python(consumer / "example")
    assert flags("--modversion") == [torchrpc.__version__]


def test_the_package_has_the_suppressions_for_thread_sanitizer():
    installed = PACKAGE / "share/torchrpc/tsan.supp"
    assert installed.read_text() == (ROOT / "tests/tsan.supp").read_text()
    assert (
        f"$(python -c 'import torchrpc; print(torchrpc.cmake_prefix_path)')/{installed.relative_to(PACKAGE)}"
        in (ROOT / "docs/cpp.md").read_text()
    )


def test_another_torch_is_refused_with_both_versions(consumer, tmp_path):
    other = tmp_path / "torch/share/cmake/Torch"
    other.mkdir(parents=True)
    (other / "TorchConfigVersion.cmake").write_text('set(PACKAGE_VERSION "1.99.0")\n')
    run = configure(consumer, consumer / "build", f"-Dtorchrpc_TORCH_DIR={tmp_path}/torch", check=False)
    assert run.returncode != 0
    errors = " ".join(run.stderr.split())
    assert f"built with torch {PACKAGE.name.removeprefix('torch')}," in errors and "found torch 1.99" in errors


def test_the_old_abi_is_refused(consumer):
    run = configure(consumer, consumer / "build", "-DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0", check=False)
    assert run.returncode != 0
    assert "C++11 ABI" in run.stderr


def test_a_later_version_is_not_found(consumer):
    text = (consumer / "CMakeLists.txt").read_text().replace("find_package(torchrpc", "find_package(torchrpc 99.0")
    (consumer / "CMakeLists.txt").write_text(text)
    run = configure(consumer, consumer / "build", check=False)
    assert run.returncode != 0
    assert "99.0" in run.stderr


def test_an_installation_with_another_prefix_is_found(consumer):
    if not (ROOT / "build/release/cmake_install.cmake").exists():
        pytest.skip("build/release is not there: `make package` makes it")
    cmake("--install", ROOT / "build/release", "--component", "core", "--prefix", consumer / "prefix")
    configure(consumer, consumer / "build", prefix=consumer / "prefix")


@pytest.fixture(scope="module")
def tutorials(tmp_path_factory):
    build = tmp_path_factory.mktemp("tutorials")
    configure(ROOT / "tutorials/cpp", build)
    cmake("--build", build)
    return build


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    path = tmp_path_factory.mktemp("digits") / "digits.csv"
    subprocess.run([sys.executable, ROOT / "tutorials/cpp/export_digits.py", path], check=True, timeout=60)
    return path


def assert_both_trainers_learned(output):
    results = re.findall(r"trainer(\d): (\d+) updates, ([\d.]+) ms per update, .* accuracy ([\d.]+)%", output)
    assert sorted(trainer for trainer, *_ in results) == ["1", "2"], output
    assert all(int(updates) > 200 and float(accuracy) > 90 for _, updates, _, accuracy in results), output


@pytest.mark.timeout(400)
def test_the_cpp_parameter_server_learns_the_digits_without_python(tutorials, digits):
    program = tutorials / "parameter_server"
    assert_without_python(program)
    run = subprocess.run(
        [program, digits, "2", "10", str(free_port())],
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environment(),
    )
    assert run.returncode == 0, run.stderr
    assert_both_trainers_learned(run.stdout)


def test_the_same_parameter_server_in_python_learns_the_digits(digits, run_python):
    port = {"MASTER_PORT": str(free_port())}
    run = run_python(ROOT / "tutorials/cpp/parameter_server.py", digits, "--epochs=10", env=port)
    assert_both_trainers_learned(run.stdout)


@pytest.mark.timeout(400)  # the first of these tests builds the programs
def test_python_calls_a_cpp_function_faster(tutorials, run_python):
    library, port = tutorials / "libcpp_function.so", {"MASTER_PORT": str(free_port())}
    run = run_python(ROOT / "tutorials/cpp/cpp_function.py", library, "--seconds=1", env=port)
    assert "with the same results" in run.stdout
    assert float(re.search(r"called ([\d.]+) times as often", run.stdout)[1]) > 1


@pytest.mark.timeout(400)
def test_an_agent_in_python_learns_from_environments_in_cpp(tutorials, run_python):
    server = tutorials / "environment_server"
    assert_without_python(server)
    run = run_python(ROOT / "tutorials/cpp/agent.py", server, "--target=80")
    assert "solved: " in run.stdout
