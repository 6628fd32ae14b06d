"""The layers of csrc: each includes only itself and layers below it; third-party headers have fixed layers.

Also that tests wait for conditions and not for time.
"""

import itertools
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# A layer -> the layers that it may include, itself aside.
BELOW = {
    "base": set(),
    "wire": {"base"},
    "transport": {"wire", "base"},
    "testing": {"transport", "wire", "base"},
    "peers": {"transport", "wire", "base"},
    "calls": {"peers", "transport", "wire", "base"},
    "group": {"calls", "peers", "transport", "wire", "base"},
    "agent": {"calls", "peers", "transport", "wire", "base"},
}
BELOW["device"] = BELOW["agent"] | {"agent"}
BELOW["profiling"] = BELOW["rref"] = BELOW["device"] | {"device"}
BELOW["autograd"] = BELOW["optim"] = BELOW["rref"] | {"rref"}
BELOW["observe"] = BELOW["autograd"] | {"autograd"}
BELOW["node"] = BELOW["observe"] | {"observe", "profiling", "optim", "group"}
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
        r"group/|(node|api|bindings)/",
    ),
    (r"torch/csrc/autograd/(engine|graph_task|input_buffer|function)", r"autograd/|bindings/"),
    (r"torch/csrc/distributed/(rpc|autograd)/", r"nowhere"),
    (r"torchrpc/(?!device_plugin\.h)", r"base/|api/(core\.h|value\.cpp)"),  # after the core's headers: see core.h
    (r"torchrpc/device_plugin\.h", r"device/(device_memory|cuda_plugin)"),
    (r"linux/|sys/(syscall|random|eventfd|epoll|prctl)\.h", SEAMS),
]

# Headers of torch, and those among them that its C++ documentation describes, or that it keeps for extensions.
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
PUBLIC = re.compile(
    r"torch/(library|version)\.h|ATen/ops/(?!_).*|c10/core/(?!impl/).*|c10/util/(Exception|intrusive_ptr)\.h"
    r"|ATen/core/(Tensor|function_schema|grad_mode|ivalue|jit_type|stack|symbol)\.h"
)
INTERNAL_HEADERS = Path(__file__).with_name("internal_torch_headers.txt")

# What not every operating system has.
OF_ONE_SYSTEM = re.compile(
    r"__(?:linux|APPLE)__|SYS_\w+|SOCK_(?:CLOEXEC|NONBLOCK)|MSG_(?:NOSIGNAL|CMSG_CLOEXEC)|MFD_\w+|F_SEAL_\w+"
    r"|MADV_(?:REMOVE|HUGEPAGE)|TCP_KEEPIDLE|__forced_unwind"
    r"|\b(?:accept4|memfd_create|mremap|eventfd|gettid|getrandom|pthread_setname_np)\("
)

TESTS = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".cpp", ".h")
WAITING_HELPERS = {"python/waiting.py", "cpp/outcomes.h"}
UNCHECKED = {"python/test_layers.py"}  # the texts below
SLEEP = re.compile(r"\b(?:time|asyncio)\.sleep\(|\bsleep_(?:for|until)\(")


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


def internal_header_errors(listed, included):
    """Compare the patterns with the included headers; return an error text for each that has no counterpart."""
    internal = {header for header in included if TORCH.match(header) and not PUBLIC.fullmatch(header)}
    unlisted = {header for header in internal if not any(fnmatch(header, pattern) for pattern in listed)}
    unneeded = {pattern for pattern in listed if not any(fnmatch(header, pattern) for header in internal)}
    return [f"{header} is internal to torch: add it to {INTERNAL_HEADERS.name}" for header in sorted(unlisted)] + [
        f"no source includes {pattern}: remove it from {INTERNAL_HEADERS.name}" for pattern in sorted(unneeded)
    ]


def test_internal_headers_of_torch_are_listed_with_a_reason():
    lines = [line for line in INTERNAL_HEADERS.read_text().splitlines() if line and not line.startswith("#")]
    entries = [line.partition(": ") for line in lines]
    assert all(reason for _, _, reason in entries)
    files = [*sources(), *(CSRC.parent / "include").glob("torchrpc/*.h")]
    included = {header for file in files for _, header in includes(file.read_text())}
    wrong = internal_header_errors([pattern for pattern, _, _ in entries], included)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("listed", "included"),
    [
        ([], ["torch/csrc/autograd/engine.h"]),
        ([], ["ATen/ops/_fused_adam.h"]),
        ([], ["c10/core/impl/VirtualGuardImpl.h"]),
        (["torch/csrc/autograd/engine.h"], ["agent/agent.h"]),
        (["ATen/core/Tensor.h"], ["ATen/core/Tensor.h"]),  # is public
    ],
)
def test_a_wrong_list_of_internal_headers_is_seen(listed, included):
    assert len(internal_header_errors(listed, included)) == 1


def test_public_headers_need_no_line():
    assert internal_header_errors(["ATen/ops/_f*"], ["ATen/ops/_fused_adam.h", "ATen/ops/add.h", "node/node.h"]) == []


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
        ("api/task.cpp", '#include "torchrpc/task.h"'),
        ("agent/agent.cpp", "#include <sys/eventfd.h>"),
    ],
)
def test_a_wrong_include_is_seen(file, line):
    assert len(violations(file, f"#pragma once\n\n{line}\n")) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("rref/rref.h", '#include "calls/messenger.h"'),
        ("wire/codec.h", '#include "wire/kinds.h"'),
        ("bindings/module.cpp", "#include <torch/csrc/utils/pybind.h>"),
        ("transport/tensorpipe/transport.cpp", "#include <tensorpipe/tensorpipe.h>"),
        ("group/rendezvous.cpp", "#include <torch/csrc/distributed/c10d/Store.hpp>"),
    ],
)
def test_a_right_include_is_not(file, line):
    assert violations(file, line) == []


def unexplained_sleeps(file, text):
    """Return `file:line` of each call that sleeps and has no comment behind it or on the line above."""
    lines = ["", *text.splitlines()]
    return [
        f"{file}:{number}"
        for number, (above, line) in enumerate(itertools.pairwise(lines), 1)
        if (found := SLEEP.search(line))
        and not re.search(r"#|//", line[found.end() :])
        and not above.lstrip().startswith(("#", "//"))
    ]


def test_tests_wait_for_conditions_and_say_why_where_they_sleep():
    paths = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.*") if path.suffix in SUFFIXES}
    assert paths.keys() >= WAITING_HELPERS | UNCHECKED
    found = []
    for file in sorted(paths.keys() - WAITING_HELPERS - UNCHECKED):
        found += unexplained_sleeps(file, paths[file].read_text())
    assert not found, "Wait for a condition (`eventually`), or say at the line why the test sleeps: " + ", ".join(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\n    time.sleep(1)\n", ["a:2"]),
        ("await asyncio.sleep(0)", ["a:1"]),
        ("// one\n\nstd::this_thread::sleep_for(1ms);", ["a:3"]),
        ("time.sleep(1)  # why", []),
        ("  // why\n  std::this_thread::sleep_for(1ms);", []),
        ("rpc.rpc_sync(name, time.sleep, args=(1,))", []),
    ],
)
def test_a_sleep_without_a_reason_is_seen(text, found):
    assert unexplained_sleeps("a", text) == found
