"""The layers of csrc: each includes only itself and layers below it; third-party headers have fixed layers."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# A layer -> the layers that it may include, itself aside.
BELOW = {
    "base": set(),
    "wire": {"base"},
    "transport": {"wire", "base"},
    "testing": {"transport", "wire", "base"},
    "agent": {"transport", "wire", "base"},
    "device": {"agent", "transport", "wire", "base"},
    "profiling": {"device", "agent", "transport", "wire", "base"},
    "rref": {"device", "agent", "transport", "wire", "base"},
    "autograd": {"rref", "device", "agent", "transport", "wire", "base"},
    "optim": {"rref", "device", "agent", "transport", "wire", "base"},
    "observe": {"autograd", "rref", "device", "agent", "transport", "wire", "base"},
    "node": {"observe", "profiling", "optim", "autograd", "rref", "device", "agent", "transport", "wire", "base"},
}
BELOW["api"] = BELOW["bindings"] = BELOW["node"] | {"node"}

# The files that may use what not every operating system has (docs/macos.md).
SEAMS = r"base/(os/|random\.cpp|sync/futex_waiter\.cpp)"

# A pattern of headers -> a pattern of the only files ("layer/file") that may include them.
CONFINED = [
    (r"pybind11/|Python\.h|torch/csrc/(utils/pybind|Exceptions|.*/python/)", r"bindings/"),
    (r"tensorpipe/", r"transport/tensorpipe/"),
    (r"(ucp|ucs|uct)/", r"transport/ucx/"),
    (r"uv\.h", r"transport/native/loop/uv_loop\.cpp"),
    (
        r"torch/csrc/distributed/c10d/",
        r"agent/(rendezvous|fan_in|group_secret|store_keeper|store_wait)|(node|api|bindings)/",
    ),
    (r"torch/csrc/autograd/(engine|graph_task|input_buffer|function)", r"autograd/|bindings/"),
    (r"torch/csrc/distributed/(rpc|autograd)/", r"nowhere"),
    (r"torchrpc/(?!device_plugin\.h)", r"(base|api)/"),
    (r"torchrpc/device_plugin\.h", r"device/(device_memory|cuda_plugin)"),
    (r"linux/|sys/(syscall|random|eventfd|epoll|prctl)\.h", SEAMS),
]

# What not every operating system has.
OF_ONE_SYSTEM = re.compile(
    r"__(?:linux|APPLE)__|SYS_\w+|SOCK_(?:CLOEXEC|NONBLOCK)|MSG_(?:NOSIGNAL|CMSG_CLOEXEC)|MFD_\w+|F_SEAL_\w+"
    r"|MADV_(?:REMOVE|HUGEPAGE)|TCP_KEEPIDLE|__forced_unwind"
    r"|\b(?:accept4|memfd_create|mremap|eventfd|gettid|getrandom|pthread_setname_np)\("
)


def includes(text):
    """Return [(line number, included header)]."""
    found = re.finditer(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', text, re.MULTILINE)
    return [(text.count("\n", 0, match.start()) + 1, match[1]) for match in found]


def violations(file, text):
    """Return an error text for each wrong include of `file` ("layer/name")."""
    layer = file.split("/")[0]
    wrong = []
    for line, included in includes(text):
        other = included.split("/")[0]
        if "/" in included and other in BELOW and other != layer and other not in BELOW[layer]:
            wrong.append(f"csrc/{file}:{line}: {layer}/ may not include {included}: {other}/ is not below it")
        for what, where in CONFINED:
            if re.match(what, included) and not re.match(where, file):
                wrong.append(f"csrc/{file}:{line}: {included} belongs in {where} only")
    return wrong


def sources():
    return sorted(path for path in CSRC.glob("*/**/*") if path.suffix in {".h", ".cpp"})


def test_every_folder_is_a_layer():
    assert {path.relative_to(CSRC).parts[0] for path in sources()} <= set(BELOW)


def test_includes_point_downwards():
    assert sources()
    wrong = [v for path in sources() for v in violations(path.relative_to(CSRC).as_posix(), path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_what_not_every_system_has_is_in_the_seams():
    wrong = []
    for path in sources():
        file, code = path.relative_to(CSRC).as_posix(), re.sub(r"//.*", "", path.read_text())
        if not re.match(SEAMS, file):
            wrong += [f"csrc/{file}: {found} belongs in csrc/base/os" for found in OF_ONE_SYSTEM.findall(code)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("wire/codec.h", '#include "transport/transport.h"'),
        ("rref/rref.h", '#include "autograd/context.h"'),
        ("autograd/context.h", '#  include "optim/optimizers.h"'),
        ("agent/agent.cpp", "#include <pybind11/pybind11.h>"),
        ("node/node.cpp", "#include <Python.h>"),
        ("transport/native/transport.cpp", "#include <tensorpipe/tensorpipe.h>"),
        ("agent/agent.h", "#include <torch/csrc/distributed/c10d/Store.hpp>"),
        ("bindings/module.cpp", "#include <torch/csrc/distributed/rpc/rpc_agent.h>"),
        ("bindings/module.cpp", '#include "api/access.h"'),
        ("node/node.h", '#include "torchrpc/node.h"'),
        ("agent/agent.cpp", "#include <sys/eventfd.h>"),
    ],
)
def test_a_wrong_include_is_seen(file, line):
    assert len(violations(file, f"#pragma once\n\n{line}\n")) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("rref/rref.h", '#include "agent/messenger.h"'),
        ("wire/codec.h", '#include "wire/kinds.h"'),
        ("bindings/module.cpp", "#include <torch/csrc/utils/pybind.h>"),
        ("transport/tensorpipe/transport.cpp", "#include <tensorpipe/tensorpipe.h>"),
        ("agent/rendezvous.cpp", "#include <torch/csrc/distributed/c10d/Store.hpp>"),
    ],
)
def test_a_right_include_is_not(file, line):
    assert violations(file, line) == []
