"""The ladder: it starts steps in order, each in its own process, which is killed at the step's time limit.

The results that a step prints are appended to the record immediately, so a hang, a crash or the loss of the machine
loses nothing. A step that has passed is not repeated as long as the code is the same. A step is skipped if the steps
that it needs have not passed, or if its time limit exceeds the remaining time. Nothing here waits without a limit: a
process that waits for a driver may outlive SIGKILL. This module uses only the standard library, so it works even if JAX
does not.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from experiments.ladder.facts import facts_of
from experiments.ladder.record import Record

type State = Literal["passed", "failed", "hung"]
"""The end of a step: with exit status 0, with another exit status, or killed at its time limit."""

TAIL: Final = 1500
"""The number of characters of a failed step's output that are kept."""
AFTER_HANG: Final = 30
"""The largest time limit in seconds of the steps that start after a step has hung, if hangs are diagnosed."""
END_SECONDS: Final = 10
"""The time in seconds for which the ladder waits for a killed process, and for the rest of a process's output."""


class Step(NamedTuple):
    """One step of the ladder."""

    name: str
    function: str
    """The function that the process calls with ``arguments``, as ``module:function``. It gets ``rehearsal=True`` in a
    rehearsal."""
    arguments: tuple[Any, ...] = ()
    """The arguments of the function, which JSON can hold."""
    seconds: int = 120
    """The time limit in seconds, after which the process is killed."""
    needs: tuple[str, ...] = ()
    """The names of the steps that must have passed before."""
    on_cpu: bool = False
    """Whether the step uses only the CPU."""
    file: str | None = None
    """The path of the file that the step writes for others. Without the file, the step counts as not passed."""


def run_ladder(
    steps: Sequence[Step],
    record: Record,
    *,
    seconds: float,
    workers: int = 1,
    echo: bool = True,
    diagnose: Callable[[Step], Sequence[Step]] | None = None,
) -> dict[str, str]:
    """Run the steps that have not passed yet.

    Args:
        steps: the steps, in order.
        record: the record of results.
        seconds: the time limit for all steps, in seconds. A step whose own limit exceeds the remaining time is skipped.
        workers: the number of steps that run at the same time. A step waits for those that it needs.
        echo: whether to print the results of steps too, and not only how they end.
        diagnose: a function from the first step that hangs, of those on the GPU, to further steps, which run at once
            and find out why it hung. From then on, no other step that starts has more than `AFTER_HANG` seconds. None
            if hangs are not diagnosed.

    Returns:
        The outcome of each step, as text: "passed", "failed", "hung", "passed before", or the reason why it was
        skipped. It does not contain the steps of a diagnosis, which the record has.
    """
    deadline, running, first_hang = time.monotonic() + seconds, set[int](), threading.Lock()

    def attempt(step: Step) -> str:
        remaining = deadline - time.monotonic()
        if remaining < step.seconds:
            outcome: str = f"skipped: its limit is {step.seconds} s, but only {remaining:.0f} s remain"
        else:
            outcome = run_step(step, record, running, echo=echo)
        print(f"{step.name}: {outcome}", flush=True)
        return outcome

    def run(step: Step) -> str:
        for name in step.needs:
            if name in futures:  # an earlier step, so that a worker has it already
                futures[name].result()
        passed = record.passed() - {each.name for each in steps if each.file and not Path(each.file).exists()}
        missing = [name for name in step.needs if name not in passed]
        if step.name in passed or missing:
            outcome = f"skipped: {', '.join(missing)} must pass first" if missing else "passed before"
            print(f"{step.name}: {outcome}", flush=True)
            return outcome
        limit = min(step.seconds, AFTER_HANG) if first_hang.locked() else step.seconds
        outcome = attempt(step._replace(seconds=limit))
        hung_on_gpu = outcome == "hung" and not step.on_cpu
        if hung_on_gpu and diagnose is not None and first_hang.acquire(blocking=False):
            for further in diagnose(step):
                attempt(further)
        return outcome

    futures: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(workers) as pool:
        for step in steps:
            futures[step.name] = pool.submit(run, step)
        try:
            return {name: future.result() for name, future in futures.items()}
        except BaseException:  # Ctrl-C: no process outlives the ladder
            deadline = time.monotonic()  # a diagnosis starts no further step
            pool.shutdown(wait=False, cancel_futures=True)
            for group in list(running):
                _kill_group(group)
            raise


def run_step(step: Step, record: Record, running: set[int], *, echo: bool = True) -> State:
    """Run one step in its own process, append its results to the record, and return how it ended.

    Args:
        step: the step.
        record: the record of results.
        running: the process groups that run, to which the one of the step is added until it ends.
        echo: whether to print the results of the step.
    """
    begin, tail = time.monotonic(), ""
    process = subprocess.Popen(
        child_command(step.function, step.arguments, rehearsal=record.rehearsal),
        stdin=subprocess.PIPE,  # never written to: the process ends when the ladder does, and closes it
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env=_environment(step, record.rehearsal),
    )

    running.add(process.pid)

    def read_output() -> None:
        nonlocal tail
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                if (facts := facts_of(line)) is None:
                    tail = (tail + line)[-TAIL:]
                else:
                    if echo:
                        print(f"  {step.name} {line.strip()}", flush=True)
                    record.add(step=step.name, source=record.source, **facts)
        process.wait()

    # Only this thread waits without a limit, and nobody waits for it.
    reader = threading.Thread(target=read_output, daemon=True)
    reader.start()
    state: State
    try:
        state = "passed" if process.wait(timeout=step.seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        state = "hung"
    # This also kills processes that the step has started and left running.
    _kill_group(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    running.discard(process.pid)
    reader.join(END_SECONDS)
    assert process.stdin is not None
    process.stdin.close()
    duration = round(time.monotonic() - begin, 1)
    # The exit status is None if the process outlived SIGKILL.
    failure = {} if state == "passed" else {"code": process.returncode, "tail": tail}
    if failure:
        print(tail, flush=True)
    record.add(step=step.name, source=record.source, state=state, seconds=duration, **failure)
    return state


def child_command(function: str, arguments: Sequence[Any], *, rehearsal: bool) -> list[str]:
    """Return the command of a process that calls a step's function, and that ends when its standard input closes."""
    call = {"function": function, "arguments": arguments, "rehearsal": rehearsal}
    return [sys.executable, "-m", "experiments.ladder.child", json.dumps(call)]


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _environment(step: Step, rehearsal: bool) -> Mapping[str, str]:
    # PyTorch, a baseline, needs memory of the same GPU, so JAX must not preallocate it.
    own = {"PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    host = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} if step.on_cpu or rehearsal else {}
    return {**os.environ, **own, **host}
