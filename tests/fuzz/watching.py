"""For the fuzzer of what Python reads: watches what is called meanwhile.

An audit hook watches what the interpreter of Python does, canaries note calls, and the classes and objects that the
worker shares must stay as they are.
"""

import argparse
import collections
import random
import sys
import time
from collections.abc import Callable

import canaries
import torch

from torchrpc.rpc._errors import RpcError
from torchrpc.rpc._security.allow_list import resolve

# What an attacker would have called.
DANGEROUS = """
    os.system subprocess.Popen builtins.eval builtins.exec builtins.compile builtins.getattr builtins.setattr
    builtins.__import__ importlib.import_module pickle.loads marshal.loads operator.attrgetter functools.partial
    types.FunctionType types.CodeType io.open builtins.open shutil.rmtree socket.socket ctypes.CDLL sys.exit
    torch.load torch.save torch.serialization._get_layout torch.utils.cpp_extension.load_inline builtins.type
    builtins.object builtins.super builtins.property builtins.map builtins.filter builtins.print builtins.input
    collections.abc.Callable copyreg._reconstructor copyreg.__newobj__ copy._reconstruct weakref.finalize
    torchrpc.rpc._values.pickler._function torchrpc.rpc.api.rpc_sync torchrpc.rpc.internal.PythonUDF
    antigravity.fly this.s
"""
# What Python must not do while it reads a value. Others are events of the reading itself.
_FORBIDDEN = """
    exec compile open import code.__new__ function.__new__ object.__setattr__ object.__delattr__ marshal. os. ctypes.
    subprocess. socket. shutil. pty. glob. tempfile. webbrowser. urllib. sqlite3. mmap. sys.addaudithook sys.setprofile
    pickle.find_class
"""
FORBIDDEN = tuple(_FORBIDDEN.split())

events: list[str] = []
is_reading = False


def watch(event: str, args: tuple) -> None:
    is_parameter = event == "object.__setattr__" and args[1:] == ("__class__", torch.nn.Parameter)
    if is_reading and event.startswith(FORBIDDEN) and not is_parameter:
        events.append(f"{event}{args!r}"[:200])


class _AllowList:
    """Stands for a worker's `allowed_functions`."""

    worker, callers, is_for_member = "worker0", "*", True
    names = frozenset(resolve([f"canaries.{each.__name__}" for each in canaries.LISTED]))

    def entry_for(self, name: str) -> str:
        return name if name in self.names else ""

    def record_run(self, name: str) -> None:
        pass


ALLOWED = _AllowList()


def shared_state() -> list:
    """What a value must leave as it is."""
    classes = [each for each in canaries.LISTED if isinstance(each, type)]
    shared = [vars(canaries.SHARED), vars(canaries.Color.RED), sys.modules.keys(), vars(canaries).keys()]
    return [*(dict(vars(each)) for each in classes), *(list(each) for each in shared), vars(canaries.SHARED).copy()]


def outcome_of(function: Callable[[], object], may_raise: bool) -> str:
    """Call `function`, and return how that has ended. `may_raise`: a class of the canaries may raise anything."""
    global is_reading
    is_reading = True
    try:
        function()
        return "a value"
    except RpcError as exc:
        return type(exc).__name__
    except (MemoryError, RecursionError, SystemError) as exc:
        return f"FAILED: {exc!r}"
    except Exception as exc:
        return "an exception of a listed class" if may_raise else f"FAILED: {exc!r}"
    finally:
        is_reading = False


def main(
    description: str,
    what: str,
    corpus: list[bytes],
    make: Callable[[random.Random, list[bytes]], bytes],
    read: Callable[[bytes], str],
) -> int:
    """Make inputs and read them until one shows a fault. Return the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--read", metavar="HEX", help="read one input, and say what happens")
    options = parser.parse_args()
    sys.addaudithook(watch)
    for data in corpus:  # so that what is imported late is imported
        read(data)
    events.clear()
    before = shared_state()
    if options.read:
        data = bytes.fromhex(options.read)
        print(read(data), events, canaries.touched, shared_state() == before)
        return 0
    rng = random.Random(options.seed)
    ends: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + options.seconds
    done = 0
    while done < options.executions and time.monotonic() < end:
        data = make(rng, corpus)
        result = read(data)
        done += 1
        ends[result.partition(":")[0]] += 1
        if result == "a value" and len(corpus) < 5000:
            corpus.append(data)
        has_changed = done % 64 == 0 and shared_state() != before
        if events or canaries.touched or result.startswith("FAILED") or has_changed:
            print(f"{result}; events {events}; called {canaries.touched}; shared state changed: {has_changed}")
            print(f"again with: --read {data.hex()}")
            return 1
    print(f"{what:10} {done:12} executions, clean: {dict(ends)}")
    return 0
