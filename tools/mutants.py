#!/usr/bin/env python3
"""Breaks one line of the core at a time, and reports which of these mutants the C++ tests of its layer notice.

A mutant negates a condition, removes a statement, moves a comparison or a number by one, exchanges && and ||, or
returns at once. A seed draws them, as many from each layer as its size asks for, and another one for each that does
not compile. A mutant is noticed if a test fails, crashes, or takes five times as long as usual and ten seconds more;
this test must also fail alone, and pass without the mutation. The tree is never changed: the mutated copies are in
build/mutants, as are the results, with which an interrupted run continues.

tests/mutants_explained.txt has the survivors that do not matter, each with the reason.
"""

import argparse
import contextlib
import hashlib
import html
import json
import multiprocessing.pool
import os
import queue
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import tree_sitter
import tree_sitter_cpp

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/mutants"
RESULTS = BUILD / "results.json"
EXPLAINED = ROOT / "tests/mutants_explained.txt"
VERSION = re.search(r"project\(torchrpc VERSION (\d+\.\d+)", (ROOT / "CMakeLists.txt").read_text())[1]
LIBRARY = f"csrc/libtorchrpc.so.{VERSION}"
# The test programs that look at a layer.
LAYERS = {
    "wire": ("wire",),
    "transport": ("transport",),
    "peers": ("agent", "node", "simulation"),
    "calls": ("agent", "node", "simulation"),
    "group": ("agent", "node", "simulation"),
    "agent": ("agent", "node", "simulation"),
    "rref": ("rref", "simulation"),
    "autograd": ("autograd", "simulation"),
}
GRACE_S = 10  # of each test

# --- which mutants there are ---

OPERATORS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
STATEMENTS = ("call_expression", "assignment_expression", "update_expression", "delete_expression")
# Calls without an effect that a test can see; durations; texts of errors; limits and durations, whose names tests use.
IRRELEVANT = re.compile(
    rb"(\w+(\(\))?(\.|->|::))*(log|reserve|setThreadName|assert\w*)\("
    rb"|(std::chrono::|Duration|Error)\w*\(|(static )?constexpr "
)


class Mutant(NamedTuple):
    file: str  # relative to the tree
    function: str
    before: str  # the lines that change, as one
    after: str
    line: int
    start: int  # bytes of the file
    end: int
    text: bytes  # in place of those bytes

    @property
    def key(self) -> str:
        return f"{self.file} {self.function}\n- {self.before}\n+ {self.after}"


def edits(node):
    """Yield the mutations (start, end, replacement) of this node itself."""
    start, end, text = node.start_byte, node.end_byte, node.text
    condition = node.child_by_field_name("condition")
    if condition is not None and all(child.type != "constexpr" for child in node.children):
        value = condition.child_by_field_name("value") or condition  # without the initializer
        if value.type == "parenthesized_expression":
            value = value.named_child(0)
        if value.type not in ("declaration", "number_literal", "true"):
            is_negated = value.type == "unary_expression" and value.text.startswith(b"!")
            yield value.start_byte, value.end_byte, value.text[1:] if is_negated else b"!(" + value.text + b")"
    if node.type == "expression_statement" and node.child(0).type in STATEMENTS:
        yield start, end, b";"
    elif node.type == "binary_expression" and (operator := node.child_by_field_name("operator")).type in OPERATORS:
        yield operator.start_byte, operator.end_byte, OPERATORS[operator.type].encode()
    elif node.type == "number_literal" and re.fullmatch(rb"\d+", text):
        yield start, end, str(int(text) + 1).encode()
    elif node.type in ("function_definition", "lambda_expression"):
        body, result = node.child_by_field_name("body"), node.child_by_field_name("type")
        if body is None or not re.match(rb"\{(?!\s*(return ?(\{\}|false|0|nullptr|std::nullopt)?;|\}$))", body.text):
            return
        statement = b" return;" if result is None or result.text == b"void" else b" return {};"
        yield body.start_byte + 1, body.start_byte + 1, statement


def name_of(node) -> str:
    """Return the name that a function's definition declares."""
    while (declarator := node.child_by_field_name("declarator")) is not None:
        node = declarator
    return re.sub(r"^[&\s]+|\(.*", "", node.text.decode(), flags=re.DOTALL)


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Return all mutants of the source; those of one line have the same `line`."""
    # The parser does not know the annotations for the analysis of thread safety.
    plain = re.sub(rb"\bTORCHRPC_[A-Z_]+\((\w|[*.>-]|\(\))*\)", lambda match: b" " * len(match[0]), source)
    tree = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language())).parse(plain)
    found, seen = [], Counter()

    def one_line(text):
        text = " ".join(text.decode().split())
        return text if len(text) < 240 else text[:160] + " ... " + text[-70:]

    def walk(node, names, in_function):
        is_text = node.type in ("comment", "throw_statement", "static_assert_declaration", "template_argument_list")
        if is_text or node.type.startswith(("preproc_", "ERROR")) or IRRELEVANT.match(node.text):
            return
        if node.type in ("class_specifier", "struct_specifier") and (name := node.child_by_field_name("name")):
            names = [*names, name.text.decode()]
        if node.type == "function_definition":
            names, in_function = [*names, name_of(node)], True
        for start, end, text in edits(node) if in_function else ():
            first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
            before, after = one_line(source[first:last]), one_line(source[first:start] + text + source[end:last])
            function = "::".join(names)
            seen[function, before, after] += 1
            if (count := seen[function, before, after]) > 1:
                function += f" #{count}"
            found.append(Mutant(file, function, before, after, source.count(b"\n", 0, start) + 1, start, end, text))
        for child in node.children:
            walk(child, names, in_function)

    walk(tree.root_node, [], False)
    return found


def mutants_of_layer(layer: str) -> list[Mutant]:
    """Return the mutants of the layer's sources; not of its headers, because many sources would have to be compiled."""
    files = sorted((ROOT / "csrc" / layer).rglob("*.cpp"))
    return [mutant for file in files for mutant in mutants_of(str(file.relative_to(ROOT)), file.read_bytes())]


def shuffled(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """Return one mutant of each line in random order; a change of one line does not change the order of the others."""
    chosen = {}
    for mutant in sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()):
        chosen.setdefault((mutant.file, mutant.line), mutant)
    return list(chosen.values())


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """Return how many mutants to draw from each layer."""
    exact = {layer: count * size / sum(sizes.values()) for layer, size in sizes.items()}
    whole = {layer: int(share) for layer, share in exact.items()}
    for layer in sorted(exact, key=lambda layer: whole[layer] - exact[layer])[: count - sum(whole.values())]:
        whole[layer] += 1
    return whole


def explanations(text: str) -> dict[str, str]:
    """Return the reasons by the keys of the mutants: an entry is a key and a reason, and ends with an empty line."""
    entries = [entry.split("\n", 3) for entry in re.split(r"\n\n+", text.strip()) if not entry.startswith("#")]
    return {"\n".join(key): " ".join(reason.split()) for *key, reason in entries}


# --- running them ---


class Runner:
    """Compiles and tests mutants. The threads of the pool share it; each mutant has a folder of its own."""

    def __init__(self, jobs: int, programs: list[str]):
        self.processes, self.is_stopping = set(), False
        self.folders = queue.SimpleQueue()
        for job in range(jobs):
            self.folders.put(BUILD / f"job{job}")
        targets = [f"{program}_tests" for program in programs]
        subprocess.run(["cmake", "--preset", "mutants"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cmake", "--build", BUILD, "--parallel", str(jobs), "--target", *targets], check=True)
        commands = json.loads((BUILD / "compile_commands.json").read_text())
        self.compile_commands = {each["file"]: shlex.split(each["command"]) for each in commands}
        lines = subprocess.check_output(["ninja", "-C", BUILD, "-t", "commands", "-s", LIBRARY], text=True).splitlines()
        line = next(line for line in lines if f" -o {LIBRARY} " in line)
        self.link_command = shlex.split(line.removeprefix(": && ").removesuffix(" && :"))
        shown = json.loads(subprocess.check_output(["ctest", "--test-dir", BUILD, "--show-only=json-v1"]))
        self.environments = {}
        for test in shown["tests"]:
            variables = [each["value"] for each in test["properties"] if each["name"] == "ENVIRONMENT"]
            self.environments[test["name"]] = dict(pair.split("=", 1) for pairs in variables for pair in pairs)
        # The seconds that each test takes, by program; measured when the library is new.
        measured = BUILD / "seconds.json"
        is_new = not measured.exists() or measured.stat().st_mtime < (BUILD / LIBRARY).stat().st_mtime
        self.seconds = {} if is_new else json.loads(measured.read_text())
        for program in programs:
            if program not in self.seconds and (failure := self.run_tests(program, BUILD / "csrc", [])):
                sys.exit(f"{program}_tests: a test {failure[1]} without a mutation: {failure[0]}")
        measured.write_text(json.dumps(self.seconds))

    def start(self, command, **options) -> subprocess.Popen:
        if self.is_stopping:
            raise InterruptedError
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, start_new_session=True, **quiet, **options)
        self.processes.add(process)
        return process

    def stop(self) -> None:
        self.is_stopping = True
        for process in list(self.processes):
            self.end(process, kill=True)

    def end(self, process, kill=False) -> int:
        """Wait for the end of the process, or kill it; kill what it has started; return its status."""
        if not kill:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its id stays that of its group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self.processes.discard(process)
        return process.wait()

    def build(self, mutant: Mutant, folder: Path) -> bool:
        """Compile the mutant and link the library in this folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        source, file = (ROOT / mutant.file).read_bytes(), folder / Path(mutant.file).name
        file.write_bytes(source[: mutant.start] + mutant.text + source[mutant.end :])
        command = self.compile_commands[str(ROOT / mutant.file)]
        original, mutated = command[command.index("-o") + 1], file.with_suffix(".o")
        replaced = {str(ROOT / mutant.file): file, original: mutated, LIBRARY: folder / Path(LIBRARY).name}
        for words in (command, self.link_command):
            process = self.start(
                [replaced.get(word, word) for word in words], cwd=BUILD, env={**os.environ, "CCACHE_DISABLE": "1"}
            )
            if self.end(process) != 0:
                return False
        return True

    def run_tests(self, program: str, library: Path, arguments: list[str]) -> tuple[str, str] | None:
        """Run the tests with the library in that folder; return the first that fails, and whether it fails or hangs."""
        environment = {**os.environ, **self.environments[program]}
        environment["LD_LIBRARY_PATH"] = f"{library}:{environment.get('LD_LIBRARY_PATH', '')}"
        command = [f"./{program}_tests", *arguments, "--abort", "--reporter", "xml", "--durations", "yes"]
        process = self.start(command, stdout=subprocess.PIPE, env=environment, cwd=BUILD / "tests/cpp")
        test, hangs, output = self.watch(process, self.seconds.get(program))
        if self.end(process, kill=hangs) != 0:
            return test, "hangs" if hangs else "fails"
        if program not in self.seconds:
            durations = re.findall(r'<TestCase name="(.*?)".*?durationInSeconds="(.*?)"', output, re.DOTALL)
            self.seconds[program] = {html.unescape(name): float(seconds) for name, seconds in durations}
        return None

    def watch(self, process, seconds: dict[str, float] | None) -> tuple[str, bool, str]:
        """Return the last test that the process has started, whether it hangs, and the output."""
        test, output, looked, used, budget = "", b"", time.monotonic(), 0.0, GRACE_S
        while budget > 0:
            if select.select([process.stdout], [], [], 1)[0]:
                block = os.read(process.stdout.fileno(), 1 << 16)
                if not block:
                    break
                output += block
                started = re.match(rb'<TestCase name="(.*?)"', output[output.rfind(b"<TestCase name=") :])
                if started and html.unescape(started[1].decode(errors="replace")) != test:
                    test = html.unescape(started[1].decode(errors="replace"))
                    budget = 600 if seconds is None else GRACE_S + 5 * seconds.get(test, 0)
            # The time does not count while other programs, or signals, keep the process or this one from running.
            with contextlib.suppress(OSError):
                paths = Path(f"/proc/{process.pid}/task").glob("*/stat")
                stats = [path.read_text().rsplit(")", 1)[1].split() for path in paths]
                elapsed, used_before = time.monotonic() - looked, used
                used = sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")
                if all(stat[0] not in "RT" for stat in stats) or used - used_before > elapsed / 2:
                    budget -= min(elapsed, 2)
                looked += elapsed
        return test, budget <= 0, output.decode(errors="replace")

    def test(self, mutant: Mutant, folder: Path) -> str:
        """Return what noticed the mutant; empty: nothing."""
        own = f"[#{Path(mutant.file).stem}_test]"  # the tests of this source come first
        for program in LAYERS[mutant.file.split("/")[1]]:
            for selected in (f"{own}~[.]", f"~{own}~[.]"):  # hidden tests are programs that other tests start
                while failure := self.run_tests(program, folder, ["--filenames-as-tags", selected]):
                    test, how = failure
                    name = re.sub(r"([\\,\[])", r"\\\1", test)
                    if not test or (
                        self.run_tests(program, folder, [name]) and not self.run_tests(program, BUILD / "csrc", [name])
                    ):
                        return f"{program}_tests: {test or 'the start'} {how}"
                    selected += f'~"{name}"'  # fails by chance
        return ""

    def __call__(self, mutant: Mutant) -> tuple[Mutant, dict]:
        folder = self.folders.get()
        started = time.monotonic()
        try:
            if not self.build(mutant, folder):
                return mutant, {"outcome": "does not compile"}
            by = self.test(mutant, folder)
            seconds = round(time.monotonic() - started)
            return mutant, {"outcome": "noticed" if by else "survived", "by": by, "seconds": seconds}
        finally:
            self.folders.put(folder)


def report(drawn: dict[str, list[Mutant]], results: dict, explained: dict[str, str]) -> None:
    """Print a table of the layers, and the survivors."""
    print(f"\n{'layer':10} {'mutants':>8} {'noticed':>8} {'explained':>10} {'open':>5} {'share':>6}")
    everything = [mutant for mutants in drawn.values() for mutant in mutants]
    for layer, mutants in [*drawn.items(), ("all", everything)]:
        outcomes = [results[mutant.key]["outcome"] for mutant in mutants if mutant.key in results]
        survivors = [mutant for mutant in mutants if results.get(mutant.key, {}).get("outcome") == "survived"]
        reasons = sum(mutant.key in explained for mutant in survivors)
        noticed, left = outcomes.count("noticed"), len(survivors) - reasons
        share = f"{100 * noticed / (noticed + left):.0f} %" if noticed + left else ""
        print(f"{layer:10} {len(mutants):8} {noticed:8} {reasons:10} {left:5} {share:>6}")
    for mutant in sorted(survivors, key=lambda mutant: (mutant.key in explained, mutant.file, mutant.line)):
        print(f"\n{mutant.file}:{mutant.line}\n{mutant.key}\n{explained.get(mutant.key, '(survived)')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn (default: 1)")
    parser.add_argument("--count", type=int, default=150, help="how many (default: 150)")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="only these of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time (default: one for a core)")
    parser.add_argument("--again", action="store_true", help="test the survivors again, for example with new tests")
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    options = parser.parse_args()

    mutants = {layer: mutants_of_layer(layer) for layer in LAYERS}
    orders = {layer: shuffled(mutants[layer], options.seed) for layer in LAYERS}
    counts = shares({layer: len(orders[layer]) for layer in LAYERS}, options.count)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    explained = explanations(EXPLAINED.read_text())

    def drawn() -> dict[str, list[Mutant]]:
        fails = {key for key, result in results.items() if result["outcome"] == "does not compile"}
        return {
            layer: [mutant for mutant in orders[layer] if mutant.key not in fails][: counts[layer]]
            for layer in options.layers
        }

    def waiting() -> list[Mutant]:
        return [mutant for mutants in drawn().values() for mutant in mutants if mutant.key not in results]

    if options.again:
        results = {
            key: result for key, result in results.items() if result["outcome"] != "survived" or key in explained
        }
    if not options.report and waiting():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
        runner = Runner(options.jobs, sorted({program for layer in options.layers for program in LAYERS[layer]}))
        with multiprocessing.pool.ThreadPool(options.jobs) as pool:
            try:
                while todo := waiting():
                    for count, (mutant, result) in enumerate(pool.imap_unordered(runner, todo), 1):
                        results[mutant.key] = result
                        RESULTS.with_suffix(".new").write_text(json.dumps(results, indent=1))
                        RESULTS.with_suffix(".new").replace(RESULTS)
                        print(f"{count}/{len(todo)} {mutant.file}:{mutant.line}", *result.values(), flush=True)
            finally:
                runner.stop()
    report(drawn(), results, explained)
    keys = {mutant.key for layer in mutants.values() for mutant in layer}
    for key in explained.keys() - keys:
        print(f"\nThere is no such mutant; remove it from {EXPLAINED.relative_to(ROOT)}:\n{key}")


if __name__ == "__main__":
    main()
