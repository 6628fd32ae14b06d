"""Formats results as a table and as a picture. The input is the saved JSON, so that old results can be shown again."""

import statistics
from dataclasses import dataclass

from rows import CPU_SECONDS, MEBIBYTES, PERCENT, RATE, SECONDS


@dataclass(frozen=True)
class Ratio:
    """The ratio to the baseline (above 1: better): of the medians, and the least and largest one of a single round."""

    median: float
    least: float
    largest: float

    def __str__(self) -> str:
        return f"{_digits(self.median)} ({_digits(self.least)}–{_digits(self.largest)})"


class Results:
    def __init__(self, saved: dict, transport: str):
        self.cells: dict[str, dict[str, list]] = saved["results"].get(transport, {})
        self.rows = [row for row in saved["rows"] if row["name"] in self.cells]
        systems = saved["systems"]
        self.baseline = systems[0]["label"]
        labels = [each for each in systems[1:] if any(each["label"] in cell for cell in self.cells.values())]
        self.compared = [each["label"] for each in labels if each["kind"] == "rpc"]
        self.others = [each["label"] for each in labels if each["kind"] != "rpc"]
        self.transport = transport

    def values(self, row: dict, label: str) -> list[float]:
        return [value for value in self.cells[row["name"]].get(label, []) if not isinstance(value, dict)]

    def failures(self, row: dict, label: str) -> list[str]:
        return [value["failed"] for value in self.cells[row["name"]].get(label, []) if isinstance(value, dict)]

    def median(self, row: dict, label: str) -> float | None:
        values = self.values(row, label)
        return statistics.median(values) if values else None

    def ratio(self, row: dict, label: str) -> Ratio | None:
        base, ours = self.median(row, self.baseline), self.median(row, label)
        if not base or not ours or row["unit"] == PERCENT:  # ratios of percentages close to 0 are meaningless
            return None
        cells = self.cells[row["name"]]
        rounds = zip(cells[self.baseline], cells[label], strict=False)
        pairs = [(theirs, mine) for theirs, mine in rounds if _positive(theirs) and _positive(mine)]
        better = [_times_better(row, *pair) for pair in pairs] or [_times_better(row, base, ours)]
        return Ratio(_times_better(row, base, ours), min(better), max(better))

    def shown(self, row: dict, label: str) -> str:
        median = self.median(row, label)
        if median is not None:
            failed = len(self.failures(row, label))
            return amount(median, row["unit"]) + (f" ({failed} failed)" if failed else "")
        return "failed" if self.failures(row, label) else ""


def table(saved: dict, transport: str) -> str:
    """Return a table in Markdown. An exclamation mark marks a ratio below its target."""
    results = Results(saved, transport)
    ratios = [f"{label} / {results.baseline}" for label in results.compared]
    heads = ["row", results.baseline, *results.compared, *ratios, "target", *results.others]
    lines = [heads]
    for row in results.rows:
        target = row["targets"].get(transport)
        line = [row["name"], results.shown(row, results.baseline)]
        line += [results.shown(row, label) for label in results.compared]
        for label in results.compared:
            ratio = results.ratio(row, label)
            missed = ratio is not None and target is not None and ratio.median < target
            line.append(f"{ratio or ''}{' !' if missed else ''}")
        line.append(f"{target:g}" if target else "")
        line += [results.shown(row, label) for label in results.others]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    aligned.insert(1, " | ".join("-" * width for width in widths))
    text = "\n".join(f"| {line} |" for line in aligned)
    return "\n".join([text, *_failures(results)])


def _failures(results: Results) -> list[str]:
    labels = [results.baseline, *results.compared, *results.others]
    found = ((row["name"], label, results.failures(row, label)) for row in results.rows for label in labels)
    return [f"failed: {name}: {label}: {texts[-1]}" for name, label, texts in found if texts]


def everything(saved: dict) -> str:
    machine = saved["machine"]
    others = saved["others_share"]
    lines = [
        f"{machine['cpus']} CPUs ({machine['cpu']}), load {machine['load_before']:.1f} before and "
        f"{machine.get('load_after', float('nan')):.1f} after, {saved['date']}",
        f"other processes used {statistics.median(others):.0%} of the processors (median of sessions; "
        f"largest {max(others):.0%})",
        *(f"{label}: {', '.join(f'{k} {v}' for k, v in found.items())}" for label, found in saved["versions"].items()),
        f"medians of {saved['settings']['rounds']} rounds; ratio: times better, of medians (least–largest of a round);"
        " !: below the target",
    ]
    for transport in saved["transports"]:
        if saved["results"].get(transport):
            lines += ["", f"transport: {transport}", "", table(saved, transport)]
    return "\n".join(lines)


def plot(saved: dict, path) -> None:
    """Draw the ratios as bars, with a panel for each transport and a tick at each target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [Results(saved, transport) for transport in saved["transports"] if saved["results"].get(transport)]
    height = max(3.0, 1.2 + 0.3 * max(len(each.rows) * max(1, len(each.compared)) for each in panels))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6 + 4 * len(panels), height), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, results in zip(axes[0], panels, strict=True):
        _draw(axis, results)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=4, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axis, results: Results) -> None:
    positions = range(len(results.rows))
    thickness = 0.8 / max(1, len(results.compared))
    for i, label in enumerate(results.compared):
        ratios = [results.ratio(row, label) for row in results.rows]
        at = [position - 0.4 + thickness * (i + 0.5) for position in positions]
        widths = [ratio.median if ratio else float("nan") for ratio in ratios]
        bars = axis.barh(at, widths, thickness, label=label)
        axis.bar_label(bars, [_digits(ratio.median) if ratio else "" for ratio in ratios], padding=3, fontsize=7)
    targets = [
        (row["targets"].get(results.transport), position) for row, position in zip(results.rows, positions, strict=True)
    ]
    with_target = [(target, position) for target, position in targets if target]
    if with_target:
        axis.plot(*zip(*with_target, strict=True), "k|", markersize=11, label="target")
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(list(positions), [row["name"] for row in results.rows], fontsize=8)
    axis.set_ylim(len(results.rows) - 0.5, -0.5)
    axis.set_xlabel(f"times better than {results.baseline}")
    axis.set_title(f"transport: {results.transport}")


def amount(value: float, unit: str) -> str:
    if unit == SECONDS:
        for scale, name in ((1e-3, "µs"), (1.0, "ms")):
            if value < scale:
                return f"{_digits(value / scale * 1e3)} {name}"
        return f"{value:.2f} s"
    if unit == RATE:
        return f"{value:,.0f} /s"
    return {CPU_SECONDS: f"{value:.2f} s", PERCENT: f"{value:.1f} %", MEBIBYTES: f"{value:.1f} MiB"}[unit]


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _positive(value) -> bool:
    return not isinstance(value, dict) and value > 0


def _times_better(row: dict, base: float, ours: float) -> float:
    return ours / base if row["unit"] == RATE else base / ours
