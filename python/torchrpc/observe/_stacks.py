"""The Python stacks of this process's threads, and the Python locks that they wait for and hold.

The core calls `collect` for a report, on a thread of its own, with the GIL. Nothing here runs code of the program:
names and attributes are looked up in dictionaries and slots, never through properties or `__getattr__`. CPython does
not record which thread holds a `threading.Lock`, so `collect` infers it from the source: a thread that stands in the
body of a `with` block holds its lock. If the source does not show the holder, `collect` names none.
"""

import ast
import contextlib
import dis
import inspect
import itertools
import linecache
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ._static_values import MISSING, evaluate, first_argument, is_a, static_attribute, variable

MAX_THREADS = 200
MAX_FRAMES = 60
MAX_SEARCH_S = 0.25  # limits the search for holders of locks; the stacks themselves are always read
_MAX_CACHED = 512
_MAX_SOURCE_BYTES = 1 << 20
_MAX_TEXT = 80
_CLOCK_OF_THREAD = 6  # of Linux: CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED

_Position = tuple[int, int]  # line, byte in the line
_LOCK = type(threading.Lock())
_RLOCK = type(threading.RLock())
_THREADING_FILE = threading.Condition.wait.__code__.co_filename
_CONDITION_WAIT = threading.Condition.wait.__code__
_METHODS = {"acquire", "__enter__", "release", "wait", "wait_for", "join", "_acquire_restore"}
_ENTER_OPCODES = {dis.opmap[name] for name in ("SETUP_WITH", "BEFORE_WITH") if name in dis.opmap}
_WITH_OPCODES = _ENTER_OPCODES | {dis.opmap[name] for name in ("LOAD_SPECIAL",) if name in dis.opmap}
_CACHE = dis.opmap.get("CACHE", 0 if sys.version_info >= (3, 11) else -1)
_CALL_OPCODES = {code for name, code in dis.opmap.items() if name.startswith("CALL")}

# Method of threading -> what a thread that stands in it waits for. Waits in other methods are not reported.
_THREADING_WAITS = {
    _CONDITION_WAIT: "condition",
    threading.Condition.wait_for.__code__: "condition",
    threading.Condition.__enter__.__code__: "lock",
    threading.Semaphore.acquire.__code__: "semaphore",
    threading.Event.wait.__code__: "event",
    threading.Barrier.wait.__code__: "barrier",
    threading.Thread.join.__code__: "thread",
}


class _Range(NamedTuple):
    start: _Position
    end: _Position

    def __contains__(self, position: object) -> bool:
        return self.start <= position <= self.end  # type: ignore[operator]


class _With(NamedTuple):
    statement: _Range
    items: list[tuple[ast.expr, _Range]]
    body: _Range


class _MethodCall(NamedTuple):
    method: str
    receiver: ast.expr
    range: _Range
    is_unconditional: bool  # an acquire() without a time-out, which cannot fail


class _Function(NamedTuple):
    """The parts of a function's source that concern locks."""

    blocks: list[_With]
    calls: list[_MethodCall]


class _Here(NamedTuple):
    """The instruction at which a frame stands. `end` is None if Python records only lines."""

    start: _Position
    end: "_Position | None"
    opcode: int
    argument: int
    offset: int


class _Site(NamedTuple):
    """The `with X` or `X.method()` at which a frame stands."""

    method: str  # "__enter__" for a with statement
    receiver: ast.expr


class _Wait(NamedTuple):
    kind: str
    text: str
    target: object  # the lock, condition, semaphore or thread
    aliases: list[object]  # objects that a `with` statement of the program may name instead of the lock


_functions: dict[tuple[str, int, str, int], "_Function | None"] = {}


def collect(native_ids: Mapping[int, int] = types.MappingProxyType({})) -> list[dict[str, Any]]:
    """Return the Python stack of each thread of this process, and the lock for which it waits.

    Args:
        native_ids: ident -> native id of threads that C++ started, which Python does not know.

    Each thread is a dictionary: "ident" and "native_id" (0 if it is not known, as for a thread of another library that
    runs Python), "name", "python" (the frames as {"file", "line", "function"}, innermost first, at most 60) and "lock".
    "lock" is None, or a dictionary that describes what the innermost frame waits for:

    - "text": the expression in the source, as `self.lock`; "kind": "lock", "semaphore", "condition" or "event" (a
      notification is awaited), "barrier", "thread" (its end is awaited), or "import" (another thread imports a module).
    - "holders": the native ids of the threads that hold it, as far as the threads and their ids are known;
      "holder_idents": the idents of these threads; "taken_at": for each ident, where the thread has taken the lock
      ("file:line", or "").

    `collect` reads at most 200 threads, and starts no search for a holder after a quarter of a second. The calling
    thread's frames start with the caller of `collect`. Raises nothing.
    """
    try:
        return _collect(native_ids)
    except Exception:  # A report without stacks is better than no report.
        return []


def _collect(native_ids: Mapping[int, int]) -> list[dict[str, Any]]:
    me, own = threading.get_ident(), sys._getframe().f_back
    known = {ident: _describe_thread(thread) for ident, thread in list(threading._active.items())}  # type: ignore[attr-defined]
    known |= {ident: ("", native_id) for ident, native_id in native_ids.items() if ident not in known}
    used = {ident: _processor_time(native_id) for ident, (_, native_id) in known.items()}
    threads: dict[int, list[types.FrameType]] = {}
    for ident, frame in itertools.islice(sys._current_frames().items(), MAX_THREADS):
        if ident == me:
            frame = own.f_back if own else None  # type: ignore[assignment]
        if frames := list(_walk(frame)):
            threads[ident] = frames
    positions = {ident: frames[0].f_lasti for ident, frames in threads.items()}
    rows: list[dict[str, Any]] = []
    for ident, frames in threads.items():
        name, native_id = known.get(ident, ("", 0))
        python = [_describe_frame(frame) for frame in frames]
        rows.append({"ident": ident, "native_id": native_id, "name": name, "python": python, "lock": None})
    search = _Search(threads, {row["ident"]: row["native_id"] for row in rows})
    deadline = time.monotonic() + MAX_SEARCH_S
    for row in rows:
        if row["ident"] == me or time.monotonic() > deadline:
            continue
        with contextlib.suppress(Exception):  # An error in this search must not lose the stacks.
            row["lock"] = search.lock_of(row["ident"])
    # Other threads may have run meanwhile. A thread has been waiting all the time only if it still stands at the same
    # instruction and has not come back to it in a loop: then it has used the processor.
    now = sys._current_frames()
    for row in rows:
        ident = row["ident"]
        latest = now.get(ident)
        has_moved = latest is not threads[ident][0] or latest.f_lasti != positions[ident]
        if row["lock"] and (has_moved or used.get(ident) != _processor_time(row["native_id"])):
            row["lock"] = None
    return rows


def _processor_time(native_id: int) -> "int | None":
    """Return the processor time of a thread of this process in ns; None if it has ended or the system has no clock."""
    if not native_id:
        return None
    try:
        # The number of the clock that pthread_getcpuclockid() returns, which would crash for a thread that has ended.
        return time.clock_gettime_ns(~native_id << 3 | _CLOCK_OF_THREAD)
    except OSError:
        return None


def _walk(frame: "types.FrameType | None") -> Iterator[types.FrameType]:
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _describe_frame(frame: types.FrameType) -> dict[str, Any]:
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name)
    return {"file": code.co_filename, "line": frame.f_lineno or code.co_firstlineno, "function": function}


def _describe_thread(thread: object) -> tuple[str, int]:
    name, native_id = static_attribute(thread, "_name"), static_attribute(thread, "_native_id")
    return name if type(name) is str else "", native_id if type(native_id) is int else 0


# What a thread waits for.


class _Search:
    """Finds the holders of locks in one set of stacks, once for each lock, for which many threads may wait."""

    def __init__(self, threads: dict[int, list[types.FrameType]], native_ids: dict[int, int]):
        self._threads = threads
        self._native_ids = native_ids
        self._found: dict[int, dict[int, str] | None] = {}

    def lock_of(self, ident: int) -> "dict[str, Any] | None":
        wait = _wait_of(self._threads[ident])
        if wait is None:
            return None
        if id(wait.target) not in self._found:
            self._found[id(wait.target)] = _holders(wait, self._threads)
        holders = self._found[id(wait.target)]
        if holders is None:
            return None
        return {
            "text": wait.text,
            "kind": wait.kind,
            "holders": [self._native_ids[each] for each in holders if self._native_ids.get(each)],
            "holder_idents": list(holders),
            "taken_at": list(holders.values()),
        }


def _wait_of(frames: list[types.FrameType]) -> "_Wait | None":
    top = frames[0]
    if top.f_code.co_filename == "<frozen importlib._bootstrap>":
        return _import_wait(frames)
    inside = list(itertools.takewhile(lambda frame: frame.f_code.co_filename == _THREADING_FILE, frames))
    if inside:
        return _threading_wait(inside, frames[len(inside)] if len(inside) < len(frames) else None)
    site = _site(top)
    if site is None or site.method not in ("acquire", "__enter__"):
        return None
    target = evaluate(site.receiver, top)
    # If a class of the program wraps the lock, other threads name an object of that class instead of the lock.
    owner = first_argument(top) if top.f_code.co_name in ("__enter__", "acquire") else MISSING
    outer = _site(frames[1]) if owner is not MISSING and len(frames) > 1 else None
    text = _text((outer or site).receiver)
    return _Wait("lock", text, target, [target, owner]) if _is_lock(target) else None


def _threading_wait(inside: list[types.FrameType], outer: "types.FrameType | None") -> "_Wait | None":
    """Return the wait of a thread that stands in these frames of threading, called from `outer`."""
    waits = [(kind, frame) for frame in inside if (kind := _THREADING_WAITS.get(frame.f_code))]
    if not waits:
        return None
    kind, frame = waits[-1]  # the method that the program has called
    target = variable(frame, "self")
    site = _site(outer) if outer else None
    text = _text(site.receiver) if site else f"a {type(target).__name__}"
    if kind == "condition" and (wait := next((each for each in inside if each.f_code is _CONDITION_WAIT), None)):
        target = variable(wait, "self")
        at = _site(wait)
        if at is not None and at.method == "_acquire_restore":  # It was notified, and acquires the lock again.
            kind = "lock"
    elif kind == "thread":
        text = f"the end of the thread {_describe_thread(target)[0]}".rstrip()
    lock = static_attribute(target, "_lock") if kind == "lock" else target
    return None if lock is MISSING else _Wait(kind, text, lock, [lock, target])


def _import_wait(frames: list[types.FrameType]) -> "_Wait | None":
    for frame in frames[:3]:
        if frame.f_code.co_name == "acquire":
            lock = variable(frame, "self")
            name = static_attribute(lock, "name")
            if type(name) is str and type(static_attribute(lock, "owner")) is int:
                return _Wait("import", f"the import of {name}", lock, [])
    return None


def _is_lock(value: object) -> bool:
    return type(value) in (_LOCK, _RLOCK) or is_a(value, threading.Condition)


# Which threads hold the lock.


def _holders(wait: _Wait, threads: dict[int, list[types.FrameType]]) -> "dict[int, str] | None":
    """Return {ident of a holder: where it took the lock}; empty if not known, None if no thread holds it any more."""
    if wait.kind == "import":
        owner = static_attribute(wait.target, "owner")
        return {owner: ""} if type(owner) is int else {}
    if wait.kind == "thread":
        ident = static_attribute(wait.target, "_ident")
        return {ident: ""} if type(ident) is int else {}
    if wait.kind == "lock":
        lock = wait.target
        if is_a(lock, threading.Condition):
            lock = static_attribute(lock, "_lock")
        if type(lock) is _RLOCK:
            owner = _rlock_owner(lock)
            if owner is None:
                return None
            taken = _taken_at(threads.get(owner, []), [*wait.aliases, lock], guess=False)
            return {owner: taken or ""}
        if type(lock) is not _LOCK:
            return {}
        if not lock.locked():
            return None
        found = _find_holders(threads, [*wait.aliases, lock])
        return found if len(found) == 1 else {}  # A lock has one holder: with two candidates, the holder is not known.
    if wait.kind == "semaphore":
        return _find_holders(threads, wait.aliases)
    return {}


def _rlock_owner(lock: object) -> "int | None":
    words = _RLOCK.__repr__(lock).split()
    owner = next((int(word[6:]) for word in words if word.startswith("owner=")), 0)
    return owner if owner and words[0] == "<locked" else None


def _find_holders(threads: dict[int, list[types.FrameType]], targets: list[object]) -> dict[int, str]:
    for guess in (False, True):
        taken = {ident: _taken_at(frames, targets, guess) for ident, frames in threads.items()}
        if found := {ident: place for ident, place in taken.items() if place is not None}:
            return found
    return {}


def _taken_at(frames: list[types.FrameType], targets: list[object], guess: bool) -> "str | None":
    """Return where the thread of these frames has taken one of `targets`; None if it does not seem to hold one.

    With `guess`, look for an acquire() without a later release() in the order of the lines, instead of `with` blocks.
    """
    children = [None, *frames]
    for child, frame in zip(children, frames, strict=False):
        if frame.f_code is _CONDITION_WAIT:
            condition = variable(frame, "self", child)  # A thread in wait() has released the condition's lock.
            if _is_one_of(condition, targets) or _is_one_of(static_attribute(condition, "_lock"), targets):
                return None
    for child, frame in zip(children, frames, strict=False):
        code = frame.f_code
        if code.co_filename == _THREADING_FILE or not _may_lock(code):
            continue
        function, here = _function(code), _here(frame)
        if function is None or here is None:
            continue
        line = (_guess_in if guess else _block_in)(function, here, frame, child, targets)
        if line is not None:
            return f"{code.co_filename}:{line}"
    return None


def _block_in(
    function: _Function, here: _Here, frame: types.FrameType, child: "types.FrameType | None", targets: list[object]
) -> "int | None":
    """Return the line of the `with` statement over one of `targets` in whose body the frame stands."""
    for block in function.blocks:
        for index, (expression, where) in enumerate(block.items):
            entered = _entered_item(block, here, frame)
            if entered is None and here.end is not None:  # The frame may be evaluating a later item.
                entered = next((at for at, item in enumerate(block.items) if here.start in item[1]), None)
            is_inside = _is_in_body(block, here) or (entered is not None and entered > index)
            if is_inside and _is_one_of(evaluate(expression, frame, child), targets):
                released = any(
                    call.method == "release"
                    and block.body.start <= call.range.start < here.start
                    and _is_one_of(evaluate(call.receiver, frame, child), targets)
                    for call in function.calls
                )
                return None if released else where.start[0]
    return None


def _guess_in(
    function: _Function, here: _Here, frame: types.FrameType, child: "types.FrameType | None", targets: list[object]
) -> "int | None":
    """Return the line of the last acquire() of a target before the frame's position, if no release() follows it."""
    taken = None
    for call in function.calls:
        if call.range.start >= here.start or call.method not in ("acquire", "__enter__", "release"):
            continue
        if _is_one_of(evaluate(call.receiver, frame, child), targets):
            taken = call.range.start[0] if call.method != "release" and call.is_unconditional else None
    return taken


def _is_in_body(block: _With, here: _Here) -> bool:
    if here.end is None:  # Only the line is known, and statement and body may share one.
        return block.statement.start[0] < here.start[0] and block.body.start[0] <= here.start[0] <= block.body.end[0]
    return here.start in block.body


def _is_one_of(value: object, targets: list[object]) -> bool:
    if value is MISSING or value is None:
        return False
    if any(value is each for each in targets):
        return True
    return is_a(value, threading.Condition) and any(static_attribute(value, "_lock") is each for each in targets)


# Where a frame stands.


def _here(frame: types.FrameType) -> "_Here | None":
    code, offset = frame.f_code, frame.f_lasti
    if offset < 0:
        return None
    instructions = code.co_code
    while offset and instructions[offset] == _CACHE:  # Python 3.11 points behind the caches of a call
        offset -= 2
    opcode, argument = instructions[offset], instructions[offset + 1]
    if hasattr(code, "co_positions"):
        line, end_line, start, end = next(itertools.islice(code.co_positions(), offset // 2, None), (None,) * 4)
        if line is not None and end_line is not None and start is not None and end is not None:
            return _Here((line, start), (end_line, end), opcode, argument, offset)
    return _Here((frame.f_lineno, 0), None, opcode, argument, offset) if frame.f_lineno else None


def _site(frame: types.FrameType) -> "_Site | None":
    """Return the `with X` or `X.method()` at which a frame stands; None if there is none, or it is not certain."""
    here = _here(frame) if _may_lock(frame.f_code) else None
    function = _function(frame.f_code) if here else None
    if function is None or here is None:
        return None
    for block in function.blocks:
        index = _entered_item(block, here, frame)
        if index is not None:
            return _Site("__enter__", block.items[index][0])
    if here.opcode not in _CALL_OPCODES:
        return None
    calls = [call for call in function.calls if _is_at_call(call, here)]
    return _Site(calls[0].method, calls[0].receiver) if len(calls) == 1 else None


def _is_at_call(call: _MethodCall, here: _Here) -> bool:
    if here.end is None:
        return call.range.start[0] <= here.start[0] <= call.range.end[0]
    return here.end == call.range.end and here.start in call.range


def _entered_item(block: _With, here: _Here, frame: types.FrameType) -> "int | None":
    """Return the index of the item whose `__enter__` the frame runs; None if it runs none."""
    count = len(block.items)
    if here.opcode in _ENTER_OPCODES:
        for index, (_, where) in enumerate(block.items):
            if here.end is not None and (here.start, here.end) == where:
                return index
        starts_here = here.start == block.statement.start
        if here.end is None:  # Python 3.10: the instruction has the statement's line, or the item's
            starts_here = here.start[0] in (block.statement.start[0], *(where.start[0] for _, where in block.items))
        elif here.end != block.statement.end:
            return None
        if not starts_here:
            return None
        # Up to Python 3.12 the instruction has the statement's position: count such instructions up to this one. Code
        # that is compiled twice, as a `finally` is, contains each of them twice.
        before = [each for each in _enter_instructions(frame.f_code, block) if each <= here.offset]
        return (len(before) - 1) % count if before else None
    if here.opcode in _CALL_OPCODES and here.argument == 0 and here.end is not None:  # Python 3.14
        for index, (expression, where) in enumerate(block.items):
            if (here.start, here.end) == where and not isinstance(expression, ast.Call):
                return index
    return None


def _enter_instructions(code: types.CodeType, block: _With) -> list[int]:
    instructions = code.co_code
    offsets = [at for at in range(0, len(instructions), 2) if instructions[at] in _ENTER_OPCODES]
    if hasattr(code, "co_positions"):
        positions = list(code.co_positions())
        return [at for at in offsets if (positions[at // 2][0], positions[at // 2][2]) == block.statement.start]
    lines = {block.statement.start[0], *(where.start[0] for _, where in block.items)}
    starts = list(dis.findlinestarts(code))
    return [at for at in offsets if [line for start, line in starts if start <= at][-1:][0] in lines]


def _may_lock(code: types.CodeType) -> bool:
    """Return whether a function's instructions may use locks. The source of other functions is not parsed."""
    return not _METHODS.isdisjoint(code.co_names) or not _WITH_OPCODES.isdisjoint(code.co_code[::2])


# The source.


def _function(code: types.CodeType) -> "_Function | None":
    key = (code.co_filename, code.co_firstlineno, code.co_name, hash(code.co_code))
    if key not in _functions:
        if len(_functions) >= _MAX_CACHED:
            _functions.clear()
        try:
            _functions[key] = _parse(code)
        except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
            _functions[key] = None
    return _functions[key]


def _parse(code: types.CodeType) -> "_Function | None":
    lines = linecache.getlines(code.co_filename)
    first = code.co_firstlineno
    if code.co_name == "<module>":
        if sum(map(len, lines)) > _MAX_SOURCE_BYTES:
            return None
        return _extract(ast.parse("".join(lines)), 0)
    if not 0 < first <= len(lines):
        return None
    block = inspect.getblock(lines[first - 1 :])
    shift = first - 1
    if block and block[0][:1].isspace():
        if sum(map(len, block)) > _MAX_SOURCE_BYTES:
            return None
        block = ["if 1:\n", *block]  # keeps the columns
        shift -= 1
    tree = ast.parse("".join(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            line = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if line + shift == first:
                return _extract(node, shift)
    return None  # a lambda, a class, or a file that has changed


def _extract(root: ast.AST, shift: int) -> _Function:
    blocks: list[_With] = []
    calls: list[_MethodCall] = []
    todo: list[ast.AST] = list(getattr(root, "body", []))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue  # has a frame of its own
        if isinstance(node, ast.With):
            items = [(item.context_expr, _range(item.context_expr, shift)) for item in node.items]
            body = _Range(_range(node.body[0], shift).start, _range(node.body[-1], shift).end)
            blocks.append(_With(_range(node, shift), items, body))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            arguments = [*node.args, *(each.value for each in node.keywords)]
            is_unconditional = all(isinstance(each, ast.Constant) and each.value is True for each in arguments)
            calls.append(_MethodCall(node.func.attr, node.func.value, _range(node, shift), is_unconditional))
        todo += ast.iter_child_nodes(node)
    return _Function(blocks, sorted(calls, key=lambda call: call.range.start))


def _range(node: Any, shift: int) -> _Range:
    return _Range((node.lineno + shift, node.col_offset), (node.end_lineno + shift, node.end_col_offset))


def _text(expression: ast.expr) -> str:
    return textwrap.shorten(ast.unparse(expression), _MAX_TEXT, placeholder="...")
