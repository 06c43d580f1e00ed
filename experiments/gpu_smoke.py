"""``python -m experiments.gpu_smoke``: whether relibra_jax works on the GPUs of this host, in about two minutes.

For anyone who has a GPU, or two: the kernels are checked, then a layer with replicas over all GPUs of the host, in each
kind of exchange, beside a dense one. Nothing has to be installed but the project. Every step is a process of its own,
so that a hang ends that step alone. Please send us the file that it writes, whatever is in it.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.gpu_day.ladder import Record, Step, read_record, run_ladder

LAYER = "experiments.gpu_day.group_layer:check_group"


def smoke_steps(devices: int, *, rehearsal: bool) -> tuple[Step, ...]:
    """The steps for a host with so many GPUs; host devices have no ragged exchange."""
    counts = sorted({1, min(2, devices), devices})
    layers = (
        Step(f"layer over {count}, {exchange}", LAYER, (count, exchange), 150, ("environment",))
        for count in counts
        for exchange in (("padded",) if count == 1 or rehearsal else ("padded", "ragged", "remote"))
    )
    return (
        Step("environment", "experiments.gpu_day.correctness:describe_machine", seconds=90),
        Step("kernels", "experiments.gpu_day.correctness:check_chosen", seconds=300, needs=("environment",)),
        *layers,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps and print what to send; return 1 if one has not passed.

    Args:
        arguments: the command line; that of the process when None.
    """
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_smoke",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--record", type=Path, default=Path("gpu_smoke.jsonl"), help="the file that is written"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="small sizes, on two host devices without a GPU"
    )
    options = parser.parse_args(arguments)
    devices = 2 if options.rehearse else count_devices()
    steps = smoke_steps(devices, rehearsal=options.rehearse)
    told = run_ladder(steps, Record(options.record, rehearsal=options.rehearse), seconds=1200)
    failed = [name for name, state in told.items() if not state.startswith("passed")]
    lines = read_record(options.record)
    print(f"\n{len(told) - len(failed)} of {len(told)} steps passed; {len(lines)} lines in {options.record}")
    return 1 if failed else 0


def count_devices() -> int:
    """The devices that JAX sees, counted by another process: this one keeps no GPU busy. 1 if it sees none."""
    code = "import jax; print(len(jax.devices()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(ran.stdout.split()[-1]) if ran.returncode == 0 and ran.stdout.split() else 1


if __name__ == "__main__":
    sys.exit(main())
