"""Type checkers know the types of calls: mypy and pyright over tests/typing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint

FOLDER = Path(__file__).parents[1] / "typing"
CHECKERS = {
    "mypy": ["mypy", "--strict", "--config-file=", "--no-error-summary", "--cache-dir"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.fixture(scope="module", params=CHECKERS)
def lines_with_errors(request, tmp_path_factory):
    """Return {file: lines with errors} of both programs, by one run: it reads all of torch's annotations."""
    command = [sys.executable, "-m", *CHECKERS[request.param]]
    if request.param == "mypy":
        command.append(str(tmp_path_factory.mktemp("mypy")))
    run = subprocess.run(
        [*command, "program.py", "mistakes.py"],
        cwd=FOLDER,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},  # else it asks for its latest version
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = {"program.py": set(), "mistakes.py": set()}
    for file, line in re.findall(r"(\w+\.py):(\d+)(?::\d+)*:? -? ?error:", run.stdout):
        found[file].add(int(line))
    assert found["mistakes.py"], run.stdout + run.stderr  # the checker has run
    assert not found["program.py"], run.stdout
    return found


@pytest.mark.timeout(600)
def test_a_program_has_the_types_that_it_says_and_mistakes_are_reported(lines_with_errors):
    marked = {
        number
        for number, line in enumerate((FOLDER / "mistakes.py").read_text().splitlines(), 1)
        if line.endswith("# error")
    }
    assert lines_with_errors["mistakes.py"] == marked
