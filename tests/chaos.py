"""Kills workers, stops them, cuts them off, interrupts and overloads them, and prints a table of the observations.

Each case runs in processes of its own, which are killed at its end.

    python tests/chaos.py                       # all cases, a few minutes
    python tests/chaos.py --cases death         # cases whose part or name matches
    python tests/chaos.py --system torch        # on torch's own RPC, as far as possible
    python tests/chaos.py --transport tcp --tls # with certificates, which openssl makes
    python tests/chaos.py --scale 1             # long cases at full length: hours

The exit code is 1 if a case fails on torchrpc, else 0. The cases are in chaos_cases/, one module for each part.
"""

import argparse
import importlib
import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from chaos_cases.harness import CASES, Outcome, Settings, run_case

PARTS = ["death", "timeouts", "exits", "load", "unauthenticated_peers", "soak", "situations"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=["torchrpc", "torch"], default="torchrpc")
    parser.add_argument("--cases", default="", metavar="REGEX", help="of 'part: name'")
    parser.add_argument("--scale", type=float, default=0.01, help="of the long cases: 1 is 100,000 calls, 20,000 steps")
    parser.add_argument("--transport", default="", help="a value for TORCHRPC_TRANSPORT")
    parser.add_argument("--tls", action="store_true", help="give the workers certificates")
    parser.add_argument("--list", action="store_true", help="only list the names of the cases")
    parser.add_argument("--output", type=Path, help="also write the outcomes as JSON")
    args = parser.parse_args()
    for part in PARTS:
        importlib.import_module(f"chaos_cases.{part}")
    chosen = [case for case in CASES if re.search(args.cases, f"{case.part}: {case.name}")]
    if args.list:
        print("\n".join(f"{case.part}: {case.name}" for case in chosen))
        return 0
    if args.tls:
        sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks/compare"))
        from systems import tls_environment

        os.environ.update(tls_environment())
    settings = Settings(args.system, args.scale, args.transport)
    outcomes = []
    width = max((len(case.name) for case in chosen), default=0)
    for case in chosen:
        outcome = run_case(case, settings)
        outcomes.append(outcome)
        text = f"{outcome.verdict:7} {outcome.seconds:6.1f} s  {outcome.seen}"
        print(f"{case.part:9} {case.name:{width}}  {text}", flush=True)
    if args.output:
        args.output.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))
    return summary(outcomes, args.system)


def summary(outcomes: list[Outcome], system: str) -> int:
    failed = [outcome.name for outcome in outcomes if outcome.verdict == "FAIL"]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} cases passed on {system}.")
    return 1 if failed and system == "torchrpc" else 0


if __name__ == "__main__":
    sys.exit(main())
