"""``make attack``: random attacks on the state of training, counted by how they end.

In the first kind (`support.loop_attacks`), a training loop is interrupted, its allocations fail, its disk is full, its
files are damaged, or it is given state of another step, plan, order or run. In the second kind
(`support.process_attacks`), a Flax loop on two processes and training runs on one and two are killed, stopped or fail.
After every attack the state must be whole: what it was before or after the step that was attacked, bit for bit; or one
line must have said what is wrong. Everything else is counted as *wrong*, printed, and fails the command. The attacks
run without root's privileges.
"""

import argparse
import collections
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# With fewer threads, two programs at once may wait for each other for ever.
os.environ.setdefault("NPROC", "16")


@dataclasses.dataclass(frozen=True)
class Case:
    """An attack with its seed."""

    attack: object
    seed: int
    end: str


def run_cases(attacks, targets, count, seed):
    """Run attacks in turn on the targets in turn, and yield how each ended."""
    for number in range(count):
        attack, target = attacks[number % len(attacks)], targets[number // len(attacks) % len(targets)]
        case_seed = seed * 100_000 + number
        try:
            end = attack(target, np.random.default_rng(case_seed))
        except Exception as error:
            traceback.print_exc()
            target.rebuild()
            end = f"wrong: {type(error).__name__}: {error}"
        print(f"{attack.__name__}, seed {case_seed}: {end}", file=sys.stderr, flush=True)
        yield Case(attack, case_seed, end)


def drop_privileges():
    """Run this program again without the capabilities of root, if it has any."""
    status = Path("/proc/self/status")
    if not status.exists() or "CapEff:\t0000000000000000" in status.read_text():
        return
    if setpriv := shutil.which("setpriv"):
        drop = [setpriv, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        os.execv(setpriv, [*drop, sys.executable, __file__, *sys.argv[1:]])
    print("note: there is no setpriv, so the attacks run with the privileges of this user")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=300, help="the number of attacks")
    parser.add_argument(
        "--processes", type=int, default=12, help="how many are on programs of their own; each takes a minute"
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of all attacks")
    options = parser.parse_args()
    drop_privileges()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from support.loop_attacks import LOOP, arenas
    from support.process_attacks import PROCESSES, programs

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # Orbax's writers
    on_processes = min(options.processes, options.cases)
    begin, counts, wrong = time.monotonic(), collections.Counter(), []
    cases = []
    if loops := options.cases - on_processes:
        cases += run_cases(LOOP, arenas(), loops, options.seed)
        print(f"{loops} attacks on loops in {time.monotonic() - begin:.0f} s", flush=True)
    if on_processes:
        with tempfile.TemporaryDirectory() as folder:
            cases += run_cases(PROCESSES, programs(Path(folder)), on_processes, options.seed)
    for case in cases:
        end = case.end.split(":")[0]
        counts[case.attack.__name__.replace("_", " "), end] += 1
        if end == "wrong":
            wrong.append(case)
    for (attack, end), count in sorted(counts.items()):
        print(f"{attack:20} {end:30} {count:4}")
    print(f"{len(cases)} attacks in {time.monotonic() - begin:.0f} s, {len(wrong)} ended wrong")
    for case in wrong:
        print(f"  {case.attack.__name__}, seed {case.seed}: {case.end}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
