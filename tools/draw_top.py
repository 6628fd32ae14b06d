"""Draw the live view of `torchrpc top` of a group of sixteen workers, as an SVG: docs/top.svg.

    python tools/draw_top.py docs/top.svg

Needs textual (the extra torchrpc[top]). The script starts and ends the processes of the group.
"""

import asyncio
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

import torchrpc.rpc as rpc
from torchrpc.testing import free_port

WORKERS, TRAINERS = 16, 4
SIZE = (128, 38)
FORMING_S, WARM_UP_S, LOOKS_S = 120.0, 12.0, 5.0
CHARACTER_WIDTH = 12.2  # of rich's SVG
SPACE = "&#160;"

weights = torch.zeros(1000)
kept = []


def pull():
    return weights


def push(gradient):
    weights.add_(gradient)


def evaluate(seconds):
    time.sleep(seconds)


def train(seed):
    chance = random.Random(seed)
    while True:
        server = f"server{chance.randrange(TRAINERS, WORKERS):02d}"
        rpc.rpc_sync(server, push, args=(0.1 * rpc.rpc_sync(server, pull),))
        if chance.random() < 0.02 and len(kept) < 20 + 10 * seed:
            kept.append(rpc.remote(server, torch.rand, args=([64],)))
        time.sleep(0.03 * chance.random())


def work(rank):
    name = f"trainer{rank}" if rank < TRAINERS else f"server{rank:02d}"
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=0)
    rpc.init_rpc(name, rank=rank, world_size=WORKERS, rpc_backend_options=options)
    if rank < TRAINERS:
        threading.Thread(target=train, args=(rank,), daemon=True).start()
        while True:
            rpc.rpc_sync(f"server{TRAINERS + 3 * rank:02d}", evaluate, args=(20.0 + rank,))
    rpc.shutdown(timeout=0)


async def draw(group):
    from torchrpc.cli._top_app import TopApp

    app = TopApp(group, 1.0, 2.0)
    async with app.run_test(size=SIZE) as pilot:
        await asyncio.sleep(LOOKS_S)
        await pilot.pause()
        return app.export_screenshot(title="torchrpc top")


def without_spaces(svg):
    """Remove the spaces at the ends of texts, which some programs do not draw, and move the texts accordingly."""

    def move(match):
        head, x, middle, length, tail, body = match.groups()
        rest = body.removeprefix(SPACE)
        before = 0
        while len(rest) < len(body):
            body, before = rest, before + 1
            rest = body.removeprefix(SPACE)
        after = 0
        while body.endswith(SPACE):
            body, after = body.removesuffix(SPACE), after + 1
        if not body:
            return ""
        x = float(x) + CHARACTER_WIDTH * before
        length = float(length) - CHARACTER_WIDTH * (before + after)
        return f"{head}{x:g}{middle}{length:g}{tail}{body}</text>"

    text = r'(<text class="[^"]*-r\d+" x=")([\d.]+)(" y="[\d.]+" textLength=")([\d.]+)("[^>]*>)([^<]*)</text>'
    return re.sub(text, move, svg)


def attach_when_formed(address):
    from torchrpc.observe import attach

    end = time.monotonic() + FORMING_S
    while True:
        try:
            return attach(address)
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(1)


def main():
    port = str(free_port())
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    env["TORCHRPC_METRICS"] = "1"
    processes = [subprocess.Popen([sys.executable, __file__, "--rank", str(rank)], env=env) for rank in range(WORKERS)]
    try:
        with attach_when_formed(f"127.0.0.1:{port}") as group:
            time.sleep(WARM_UP_S)
            Path(sys.argv[1]).write_text(without_spaces(asyncio.run(draw(group))))
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        work(int(sys.argv[2]))
    else:
        main()
