"""Draw a trace of several workers (torchrpc.profiler) as a picture: a row for each thread, arrows for calls.

    python tools/draw_trace.py trace.json trace.png

A range inside another one is drawn below it. Threads that did next to nothing are left out.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

FORWARD, BACKWARD, CALLS, SERVED = "#4c78a8", "#e45756", "#bab0ac", "#f2cf5b"
DEPTH = 5  # levels of nested ranges that are drawn


def color_of(event, backward):
    side = event.get("args", {}).get("rpc_side")
    if side:
        return CALLS if side == "caller" else SERVED
    return BACKWARD if backward else FORWARD


def with_depths(events):
    """Return [(event, number of ranges around it, color)]. Ranges inside a backward range are backward, too."""
    placed, around = [], []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        backward = "backward" in event["name"].lower() or (bool(around) and around[-1][1])
        placed.append((event, len(around), color_of(event, backward)))
        around.append((event["ts"] + event["dur"], backward))
    return placed


def shorten(text, width, characters_per_unit):
    room = int(width * characters_per_unit)
    if len(text) <= room:
        return text
    return text[: room - 1] + "…" if room >= 6 else ""


def rows_of(trace):
    """Return the rows, [(key, label, [(event, depth, color)])], and the end of the last event.

    Each process has a row of the calls that it makes, then rows of its threads in the order of their first events.
    """
    names, threads = {}, defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        if event["ph"] == "M" and event["name"] == "thread_name" and event["args"]["name"] == "calls made":
            threads[event["pid"], event["tid"]] = []
    calls = set(threads)
    for event in sorted((event for event in trace["traceEvents"] if event["ph"] == "X"), key=lambda event: event["ts"]):
        threads[event["pid"], event["tid"]].append(event)
    end = max(event["ts"] + event["dur"] for events in threads.values() for event in events)
    rows = []
    for key in sorted(threads, key=lambda key: (-key[0], key not in calls, threads[key][0]["ts"])):
        if key in calls:
            rows.append((key, f"{names[key[0]]}\ncalls", with_depths(threads[key])))
        elif any(event["dur"] > end / 200 or "rpc_side" in event["args"] for event in threads[key]):
            rows.append((key, f"{names[key[0]]}\nthread", with_depths(threads[key])))
    return rows, end


def draw(trace, output):
    rows, end = rows_of(trace)
    heights = [min(DEPTH, 1 + max(depth for _, depth, _ in events)) for _, _, events in rows]
    figure, axes = plt.subplots(figsize=(15, 0.8 + 0.42 * (sum(heights) + len(rows) * 0.5)))
    per_unit = 190 / end  # characters that fit
    top, tops = 0.0, {}
    for (key, label, events), height in zip(rows, heights, strict=True):
        tops[key] = top
        axes.text(-end * 0.008, top + height / 2, label, ha="right", va="center", fontsize=9)
        for event, depth, color in events:
            if depth >= DEPTH:
                continue
            axes.add_patch(
                Rectangle((event["ts"], top + depth), event["dur"], 0.92, facecolor=color, edgecolor="white", lw=0.3)
            )
            name = shorten(event["name"].removeprefix("aten::"), event["dur"], per_unit)
            axes.text(event["ts"] + event["dur"] / 2, top + depth + 0.48, name, ha="center", va="center", fontsize=6.5)
        top += height + 0.5
    draw_arrows(axes, trace, tops)
    axes.set_xlim(0, end)
    axes.set_ylim(top, -0.2)
    axes.set_yticks([])
    axes.set_xlabel("microseconds")
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    legend = {"forward": FORWARD, "backward": BACKWARD, "call, on the caller": CALLS, "call, on the callee": SERVED}
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in legend.values()]
    figure.legend(handles, legend, loc="upper center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(output, dpi=110)


def draw_arrows(axes, trace, tops):
    begins = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "s" and event["cat"] == "rpc"}
    for event in trace["traceEvents"]:
        if event["ph"] != "f" or event["id"] not in begins:
            continue
        start = begins[event["id"]]
        ends = [(at["ts"], tops.get((at["pid"], at["tid"]))) for at in (start, event)]
        if all(row is not None for _, row in ends):
            (x0, y0), (x1, y1) = ends
            down = y1 > y0
            axes.annotate(
                "",
                xy=(x1, y1 + (0 if down else 0.92)),
                xytext=(x0, y0 + (0.92 if down else 0)),
                arrowprops={"arrowstyle": "->", "color": "black", "lw": 0.6},
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.trace.read_text()), options.output)


if __name__ == "__main__":
    main()
