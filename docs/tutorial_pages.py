"""A page of the site for each tutorial, made of the tutorial's own file.

The docstring is the story. A comment `# --- Title ---` begins a section; comment lines after it are its text, and its
code follows, a block for each class or function. `NAME.txt` and `NAME.png` beside the page are what a run printed and
drew: `make tutorial-results` writes them.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "tutorials"
SECTION = re.compile(r"^# --- (.+?) ---\n((?:#.*\n)*)", re.M)


def page(path: Path) -> str:
    """Return the Markdown of a tutorial's page."""
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    title, _, story = docstring.partition("\n\n")
    code = text.split('"""', 2)[2].lstrip("\n")
    heads = [*SECTION.finditer(code)]
    parts = [f"# {title.rstrip('.')}\n\n`tutorials/{path.name}`"]
    if (RESULTS / f"{path.stem}.png").exists():
        parts.append(f"![What the program draws]({path.stem}.png)")
    parts.append(fenced(story))
    parts.append("## What it needs\n\n" + blocks(code[: heads[0].start()] if heads else code))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        intro = "\n".join(line.removeprefix("#").strip() for line in head[2].splitlines())
        body = code[head.end() : following.start() if following else len(code)]
        parts.append(f"## {head[1]}\n\n{intro}\n\n{blocks(body)}")
    printed = RESULTS / f"{path.stem}.txt"
    if printed.exists():
        parts.append(f"## What it prints\n\n```text\n{printed.read_text().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def fenced(story: str) -> str:
    """The story with its indented blocks, which are commands or code, as fenced blocks."""

    def fence(match: re.Match) -> str:
        block = "\n".join(line[4:] for line in match[0].rstrip("\n").splitlines())
        return f"```{'python' if ' = await ' in block else 'sh'}\n{block}\n```\n"

    return re.sub(r"(?m)(?:^ {4}.*\n?)+", fence, story)


def blocks(code: str) -> str:
    """The code, with a block for each class or function at its top level."""
    pieces = [piece.strip("\n") for piece in re.split(r"\n{3,}", code.strip("\n"))]
    return "\n\n".join(f"```python\n{piece}\n```" for piece in pieces if piece)
