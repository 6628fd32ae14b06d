"""`python -m torchrpc script.py ARGS`: run a script with torch.distributed.rpc replaced, in it and in its children.
`python -m torchrpc doctor`, `keygen`, `probe`, `top`, `stack`, `why`, `rrefs`: see the modules of these names, here or
in `cli`. The command `torchrpc` is the same.

The interpreter restarts without the words `-m torchrpc`, so argv, `__main__`, sys.path and the re-import by `mp.spawn`
are those of a plain run of the script. The environment variable TORCHRPC_REPLACE carries the request to child
processes; `import torch` reads it there (`_autoload`).
"""

import importlib
import os
import sys
from importlib import metadata
from pathlib import Path

USAGE = """\
usage: python -m torchrpc SCRIPT [ARGS...]
       python -m torchrpc -m MODULE [ARGS...]
       python -m torchrpc doctor [--help]
       python -m torchrpc keygen [--help]
       python -m torchrpc probe [--help]
       python -m torchrpc top|stack|why|rrefs [ADDRESS | --pid PID] [--help]
       python -m torchrpc --version

Runs a script or a module with torch.distributed.rpc replaced by torchrpc, in this process and its child processes.
`doctor` reports what works on this machine, `keygen` makes keys and identities of workers, `probe` says whether a
worker answers. The others look into a running group: `top` shows its workers and calls, `stack` what their threads do,
`why` who waits for whom, `rrefs` who holds which RRefs. To run a script of such a name, write ./doctor. `torchrpc`
stands for `python -m torchrpc`."""

INSPECTING = ("top", "stack", "why", "rrefs")  # each a module of `cli`


def command() -> list[str]:
    """Return this process's command line without `-m torchrpc` (`-mtorchrpc`, `-um torchrpc`)."""
    arguments = sys.argv[1:]
    if Path(sys.argv[0]).name != "__main__.py":  # the command `torchrpc`
        return [sys.executable, *arguments]
    head = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    if head[-1] == "torchrpc":
        head.pop()
    flag = head.pop().removesuffix("torchrpc").removesuffix("m")
    return [sys.executable, *head, *([flag] if flag != "-" else []), *arguments]


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"torchrpc {metadata.version('torchrpc')}, torch {metadata.version('torch')}")
        return 0
    if arguments[0] == "doctor":
        from . import doctor

        return doctor.main(arguments[1:])
    if arguments[0] == "keygen":
        from . import keygen

        return keygen.main(arguments[1:])
    if arguments[0] == "probe":
        from . import probe

        return probe.main(arguments[1:])
    if arguments[0] in INSPECTING:
        return importlib.import_module(f".cli.{arguments[0]}", "torchrpc").main(arguments[1:])
    if not any(hook.value.startswith("torchrpc.") for hook in metadata.entry_points(group="torch.backends")):
        sys.exit("torchrpc can be imported, but is not installed: `import torch` will not find it. Run pip install.")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        sys.exit("TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps `import torch` from loading torchrpc. Unset it.")
    os.environ["TORCHRPC_REPLACE"] = "1"
    os.execv(sys.executable, command())


if __name__ == "__main__":
    sys.exit(main())
