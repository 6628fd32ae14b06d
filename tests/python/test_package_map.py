"""The modules of the Python package import without cycles, and in the order of the map in python/torchrpc/README.md."""

import re

import pytest
from package_imports import PACKAGE, find_cycle, import_graph, module_files

pytestmark = pytest.mark.lint

ROW = re.compile(r"^\| `([\w.]+)` \|", re.M)


def mapped_modules():
    """The modules of the map's table, in its order."""
    return ["torchrpc" if name == "torchrpc" else f"torchrpc.{name}" for name in ROW.findall(map_text())]


def map_text():
    return (PACKAGE / "README.md").read_text()


def test_modules_import_without_cycles():
    assert not find_cycle(import_graph()), " -> ".join(find_cycle(import_graph()))


def test_the_map_names_each_module_once():
    assert sorted(mapped_modules()) == sorted(module_files())


def test_modules_import_only_modules_above_them_in_the_map():
    order = {module: row for row, module in enumerate(mapped_modules())}
    wrong = [
        f"{module} imports {imported}, which stands below it"
        for module, found in import_graph().items()
        for imported in sorted(found)
        if order[imported] > order[module]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def package(tmp_path):
    """A package of two modules; gives a function that writes their texts."""
    folder = tmp_path / "pair"
    folder.mkdir()
    (folder / "__init__.py").touch()

    def write(first, second):
        (folder / "first.py").write_text(first)
        (folder / "second.py").write_text(second)
        return import_graph(folder)

    return write


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from . import second\n", "from . import first\n"),
        ("from .second import f\n", "def g():\n    from .first import f\n"),
        ("import pair.second\n", "if True:\n    from pair import first\n"),
    ],
)
def test_a_cycle_is_found(package, first, second):
    assert find_cycle(package(first, second)) == ["pair.first", "pair.second", "pair.first"]


def test_an_import_in_one_direction_is_no_cycle(package):
    graph = package("from .second import f\nimport os\n", "from . import __doc__\n")
    assert graph["pair.first"] == {"pair.second"} and not find_cycle(graph)
