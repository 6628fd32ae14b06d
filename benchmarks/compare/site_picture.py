"""Draws docs/benchmarks.png, the picture of the site's first page, from the tables in benchmarks/README.md.

    python benchmarks/compare/site_picture.py [OUTPUT]

The picture has six rows, and can be read at a width of 400 pixels. Its metadata have the ratios, so that a test finds
out when the tables were renewed and the picture was not.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = {  # row of the tables -> text in the picture
    "a Python function, nothing in or out": "empty Python function",
    "rpc_sync of torch.add, two tensors of 4 floats": "torch.add of small tensors",
    "echo of a tensor of 64 KiB": "tensor of 64 KiB, there and back",
    "echo of a tensor of 1 MiB": "tensor of 1 MiB, there and back",
    "2,000 rpc_async at once, a Python function": "2,000 calls at once",
    "autograd: one remote op forward and backward, Python": "forward and backward pass",
}
TRANSPORTS = {"shared memory": "#1f77b4", "TCP": "#ff7f0e"}  # in the order of the tables


def ratios() -> list[dict[str, float]]:
    """Return {row: times faster than torch} for shared memory and for TCP."""
    text = (ROOT / "benchmarks/README.md").read_text()
    found = []
    for table in re.findall(r"^\| row .*\n(?:\|.*\n)+", text, re.M)[: len(TRANSPORTS)]:
        head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        column = head.index("torchrpc / torch")
        cells = {line[0]: line[column] for line in lines}
        found.append({row: float(cells[row].split()[0]) for row in ROWS})
    return found


def description() -> str:
    return "; ".join(f"{row}: {', '.join(f'{each[row]:g}' for each in ratios())}" for row in ROWS)


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(4, 3.6), layout="constrained")
    for i, ((transport, color), values) in enumerate(zip(TRANSPORTS.items(), ratios(), strict=True)):
        at = [position + 0.14 + 0.28 * i for position in range(len(ROWS))]
        bars = axis.barh(at, values.values(), 0.26, color=color, label=transport)
        axis.bar_label(bars, [f"{value:.2g}" for value in values.values()], padding=3, fontsize=8)
    for position, text in enumerate(ROWS.values()):
        axis.text(0, position - 0.1, text, fontsize=8.5, va="center")
    axis.set_ylim(len(ROWS) - 0.4, -0.45)
    axis.set_xlim(0, 1.1 * max(max(values.values()) for values in ratios()))
    axis.set_axis_off()
    axis.set_title("times faster than torch's RPC", fontsize=9.5, loc="left")
    axis.legend(fontsize=8.5, loc="lower right", frameon=False)
    figure.savefig(path, dpi=200, metadata={"Description": description()})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/benchmarks.png")
