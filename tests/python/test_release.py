"""What docs/versions.md promises, as far as a test can tell; tools/release.sh; the workflows."""

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tomllib
import yaml

from torchrpc._torch_versions import SUPPORTED

pytestmark = pytest.mark.lint

ROOT = Path(__file__).resolve().parents[2]
POLICY = (ROOT / "docs/versions.md").read_text()
VERSION = re.search(r"^project\(torchrpc VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.M)[1]


def stated(pattern, file):
    found = re.search(pattern, (ROOT / file).read_text())
    assert found, f"{file} does not say {pattern}"
    return found[1]


def minor_versions(first, last):
    """3.10 and 3.12 -> [3.10, 3.11, 3.12]."""
    (major, begin), (other, end) = first.split("."), last.split(".")
    assert major == other
    return [f"{major}.{minor}" for minor in range(int(begin), int(end) + 1)]


PYTHONS = minor_versions(*re.search(r"CPython (3\.\d+) to (3\.\d+)", POLICY).groups())

# --- The version and its citation ---


def test_the_citation_has_what_the_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["title"] and citation["message"]
    assert citation["authors"] and all("name" in author or "family-names" in author for author in citation["authors"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["title"], citation["license"]) == (project["name"], project["license"])


def test_the_citation_and_the_changelog_have_the_version_and_its_date():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == VERSION
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert heading == f"{VERSION} ({citation['date-released']})"


# --- The policy ---


def test_the_package_index_shows_the_supported_pythons():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={PYTHONS[0]}"
    assert [text.split(" :: ")[-1] for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)] == PYTHONS


def test_the_policy_names_the_versions_of_the_protocol():
    handshake = stated(r"kVersion = (\d+)", "csrc/transport/native/auth/handshake_message.h")
    hello = stated(r"kProtocolVersion = (\d+)", "csrc/peers/connection_pool.h")
    assert f"| handshake of the native transport | {handshake} |" in POLICY
    assert f"| HELLO of the agent | {hello} |" in POLICY
    assert stated(r"\| u16 \| version: (\d+) \|", "csrc/wire/PROTOCOL.md") == handshake
    assert stated(r"\| u32 \| version of this protocol: (\d+) \|", "csrc/wire/PROTOCOL.md") == hello


def test_the_classes_of_the_public_headers_are_in_the_versioned_namespace():
    of_the_core = {
        "defaults.h",
        "device_plugin.h",
        "error.h",
        "interceptor.h",
        "member_change.h",
        "metadata.h",
        "retry.h",
        "timeout.h",
        "worker_info.h",
    }  # not classes of the API's own
    for header in (ROOT / "include/torchrpc").glob("*.h"):
        text = header.read_text()
        assert ("inline namespace v1 {" in text) == (header.name not in of_the_core), header.name
        assert not re.search(r"namespace v(?!1 \{|1$)\d", text, re.M), header.name


def test_cmake_finds_only_patch_versions_of_the_same_minor_version():
    assert "COMPATIBILITY SameMinorVersion" in (ROOT / "csrc/CMakeLists.txt").read_text()


PARTS = ("rpc", "autograd", "optim", "nn", "observe", "profiler", "launch", "launch.ray", "testing")
MODULES = ["torchrpc", *(f"torchrpc.{name}" for name in PARTS)]


def test_no_public_name_is_lost():
    listed = {*(ROOT / "tests/python/public_names.txt").read_text().split()}
    names = {f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__}
    assert not listed - names, "deprecate a name for one minor version before you remove it (docs/versions.md)"
    assert not names - listed, "list new names of the API in public_names.txt"
    for name in sorted(listed):
        module, _, leaf = name.rpartition(".")
        assert hasattr(importlib.import_module(module), leaf), name


# --- tools/release.sh ---

FILES = ("CHANGELOG.md", "CITATION.cff", "CMakeLists.txt", "tools/release.sh")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with the files that the checks of a release read; `git` runs git in it, `check` the checks."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)

    class Checkout:
        path = tmp_path

        def git(self, *command):
            names = ["-c", "user.name=tester", "-c", "user.email=tester@localhost", "-c", "commit.gpgsign=false"]
            subprocess.run(["git", *names, *command], cwd=tmp_path, check=True, capture_output=True)

        def edit(self, file, old, new):
            text = (tmp_path / file).read_text()
            assert old in text
            (tmp_path / file).write_text(text.replace(old, new, 1))
            self.git("commit", "--all", "--message", "Edit")

        def check(self):
            result = subprocess.run(["tools/release.sh", "--check"], cwd=tmp_path, capture_output=True, text=True)
            return result.returncode, result.stdout + result.stderr

    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    made = Checkout()
    made.git("init", "--quiet")
    made.git("add", ".")
    made.git("commit", "--message", "Start")
    return made


def test_this_version_can_be_released(checkout):
    code, text = checkout.check()
    assert code == 0 and f"Version {VERSION} of " in text


def test_a_tree_with_changes_is_not_released(checkout):
    (checkout.path / "new.txt").write_text("not committed")
    code, text = checkout.check()
    assert code == 1 and "not committed" in text and "new.txt" in text


def test_a_version_is_not_released_twice(checkout):
    checkout.git("tag", f"v{VERSION}")
    assert checkout.check() == (1, f"No release: the tag v{VERSION} exists\n")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("CMakeLists.txt", f"torchrpc VERSION {VERSION}", "torchrpc VERSION 9.8.7"),
        ("CHANGELOG.md", f"\n## {VERSION} (", "\n## 9.8.7 ("),
        ("CHANGELOG.md", f"\n## {VERSION} (", "\n## Unreleased\n\n- A change.\n\n## " + f"{VERSION} ("),
        ("CITATION.cff", f"\nversion: {VERSION}\n", "\nversion: 9.8.7\n"),
        ("CITATION.cff", "\ndate-released: 2", "\ndate-released: 1"),
    ],
)
def test_files_that_disagree_about_the_version_are_not_released(checkout, file, old, new):
    checkout.edit(file, old, new)
    code, text = checkout.check()
    assert code == 1 and text.startswith("No release: ") and ("9.8.7" in text or "Unreleased" in text or "date" in text)


# --- The workflows ---

WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}


def jobs():
    return [(file, name, job) for file, workflow in WORKFLOWS.items() for name, job in workflow["jobs"].items()]


def test_the_jobs_of_workflows_are_complete():
    assert set(WORKFLOWS) == {"ci.yml", "matrix.yml", "wheels.yml"}
    for file, workflow in WORKFLOWS.items():
        assert workflow["name"] and workflow[True], f"{file} has no name or no trigger"  # YAML 1.1 reads `on` as true
        assert workflow["permissions"] == {"contents": "read"}
    for file, name, job in jobs():
        assert job["runs-on"] and job["steps"], f"{file}: {name}"
        assert all(("run" in step) != ("uses" in step) for step in job["steps"]), f"{file}: {name}"
        assert set(job.get("needs", [])) <= set(WORKFLOWS[file]["jobs"]), f"{file}: {name}"


def test_what_the_workflows_call_exists():
    targets = {
        word for line in re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M) for word in line.split()
    }
    called = set()
    for file, name, job in jobs():
        matrix = job.get("strategy", {}).get("matrix", {})
        for command in (step["run"] for step in job["steps"] if "run" in step):
            variants = [command]
            for key, values in matrix.items():
                variants = [v.replace(f"${{{{ matrix.{key} }}}}", str(x)) for v in variants for x in values]
            for variant in variants:
                for target in re.findall(r"^(?:.*&& )?make (\S+)", variant, re.M):
                    assert target in targets, f"{file}: {name}: make {target}"
                    called.add(target)
                for script in re.findall(r"\btools/[\w.]+", variant):
                    assert (ROOT / script).exists(), f"{file}: {name}: {script}"
    assert {"lint", "test", "matrix", "wheels"} <= called


def test_the_matrix_is_that_of_the_policy():
    (cell,) = WORKFLOWS["matrix.yml"]["jobs"].values()
    pythons = re.findall(r"[\d.]+t?", stated(r"\nPYTHONS = \((.*)\)\n", "tools/torch_environments.py"))
    assert pythons == [*PYTHONS, *re.findall(r"free-threaded (3\.\d+t)", POLICY)]
    assert cell["strategy"]["matrix"] == {"torch": list(SUPPORTED), "python": pythons}
