"""The ladder: it runs steps in order, each in its own process, which is killed at the step's time limit.

The results that a step prints are appended to the record immediately, so a hang, a crash or the loss of the machine
loses nothing. A step that has passed is not repeated as long as the code is the same. A step is skipped if the steps
that it needs have not passed, or if its time limit exceeds the remaining time. This module uses only the standard
library, so it works even if JAX does not.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from experiments.gpu_day.facts import facts_of

type State = Literal["passed", "failed", "hung"]
"""The end of a step: with exit status 0, with another exit status, or killed at its time limit."""

SOURCES: Final = ("pallas_kernels", "experiments/gpu_day")
"""The folders with the code that steps depend on."""
TAIL: Final = 1500
"""The number of characters of a failed step's output that are kept."""


class Step(NamedTuple):
    """One step of the ladder."""

    name: str
    function: str
    """The function that the process calls with ``arguments`` and ``rehearsal=``, as ``module:function``."""
    arguments: tuple[Any, ...] = ()
    """The arguments of the function, numbers and strings."""
    seconds: int = 120
    """The time limit in seconds, after which the process is killed."""
    needs: tuple[str, ...] = ()
    """The names of the steps that must have passed before."""
    on_cpu: bool = False
    """Whether the step uses only the CPU."""


class Record:
    """An append-only file with the results of all steps.

    Args:
        path: the path of the file, in JSON lines. The file may exist from an earlier command.
        rehearsal: whether the steps run at small sizes without a GPU. A step that passed in a rehearsal counts as
            passed only in rehearsals.
    """

    def __init__(self, path: Path, *, rehearsal: bool = False):
        self.path, self.rehearsal, self.source = path, rehearsal, source_digest()

    def add(self, **facts: Any) -> None:
        """Append one line, and flush it to disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            # If a process was killed while it wrote, the last line has no line break.
            start = "" if not file.tell() or self.path.read_bytes().endswith(b"\n") else "\n"
            file.write(start + json.dumps({"rehearsal": self.rehearsal, **facts}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def passed(self) -> set[str]:
        """Return the steps whose last run with this code passed, in rehearsals if this is one and else in real runs."""
        state = {
            line["step"]: line["state"]
            for line in read_record(self.path)
            if "state" in line and (line["rehearsal"], line["source"]) == (self.rehearsal, self.source)
        }
        return {step for step, last in state.items() if last == "passed"}


def run_ladder(steps: Sequence[Step], record: Record, *, seconds: float) -> dict[str, str]:
    """Run the steps that have not passed yet.

    Args:
        steps: the steps, in order.
        record: the record of results.
        seconds: the time limit for all steps, in seconds. A step whose own limit exceeds the remaining time is skipped.

    Returns:
        The outcome of each step, as text: "passed", "failed", "hung", "passed before", or the reason why it was
        skipped.
    """
    deadline, outcomes = time.monotonic() + seconds, {}
    for step in steps:
        passed, remaining = record.passed(), deadline - time.monotonic()
        missing = [name for name in step.needs if name not in passed]
        if step.name in passed:
            outcomes[step.name] = "passed before"
        elif missing:
            outcomes[step.name] = f"skipped: {', '.join(missing)} must pass first"
        elif remaining < step.seconds:
            outcomes[step.name] = f"skipped: its limit is {step.seconds} s, but only {remaining:.0f} s remain"
        else:
            outcomes[step.name] = run_step(step, record)
        print(f"{step.name}: {outcomes[step.name]}", flush=True)
    return outcomes


def run_step(step: Step, record: Record) -> State:
    """Run one step in its own process, append its results to the record, and return how it ended."""
    begin, tail = time.monotonic(), ""
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.gpu_day.child", _encode(step, record.rehearsal)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env=_environment(step, record.rehearsal),
    )

    def read_output() -> None:
        nonlocal tail
        assert process.stdout is not None
        for line in process.stdout:
            if (facts := facts_of(line)) is None:
                tail = (tail + line)[-TAIL:]
            else:
                print(f"  {step.name} {line.strip()}", flush=True)
                record.add(step=step.name, source=record.source, **facts)

    reader = threading.Thread(target=read_output)
    reader.start()
    state: State
    try:
        state = "passed" if process.wait(timeout=step.seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        state = "hung"
    # This also kills processes that the step has started and left running.
    _kill_group(process.pid)
    process.wait()
    reader.join()
    assert process.stdout is not None
    process.stdout.close()
    duration = round(time.monotonic() - begin, 1)
    failure = {} if state == "passed" else {"code": process.returncode, "tail": tail}
    if failure:
        print(tail, flush=True)
    record.add(step=step.name, source=record.source, state=state, seconds=duration, **failure)
    return state


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _encode(step: Step, rehearsal: bool) -> str:
    return json.dumps({"function": step.function, "arguments": step.arguments, "rehearsal": rehearsal})


def _environment(step: Step, rehearsal: bool) -> Mapping[str, str]:
    # PyTorch, a baseline, needs memory of the same GPU, so JAX must not preallocate it.
    own = {"PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    host = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} if step.on_cpu or rehearsal else {}
    return {**os.environ, **own, **host}


def read_record(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record, without incomplete ones; an empty list if there is no file."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def source_digest() -> str:
    """Return a digest of the code in `SOURCES`, as 12 hexadecimal digits."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
