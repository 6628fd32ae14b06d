"""Every declaration of the C++ API is documented: doxygen makes its pages without a warning."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def doxygen(folder, **settings):
    if not shutil.which("doxygen"):
        pytest.skip("doxygen is missing")
    (folder / "pages").mkdir()
    settings = {"OUTPUT_DIRECTORY": folder / "pages", **settings}
    text = (ROOT / "tools/Doxyfile").read_text() + "".join(f"{key} = {value}\n" for key, value in settings.items())
    return subprocess.run(["doxygen", "-"], input=text, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_the_pages_build_without_warnings(tmp_path):
    run = doxygen(tmp_path)
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert (tmp_path / "pages/html/classtorchrpc_1_1v1_1_1Node.html").exists()


def test_an_undocumented_declaration_is_an_error(tmp_path):
    (tmp_path / "bad.h").write_text("namespace torchrpc {\n/// Said.\nstruct Said {\n  void unsaid();\n};\n}\n")
    run = doxygen(tmp_path, INPUT=tmp_path / "bad.h")
    assert run.returncode != 0
    assert "unsaid" in run.stderr
