"""What the public headers refuse to compile, with a message that names the argument."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "cpp" / "refused" / "conversions.cpp"


@pytest.fixture(scope="module")
def messages():
    torch_folders = [f"-I{folder}" for folder in include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    result = subprocess.run(
        ["c++", "-std=c++20", "-fsyntax-only", "-w", abi, f"-I{ROOT / 'include'}", *torch_folders, str(SOURCE)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode != 0
    return result.stderr


@pytest.mark.parametrize(
    ("parameter", "argument"),
    [
        (r"2, const std::vector<long( int)?(, std::allocator<long( int)? ?>)? ?>&", "int"),
        (r"1, (signed char|int8_t)", "int"),
        (r"2, int", "double"),
        (r"3, bool", r"const char ?\(&\)\[4\]"),
        (r"4, float", "double"),
        (r"5, (long unsigned int|size_t|unsigned long)", "int"),
    ],
)
def test_an_argument_that_does_not_convert_is_named(messages, parameter, argument):
    assert re.search(rf"CheckedArgument<{parameter}, {argument}", messages), messages[:4000]


def test_each_refusal_says_what_to_do(messages):
    assert messages.count("see `CheckedArgument<number, parameter, argument>` in this message") >= 6
    assert "as many arguments as the function has parameters" in messages
    assert "values of this type cannot be sent: specialise torchrpc::ValueTraits<T> for it" in messages


@pytest.mark.parametrize(
    ("sentence", "times"),
    [
        ("a parameter of a registered function is a value or a const reference", 1),
        ("only a function, a member function, or an object with one operator() that is no template", 2),
        ("values of this type can be sent, but not received: receive a std::string instead of a pointer", 2),
        ("only time points of std::chrono::system_clock can be sent", 1),
        ("a method is called by an RRef to a std::shared_ptr of its class, or of a class derived from that", 1),
    ],
)
def test_what_cannot_be_used_is_refused_by_one_sentence(messages, sentence, times):
    refusals = [line for line in messages.splitlines() if f"error: static assertion failed: {sentence}" in line]
    assert len(refusals) >= times, messages[:4000]


def test_a_bool_is_no_rank(messages):
    line = next(number for number, text in enumerate(SOURCE.read_text().splitlines(), 1) if "node.call(true" in text)
    assert re.search(rf"conversions\.cpp:{line}:\d+: error", messages)
