"""Diagnosis of a step that hung: whether it hangs again, what compute-sanitizer reports, and its machine code.

`steps_after_hang` gives the steps to the ladder. If JAX's own example also hangs now, the GPU is to blame, and nothing
more can be learned on this machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.ladder.facts import print_facts
from experiments.ladder.steps import AFTER_HANG, END_SECONDS, Step, child_command

TRIES: Final = (2, 3)
"""The numbers of the further tries of a step that hung."""
TOOLS: Final = ("memcheck", "synccheck")
"""The tools of compute-sanitizer: wrong addresses, and barriers that are used wrongly."""
TOOL_SECONDS: Final = 60
"""The time limit in seconds of each tool, under which kernels are many times slower."""
LINES: Final = 40
"""The largest number of lines that are kept of a tool's output."""
LARGEST: Final = 2**22
"""The largest number of bytes of a dumped file that is kept. The logs of Mosaic's passes have about 40 MB a kernel."""
DUMP: Final = "dump.tar.gz"
"""The file with the machine code of the step that hung, beside the record."""


def steps_after_hang(step: Step, example: Step, folder: str) -> tuple[Step, ...]:
    """Return the steps that find out why a step hung.

    Args:
        step: the step.
        example: the step that runs JAX's own example.
        folder: the folder of the record.
    """
    here, call = "experiments.gpu_day.hang", (step.function, step.arguments)
    limit = len(TOOLS) * (TOOL_SECONDS + END_SECONDS) + 5
    return (
        *(step._replace(name=f"{step.name}, try {number}", seconds=AFTER_HANG) for number in TRIES),
        example._replace(name=f"{example.name}, again", seconds=AFTER_HANG),
        Step(f"{step.name}, compute-sanitizer", f"{here}:sanitize", call, limit),
        Step(f"{step.name}, dump", f"{here}:dump", (*call, folder, AFTER_HANG), AFTER_HANG + 20),
    )


def sanitize(function: str, arguments: Sequence[Any], *, rehearsal: bool = False) -> None:
    """Run a step under each of `TOOLS` and print what they report.

    Args:
        function: the function of the step, as ``module:function``.
        arguments: the arguments of the function.
        rehearsal: whether to run at small sizes without a GPU.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print_facts(cannot_run="compute-sanitizer is not on the PATH")
        return
    command = child_command(function, arguments, rehearsal=rehearsal)
    for tool in TOOLS:
        with tempfile.TemporaryFile("w+") as output:
            end = run_for([sanitizer, "--tool", tool, *command], TOOL_SECONDS, {}, output)
            output.seek(0)
            reported = [line.rstrip() for line in output if line.startswith("=====")]
        print_facts(tool=tool, end=end, lines=len(reported), report=reported[:LINES])


def dump(
    function: str, arguments: Sequence[Any], folder: str, seconds: int, *, rehearsal: bool = False
) -> None:
    """Run a step that writes the PTX, the machine code and the resources of its kernels, and pack them into `DUMP`.

    Args:
        function: the function of the step, as ``module:function``.
        arguments: the arguments of the function.
        folder: the folder for the file.
        seconds: the time after which the step is killed. Its kernels are written before the first one runs.
        rehearsal: whether to run at small sizes without a GPU.
    """
    with tempfile.TemporaryDirectory() as files:
        command = child_command(function, arguments, rehearsal=rehearsal)
        end = run_for(command, seconds, {"MOSAIC_GPU_DUMP_TO": files}, subprocess.DEVNULL)
        paths = [path for path in Path(files).iterdir() if path.stat().st_size <= LARGEST]
        target = Path(folder) / DUMP
        with tarfile.open(target, "w:gz") as archive:
            for path in sorted(paths):
                archive.add(path, path.name)
    kinds = sorted({path.suffix for path in paths})
    print_facts(file=str(target), end=end, files=len(paths), kinds=kinds)


def run_for(command: Sequence[str], seconds: int, variables: Mapping[str, str], output: Any) -> int | None:
    """Run a command for at most ``seconds``.

    Args:
        command: the command.
        seconds: the time limit.
        variables: further environment variables.
        output: the file for its output.

    Returns:
        The exit status, or None if it was killed.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # as `child_command` expects
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **variables},
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        return None
    finally:
        assert process.stdin is not None
        process.stdin.close()
