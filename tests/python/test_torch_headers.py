"""tools/torch_headers.py reads some files out of a large archive on a server."""

import functools
import http.server
import importlib.util
import io
import sys
import threading
import zipfile
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    spec = importlib.util.spec_from_file_location("torch_headers", TOOLS / "torch_headers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, content, sent, *args):
        self.content, self.sent = content, sent
        super().__init__(*args)

    def do_GET(self):
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        data = self.content[int(first) : int(last) + 1]
        self.sent.append(len(data))
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_only_the_parts_that_are_read_are_fetched(tool):
    archive, sent = io.BytesIO(), []
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("torch/lib/large.so", bytes(1 << 20))
        file.writestr("torch/include/a.h", "int a;")
        file.writestr("torch/lib/larger.so", bytes(1 << 21))
    content = archive.getvalue()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, content, sent))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        remote = tool.RemoteFile(f"http://127.0.0.1:{server.server_port}/x.whl", len(content))
        with zipfile.ZipFile(io.BufferedReader(remote, 1 << 12)) as file:
            assert file.read("torch/include/a.h") == b"int a;"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert sum(sent) < 1 << 17
