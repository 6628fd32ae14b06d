"""The documentation site: `make docs`, or `python -m sphinx -W docs build/docs`.

Pages are Markdown and read well in the source tree, too: links lead from file to file, and files beside the code
(`SHOWN`) become pages here. `relink` turns both into links of the site. `tutorial_pages` makes the pages of tutorials.
"""

import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "docs")]
os.environ.pop("TORCHRPC_REPLACE", None)

from tutorial_pages import page as tutorial_page  # noqa: E402

project = "torchrpc"
author = "torchrpc contributors"
project_copyright = author
release = version = re.search(r"^project\(torchrpc VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.M)[1]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests/python/test_notebook.py runs the notebook, and compares its outputs
default_role = "code"

autodoc_typehints = "none"  # the docstrings tell
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"torchrpc {release}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["torchrpc.css"]
html_extra_path = ["../build/cpp-site"]  # the reference of the C++ API: make_cpp_pages

# Page -> the file of the source tree that is shown there.
SHOWN = {
    "architecture": "csrc/README.md",
    "protocol": "csrc/wire/PROTOCOL.md",
    "autograd_algorithm": "csrc/autograd/README.md",
    "optimizers": "csrc/optim/README.md",
    "benchmarks": "benchmarks/README.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
    "changelog": "CHANGELOG.md",
}
PAGES = {path: page for page, path in SHOWN.items()}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def relink(text, path, page):
    """The Markdown of a file at `path`, for the page of that name: links to files without a page become plain text."""

    def replace(match):
        label, target, anchor = match[1], match[2], match[3] or ""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if file in PAGES:
            found = PAGES[file] + ".md"
        elif file.startswith("docs/"):
            found = file.removeprefix("docs/")
        else:
            return label
        return f"[{label}]({posixpath.relpath(found, posixpath.dirname(page) or '.')}{anchor})"

    return LINK.sub(replace, text)


def read(app, page, source):
    if str(app.env.doc2path(page)).endswith(".ipynb"):
        return
    if page.startswith("tutorials/"):
        path = ROOT / f"{page}.py"
        app.env.note_dependency(str(path))
        source[0] = tutorial_page(path)
        return
    path = SHOWN.get(page, f"docs/{page}.md")
    if page in SHOWN:
        app.env.note_dependency(str(ROOT / path))
        source[0] = (ROOT / path).read_text()
    source[0] = relink(source[0], path, page)


def make_cpp_pages(app, config):
    """doxygen's pages, as cpp-api/ of the site; where doxygen is missing, a page that says so."""
    site = ROOT / "build" / "cpp-site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    if shutil.which("doxygen"):
        settings = (ROOT / "tools" / "Doxyfile").read_text() + f"OUTPUT_DIRECTORY = {site}\nHTML_OUTPUT = cpp-api\n"
        subprocess.run(["doxygen", "-"], input=settings, cwd=ROOT, text=True, check=True)
    else:
        (site / "cpp-api").mkdir()
        (site / "cpp-api" / "index.html").write_text(
            "<title>torchrpc, the C++ API</title><p>This site was built without doxygen, so the reference is not here. "
            "<code>make cpp-docs</code> builds it.</p>"
        )


def setup(app):
    app.connect("config-inited", make_cpp_pages)
    app.connect("source-read", read)
