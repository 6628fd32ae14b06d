"""Reads the code blocks of Markdown pages and runs them.

A Python block with `init_rpc(` or `__main__` is a program of its own. The other blocks of a page are fragments: they
run in their order, in one namespace, on worker0 of a group whose other workers serve calls. As in a reader's script,
all workers have the imports, functions and classes before a statement runs: these form a module that they can import.
"""

import ast
import contextlib
import importlib
import io
import re
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
PRINTS = re.compile(r"^\s*print\(.*\)  # (.*)$")
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Block(NamedTuple):
    language: str
    line: int  # number of its first line, from 1
    code: str

    @property
    def is_program(self):
        return "init_rpc(" in self.code or "__main__" in self.code

    @property
    def printed(self):
        """The texts that its lines promise to print."""
        return [match[1] for match in map(PRINTS.match, self.code.splitlines()) if match]


def blocks(page):
    text = Path(page).read_text()
    return [Block(match[1], text[: match.start(2)].count("\n") + 1, match[2]) for match in FENCE.finditer(text)]


def fragments(page):
    """The statements of the page's fragments, with the page's line numbers."""
    for block in blocks(page):
        if block.language == "python" and not block.is_program:
            yield from ast.parse("\n" * (block.line - 1) + block.code, page).body


def run_fragments(page, name, folder):
    """Run the fragments as a module of that name; write its definitions to a folder on the workers' module path.

    Raises:
        AssertionError: a line does not print its promised text (`print(1)  # 1` promises 1).
    """
    lines = ["", *Path(page).read_text().splitlines()]
    statements = list(fragments(page))
    defined = [""] * len(lines)
    for statement in statements:
        if isinstance(statement, DEFINITIONS):
            first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
            defined[first : statement.end_lineno + 1] = lines[first : statement.end_lineno + 1]
    (Path(folder) / f"{name}.py").write_text("\n".join(defined[1:]) + "\n")
    importlib.invalidate_caches()
    namespace = vars(importlib.import_module(name))
    for statement in statements:
        if not isinstance(statement, DEFINITIONS):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(ast.Module([statement], []), page, "exec"), namespace)
            promise = PRINTS.match(lines[statement.end_lineno])
            if promise and output.getvalue().strip() != promise[1]:
                raise AssertionError(
                    f"{page}:{statement.end_lineno} promises {promise[1]}, but prints {output.getvalue()}"
                )
