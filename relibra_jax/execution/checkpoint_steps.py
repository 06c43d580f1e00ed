"""Reading of checkpoint steps, so that either all processes succeed or all of them raise.

With Orbax's manager every process waits for the others after it has read its part. If one of them fails, the others
wait forever. Here each process reads independently, and then the processes tell each other whether they failed.
"""

import asyncio
import contextlib
import gc
import re
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import orbax.checkpoint as ocp  # type: ignore[import-untyped]

from relibra_jax.execution.checkpoint_layout import CheckpointLayout, parse_layout
from relibra_jax.execution.plan_agreement import processes_where

LONGEST_REASON: Final = 160
"""The number of characters of a library's error message that our message quotes. A note has the whole text."""
PATIENCE: Final = 30.0
"""The seconds after which the event loop of a failed read stops waiting if no other read has ended."""
_PATCH_LOCK: Final = threading.RLock()


def find_step(manager: ocp.CheckpointManager, step: int | None) -> int:
    """Return ``step`` if a checkpoint of it exists, or the latest step if it is None.

    Raises:
        ValueError: if there is no checkpoint, or none of this step.
    """
    steps = sorted(manager.all_steps())
    if not steps:
        raise ValueError(f"no checkpoint in {manager.directory}")
    if step is not None and step not in steps:
        raise ValueError(f"no checkpoint of step {step} in {manager.directory}, which has the steps {steps}")
    return steps[-1] if step is None else step


def read_layout(manager: ocp.CheckpointManager, step: int, *, verify: bool) -> CheckpointLayout:
    """Read the layout of a step. Every process must call it.

    Args:
        manager: the Orbax checkpoint manager of the directory.
        step: the number of an existing step.
        verify: whether to compare the layout with its SHA-256.

    Raises:
        ValueError: if a process cannot read the layout, or it has changed since it was saved. All processes raise.
    """
    return _read_together(
        manager, step, lambda: _read_layout(manager, step, verify=verify), lambda _: "the layout"
    )


def read_state(manager: ocp.CheckpointManager, step: int, arrays: dict[str, Any]) -> dict[str, Any]:
    """Read the arrays of a step by name; each process reads its own shards. Every process must call it.

    Args:
        manager: the Orbax checkpoint manager of the directory.
        step: the number of an existing step.
        arrays: the form of each array on disk, by name: a NumPy array, or a `jax.ShapeDtypeStruct` with its sharding.

    Raises:
        ValueError: if a process cannot read an array. All processes raise.
    """
    restore = ocp.args.StandardRestore(arrays)
    return _read_together(
        manager,
        step,
        lambda: _read_item(manager, step, "state", restore),
        lambda text: next((f"array {name!r}" for name in arrays if _names_array(text, name)), "the state"),
    )


def raise_together(
    manager: ocp.CheckpointManager, step: int, problem: str | None, details: str | None = None
) -> None:
    """Raise on every process if any process has a problem with a step. Every process must call it.

    Args:
        manager: the Orbax checkpoint manager of the directory.
        step: the step number of the checkpoint.
        problem: the problem on this process, for the message. None if there is none.
        details: a note that is added to the error. None for no note.

    Raises:
        ValueError: if a process has a problem. The message has the step and the newest earlier step with a valid
            layout, if there is one. The arrays of that step have not been checked.
    """
    failed = processes_where(problem is not None)
    if not failed.size:
        return
    problem = problem or f"process {failed[0]} cannot restore it"
    earlier = _newest_before(manager, step)
    remedy = (
        "no earlier step has a valid layout"
        if earlier is None
        else f"to try step {earlier}, the newest before it, move {_folder(manager, step)} away"
    )
    error = ValueError(f"step {step} in {manager.directory}: {problem}; {remedy}")
    if details is not None:
        error.add_note(details)
    raise error


def _read_together[T](
    manager: ocp.CheckpointManager, step: int, read: Callable[[], T], item_name: Callable[[str], str]
) -> T:
    """Return the result of ``read``, or raise on every process if it fails on any of them.

    ``item_name`` takes the text of an error, and returns the name of the item that could not be read.
    """
    items: list[T] = []
    problem, details = None, None
    try:
        with _finish_reads():
            items.append(read())
    # JSON, Orbax and TensorStore raise many types: OSError, KeyError, ValueError, bare Exception.
    except Exception as error:
        details = f"{error}\n{_root(error)}"
        problem = f"{item_name(details)} cannot be read: {_reason(_root(error))}"
    if problem is not None:
        # The exception has been released. Reads that never started would warn when they are collected.
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            gc.collect()
    raise_together(manager, step, problem, details)
    return items[0]


def _root(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _root(error.__cause__)


def _reason(error: BaseException) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return textwrap.shorten(f"{kind}{error}", LONGEST_REASON, placeholder=" ...").rstrip(".")


def _read_layout(manager: ocp.CheckpointManager, step: int, *, verify: bool) -> CheckpointLayout:
    return parse_layout(_read_item(manager, step, "layout", ocp.args.JsonRestore()), verify=verify)


def _read_item(manager: ocp.CheckpointManager, step: int, item: str, args: Any) -> Any:
    """Read one item of a step on this process, without waiting for other processes."""
    process = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=options) as reader:
        return reader.restore(_folder(manager, step), args=ocp.args.Composite(**{item: args}))[item]


def _folder(manager: ocp.CheckpointManager, step: int) -> Any:
    """Return the folder of a step, whose name may have a prefix and padding that the manager's options define."""
    step_of = ocp.path.step.step_from_checkpoint_name
    folders = ocp.path.step.checkpoint_steps_paths(manager.directory)
    return next((folder for folder in folders if step_of(folder.name) == step), manager.directory / str(step))


def _newest_before(manager: ocp.CheckpointManager, step: int) -> int | None:
    """Return the newest step before ``step`` whose layout this process can read and verify; None if there is none."""
    for earlier in sorted((other for other in manager.all_steps() if other < step), reverse=True):
        try:
            _read_layout(manager, earlier, verify=True)
        except Exception:
            continue
        return earlier
    return None


def _names_array(text: str, name: str) -> bool:
    """Return whether TensorStore's error text has a file of an array: ``"name/.zarray"``, ``'path': 'name/'``."""
    return re.search(rf"""["']{re.escape(name)}/""", text) is not None


@contextlib.contextmanager
def _finish_reads() -> Iterator[None]:
    """Make every event loop created in this context wait for all of its tasks, even if one of them fails.

    Orbax (0.12) starts all reads of a restore at once. When one fails, it raises its error and closes the event loop.
    The other reads end later on TensorStore's threads, without an event loop, and each prints a useless traceback. A
    lock admits one thread at a time, so that each thread restores the original `asyncio.new_event_loop`.
    """
    with _PATCH_LOCK:
        new_event_loop = asyncio.new_event_loop
        asyncio.new_event_loop = _WaitingEventLoop
        try:
            yield
        finally:
            asyncio.new_event_loop = new_event_loop


class _WaitingEventLoop(asyncio.SelectorEventLoop):
    def run_until_complete(self, future: Any) -> Any:
        try:
            return super().run_until_complete(future)
        except Exception:
            tasks = asyncio.all_tasks(self)
            while tasks:
                ended, _ = super().run_until_complete(asyncio.wait(tasks, timeout=PATIENCE))
                # The last tasks may have started new ones.
                tasks = asyncio.all_tasks(self) if ended else set()
            raise
