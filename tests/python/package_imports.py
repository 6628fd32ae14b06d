"""Which modules of the package import which, as their sources say it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "torchrpc"


def module_name(path, package=PACKAGE):
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_files(package=PACKAGE):
    """{module's name: its file}; for an extension module, its stub"""
    stubs = {module_name(path, package): path for path in package.rglob("*.pyi")}
    return stubs | {module_name(path, package): path for path in sorted(package.rglob("*.py"))}


def runtime_nodes(node):
    """All nodes below this one, without those that only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            children = child.orelse
        else:
            children = [child]
        for each in children:
            yield each
            yield from runtime_nodes(each)


def imported_modules(path, package=PACKAGE):
    """The modules of the package that a file imports, at its top level or in a function.

    The import of a submodule does not count as one of its parent package, though Python runs that, too. Names in
    strings (`importlib.import_module`) do not count: this is how the lazy modules load their parts. Nor do imports for
    type checkers only (`if TYPE_CHECKING:`).
    """
    files = module_files(package)
    here = module_name(path, package)
    parent = here if path.name == "__init__.py" else here.rpartition(".")[0]
    found = set()
    for node in runtime_nodes(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parent.split(".")[: len(parent.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                found.add(name if name in files else source)
    return {name for name in found if name in files} - {here}


def import_graph(package=PACKAGE):
    """{module: the modules that it imports}"""
    return {name: imported_modules(path, package) for name, path in module_files(package).items()}


def find_cycle(graph):
    """The modules of one import cycle, in its order; empty if there is none."""
    done = set()

    def visit(module, path):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(graph[module]):
            if cycle := visit(imported, [*path, module]):
                return cycle
        done.add(module)
        return []

    for module in sorted(graph):
        if cycle := visit(module, []):
            return cycle
    return []
