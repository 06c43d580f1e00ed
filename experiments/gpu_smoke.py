"""``python -m experiments.gpu_smoke``: a test of relibra_jax on the GPUs of this host, in about two minutes.

It checks the kernels, and then a layer with replicas over one, two and all GPUs of the host, with each kind of
exchange, against a dense layer. It needs only the project itself. Every step runs in its own process, so a hang ends
only that step. Please send us the file that it writes, whatever the results are.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.gpu_day.ladder import Record, Step, read_record, run_ladder

LAYER = "experiments.gpu_day.group_layer:check_group"


def smoke_steps(devices: int, *, rehearsal: bool) -> tuple[Step, ...]:
    """Return the steps for a host with ``devices`` GPUs; a rehearsal on host devices leaves out the ragged exchange."""
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
    """Run all steps, and print a summary.

    Args:
        arguments: the command-line arguments. None stands for those of the process.

    Returns:
        The exit status: 0 if all steps have passed, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_smoke",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--record", type=Path, default=Path("gpu_smoke.jsonl"), help="file to which results are written"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="run at small sizes on two host devices, without a GPU"
    )
    options = parser.parse_args(arguments)
    devices = 2 if options.rehearse else count_devices()
    steps = smoke_steps(devices, rehearsal=options.rehearse)
    outcomes = run_ladder(steps, Record(options.record, rehearsal=options.rehearse), seconds=1200)
    failed = [name for name, outcome in outcomes.items() if not outcome.startswith("passed")]
    lines = read_record(options.record)
    passed_count = len(outcomes) - len(failed)
    print(f"\n{passed_count} of {len(outcomes)} steps passed; {len(lines)} lines in {options.record}")
    return 1 if failed else 0


def count_devices() -> int:
    """Return the number of devices that JAX sees, or 1 if it fails.

    Another process counts them, so that this one does not occupy the GPUs.
    """
    code = "import jax; print(len(jax.devices()))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(process.stdout.split()[-1]) if process.returncode == 0 and process.stdout.split() else 1


if __name__ == "__main__":
    sys.exit(main())
