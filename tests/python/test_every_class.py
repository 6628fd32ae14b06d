"""tests/cpp/public/every_class: it names every public name of the C++ headers, and runs with the installed package."""

import re
import subprocess
from pathlib import Path

import pytest
from test_cmake_package import clean_environment, cmake, configure

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests/cpp/public/every_class"

# For the compiler, for internal use, and short names of types within specialisations of ValueTraits.
NOT_WRITTEN = {"promise_type", "served", "Elements", "Nanoseconds", "Number", "Time", "Wide"}


def without(text, opening):
    """The text without each block in braces that follows a match of `opening`."""
    while match := re.search(opening, text):
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = text[: match.start()] + text[end:]
    return text


def public_names(header):
    """The names that a header declares for programs. By its text: declarations end with `;`, `{` or `,`."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.S)
    text = re.sub(r'"(\\.|[^"\\])*"', '""', text)
    macros = set(re.findall(r"#define (TORCHRPC_[A-Z]+(?:_[A-Z]+)*)\(", text)) - {"TORCHRPC_JOIN"}
    text = re.sub(r"^ *#(\\\n|.)*$", "", text, flags=re.M)
    text = without(text, r"namespace detail \{")
    # Private members: from `private:` to the end of the class, which is the first `};` at its indentation.
    text = re.sub(r"^( *) private:\n.*?^\1\};", r"\1};", text, flags=re.S | re.M)
    text = without(text, r"\)[^;{}()]*\{")  # bodies of functions
    names = set(macros)
    names |= set(re.findall(r"^ *(?:class|struct|enum class) (?:\[\[\w+\]\] )?(\w+)(?: final)?[^;()]*\{", text, re.M))
    names |= set(re.findall(r"\busing (\w+) =", text))
    for enumerators in re.findall(r"enum class \w+[^{;]*\{([^}]*)\}", text):
        names |= set(re.findall(r"\b(k\w+)\b", enumerators))
    names |= set(re.findall(r"\bconstexpr (?!auto)[\w:<> *]*?\b(k\w+) =", text))
    # Functions and fields stand at the indentation of a namespace or of a class: 0, 2 or 4.
    declared = re.findall(
        r"^(?: {2}| {4})?(?! )(?!return\b|if\b|for\b|throw\b|case\b)[\w:<>,*&\[\] ]*[ *&](\w+)\(", text, re.M
    )
    fields = re.findall(r"^(?: {2}| {4})(?!return\b|using\b)[\w:<>, ]+ (\w+)(?:\{\}| = [^;]*)?;", text, re.M)
    return {name for name in (*names, *declared, *fields) if len(name) > 1}  # not the parameters of templates


def headers():
    return sorted((ROOT / "include/torchrpc").glob("*.h"))


def test_the_names_of_a_header_are_found():
    names = set().union(*(public_names(header.read_text()) for header in headers()))
    assert names >= {
        *("Node", "NodeRef", "NodeOptions", "Callable", "Destination", "Future", "Promise", "Task", "RRef", "Executor"),
        *("withTimeout", "withRetries", "withKey", "callAsync", "remote", "makeRRef", "waitForStopRequest", "shutdown"),
        *("thenError", "whenAll", "whenAny", "waitFor", "cancel", "localValue", "toHereAsync", "cancelled", "timeLeft"),
        *("kQuotaExceeded", "kReplaced", "kFast", "kMethod", "kNoLimit", "slow_call", "breaker_losses", "lock_free"),
        *("stepAsync", "setOptions", "setLogSink", "currentContextId", "TORCHRPC_STRUCT_AS", "registerFunction"),
    }
    assert not names & {"startCall", "core_", "FutureState", "impl_", "CheckedArgument", "JOIN"}


@pytest.mark.parametrize("header", headers(), ids=lambda header: header.name)
def test_the_program_uses_each_public_name(header):
    program = (SOURCE / "every_class.cpp").read_text()
    program = re.sub(r"//[^\n]*", "", program)
    unused = {name for name in public_names(header.read_text()) - NOT_WRITTEN if not re.search(rf"\b{name}\b", program)}
    assert not unused, f"{header.name} has what {SOURCE.name}.cpp does not use: {', '.join(sorted(unused))}"


def test_a_new_method_would_be_noticed():
    header = (
        "namespace torchrpc {\nclass Node {\n public:\n  bool isBrandNew(int x) const;\n\n private:\n  int y_;\n};\n}\n"
    )
    assert public_names(header) == {"Node", "isBrandNew"}


@pytest.mark.timeout(500)
def test_the_program_runs_with_the_installed_package(tmp_path):
    configure(SOURCE, tmp_path)
    cmake("--build", tmp_path)
    run = subprocess.run(
        [tmp_path / "every_class"],
        capture_output=True,
        text=True,
        timeout=300,
        env=clean_environment(OMP_NUM_THREADS="1"),
    )
    assert run.returncode == 0, (run.stdout, run.stderr)
    assert run.stdout.splitlines()[-1] == "all right"
