"""tools/mutants.py: which lines it breaks, that the tree stays as it is, and what it takes as noticed."""

import ctypes
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = b"""\
#include "x.h"
// if (a < b) call();
static_assert(1 < 2);
constexpr int kLimit = 5;
int Box::sum(int a, int b) const TORCHRPC_REQUIRES(mutex_) {
  constexpr int kLocal = 7;
  if (a < b && isOpen()) close(a);
  log(LogLevel::kInfo, "a < b" + text(1));
  if (auto it = find(3); !it) throw Error(4, "b > a");
  wait(std::chrono::seconds(5));
#ifdef TORCHRPC_WITHOUT_UCX
  close(b);
#endif
  return {};
}
void Box::clear() { items_ = 0; }
bool Box::read() try {
  loop.lock().assertHeld();
  do {
  } while (isOpen());
} catch (...) {
}
"""


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """The tool's module, for a tree in tmp_path."""
    pytest.importorskip("tree_sitter_cpp", reason="it is in requirements/test.txt")
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools/mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    (tmp_path / "build/tests/cpp").mkdir(parents=True)
    return module


def test_statements_are_broken_but_no_texts_no_limits_and_no_checks_of_the_compiler(tool):
    assert {(mutant.function, mutant.line, mutant.after) for mutant in tool.mutants_of("csrc/wire/x.cpp", SOURCE)} == {
        ("Box::sum", 5, "int Box::sum(int a, int b) const TORCHRPC_REQUIRES(mutex_) { return {};"),
        ("Box::sum", 7, "if (!(a < b && isOpen())) close(a);"),
        ("Box::sum", 7, "if (a <= b && isOpen()) close(a);"),
        ("Box::sum", 7, "if (a < b || isOpen()) close(a);"),
        ("Box::sum", 7, "if (a < b && isOpen()) ;"),
        ("Box::sum", 9, 'if (auto it = find(4); !it) throw Error(4, "b > a");'),
        ("Box::sum", 9, 'if (auto it = find(3); it) throw Error(4, "b > a");'),
        ("Box::sum", 10, ";"),
        ("Box::clear", 16, "void Box::clear() { return; items_ = 0; }"),
        ("Box::clear", 16, "void Box::clear() { ; }"),
        ("Box::clear", 16, "void Box::clear() { items_ = 1; }"),
        ("Box::read", 20, "} while (!(isOpen()));"),
    }


def test_the_core_has_mutants_in_all_layers_each_with_a_key_of_its_own(tool, monkeypatch):
    monkeypatch.setattr(tool, "ROOT", ROOT)
    mutants = [mutant for layer in tool.LAYERS for mutant in tool.mutants_of_layer(layer)]
    assert {mutant.file.split("/")[1] for mutant in mutants} == set(tool.LAYERS)
    assert len({mutant.key for mutant in mutants}) == len(mutants)
    lines = {file: (ROOT / file).read_text().splitlines() for file in {mutant.file for mutant in mutants}}
    for mutant in mutants:
        assert not lines[mutant.file][mutant.line - 1].lstrip().startswith(("//", "#", "static_assert"))


def test_a_new_line_does_not_change_which_other_lines_are_broken(tool):
    def order(source):
        drawn = tool.shuffled(tool.mutants_of("csrc/wire/x.cpp", source), seed=1)
        assert len({mutant.line for mutant in drawn}) == len(drawn)
        return [mutant.key for mutant in drawn if "added" not in mutant.key]

    assert order(SOURCE) == order(SOURCE.replace(b"  return {};", b"  added();\n  return {};"))


def test_the_layers_share_the_mutants_by_their_sizes(tool):
    assert tool.shares({"small": 1, "large": 5, "middle": 2}, 12) == {"small": 2, "large": 7, "middle": 3}


def test_an_explanation_has_the_key_and_a_reason(tool):
    text = "# What this is.\n\na.cpp f\n- x;\n+ ;\nThe reason,\nlonger.\n\nb.cpp g\n- y;\n+ ;\nAnother.\n"
    assert tool.explanations(text) == {"a.cpp f\n- x;\n+ ;": "The reason, longer.", "b.cpp g\n- y;\n+ ;": "Another."}
    for key, reason in tool.explanations((ROOT / "tests/mutants_explained.txt").read_text()).items():
        assert key.startswith("csrc/") and key.count("\n- ") == key.count("\n+ ") == 1 and reason.endswith(".")


def runner_for(tool):
    runner = object.__new__(tool.Runner)
    runner.processes, runner.is_stopping = set(), False
    runner.environments, runner.seconds = {"wire": {}}, {}
    return runner


def test_a_mutant_is_built_beside_the_tree_which_stays_as_it_is(tool, tmp_path):
    file = tmp_path / "csrc/wire/sum.cpp"
    file.parent.mkdir(parents=True)
    file.write_text('extern "C" int larger(int a, int b) {\n  if (a < b) return b;\n  return a;\n}\n')
    written = file.read_bytes()
    runner = runner_for(tool)
    runner.compile_commands = {str(file): ["c++", "-fPIC", "-o", "sum.o", "-c", str(file)]}
    runner.link_command = ["c++", "-shared", "-o", tool.LIBRARY, "sum.o"]
    mutants = tool.mutants_of("csrc/wire/sum.cpp", written)
    [negated] = [mutant for mutant in mutants if "!(a < b)" in mutant.after]
    assert runner.build(negated, tmp_path / "build/job0")
    assert ctypes.CDLL(str(tmp_path / "build/job0" / Path(tool.LIBRARY).name)).larger(1, 2) == 1
    assert not runner.build(negated._replace(text=b"!(a <"), tmp_path / "build/job0")
    assert file.read_bytes() == written
    assert runner.processes == set()


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [
        ("exit 0", ""),
        ("exit 1", "wire_tests: sums & more fails"),
        ("kill -SEGV $$", "wire_tests: sums & more fails"),
        ("sleep 600", "wire_tests: sums & more hangs"),
    ],
)
def test_a_test_that_fails_crashes_or_hangs_with_the_mutation_alone_notices_it(
    tool, tmp_path, monkeypatch, behaviour, outcome
):
    monkeypatch.setattr(tool, "GRACE_S", 0.5)
    program = tmp_path / "build/tests/cpp/wire_tests"
    # Stands for the test program: LD_LIBRARY_PATH tells whether it has the library with the mutation.
    program.write_text(
        "#!/bin/sh\n"
        """echo '<TestCase name="sums &amp; more" x="y">'\n"""
        f'case "$LD_LIBRARY_PATH" in */job0:*) {behaviour};; esac\n'
        """echo '<OverallResult durationInSeconds="0.01"/></TestCase>'\n"""
    )
    program.chmod(0o755)
    runner = runner_for(tool)
    assert runner.run_tests("wire", tmp_path / "build/csrc", []) is None
    assert runner.seconds == {"wire": {"sums & more": 0.01}}
    [mutant, *_] = tool.mutants_of("csrc/wire/x.cpp", SOURCE)
    assert runner.test(mutant, tmp_path / "build/job0") == outcome
    assert runner.processes == set()
