"""The ladder: steps run one after the other, each in a process of its own that is killed when its time is over.

Whatever a step says is appended to the record as it comes, so that a hang, a crash or the end of a lease loses nothing.
A step that has passed is not run again as long as the code is the same; a step is not begun before those that it needs
have passed, nor if its time would not fit into what is left. This module needs nothing but the standard library, so
that it works where JAX does not.
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
"""How a step ended: by itself with exit status 0, by itself with another, or killed when its time was over."""

SOURCES: Final = ("pallas_kernels", "experiments/gpu_day")
"""The folders whose code decides what a step finds."""
TAIL: Final = 1500
"""Characters of a failed step's output that are kept."""


class Step(NamedTuple):
    """One step of the ladder."""

    name: str
    function: str
    """What the process runs, as ``module:function``, called with ``arguments`` and ``rehearsal=``."""
    arguments: tuple[Any, ...] = ()
    """Numbers and strings."""
    seconds: int = 120
    """The time after which the process is killed."""
    needs: tuple[str, ...] = ()
    """The names of the steps that must have passed before."""
    on_cpu: bool = False
    """Whether the step is one for the CPU, which leaves the GPU alone."""


class Record:
    """The lines of all steps, in a file that only grows.

    Args:
        path: the file, JSON lines; it may be there from an earlier command.
        rehearsal: whether the steps run at small sizes without a GPU. What was rehearsed does not count as passed.
    """

    def __init__(self, path: Path, *, rehearsal: bool = False):
        self.path, self.rehearsal, self.source = path, rehearsal, source_digest()

    def add(self, **facts: Any) -> None:
        """Append one line, and have it on the disk before anything else happens."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            # What a kill has cut off ends without a line break.
            start = "" if not file.tell() or self.path.read_bytes().endswith(b"\n") else "\n"
            file.write(start + json.dumps({"rehearsal": self.rehearsal, **facts}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def passed(self) -> set[str]:
        """The steps that have passed with this code, in a rehearsal if this is one, and not failed since."""
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
        record: where they are kept.
        seconds: the time for all of them. A step whose own time is longer than what is left is not begun.

    Returns:
        What became of each step, in words: "passed", "failed", "hung", "passed before", or why it was not begun.
    """
    deadline, told = time.monotonic() + seconds, {}
    for step in steps:
        passed, left = record.passed(), deadline - time.monotonic()
        missing = [name for name in step.needs if name not in passed]
        if step.name in passed:
            told[step.name] = "passed before"
        elif missing:
            told[step.name] = f"not begun: needs {', '.join(missing)}"
        elif left < step.seconds:
            told[step.name] = f"not begun: may take {step.seconds} s, {left:.0f} s are left"
        else:
            told[step.name] = run_step(step, record)
        print(f"{step.name}: {told[step.name]}", flush=True)
    return told


def run_step(step: Step, record: Record) -> State:
    """Run one step in a process of its own, and keep what it says."""
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

    def listen() -> None:
        nonlocal tail
        assert process.stdout is not None
        for line in process.stdout:
            if (facts := facts_of(line)) is None:
                tail = (tail + line)[-TAIL:]
            else:
                print(f"  {step.name} {line.strip()}", flush=True)
                record.add(step=step.name, source=record.source, **facts)

    listener = threading.Thread(target=listen)
    listener.start()
    state: State
    try:
        state = "passed" if process.wait(timeout=step.seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        state = "hung"
    # Also what a step has started itself, and has not ended.
    _kill_group(process.pid)
    process.wait()
    listener.join()
    assert process.stdout is not None
    process.stdout.close()
    took = round(time.monotonic() - begin, 1)
    said = {} if state == "passed" else {"code": process.returncode, "tail": tail}
    if said:
        print(tail, flush=True)
    record.add(step=step.name, source=record.source, state=state, seconds=took, **said)
    return state


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _encode(step: Step, rehearsal: bool) -> str:
    return json.dumps({"function": step.function, "arguments": step.arguments, "rehearsal": rehearsal})


def _environment(step: Step, rehearsal: bool) -> Mapping[str, str]:
    # PyTorch, as a peer, wants memory of the same GPU.
    own = {"PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    host = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} if step.on_cpu or rehearsal else {}
    return {**os.environ, **own, **host}


def read_record(path: Path) -> list[dict[str, Any]]:
    """The lines of a record, none if there is no file; a line that a kill has cut off is left out."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def source_digest() -> str:
    """Twelve digits that change with the code of `SOURCES`."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
