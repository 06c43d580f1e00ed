"""The steps of a checkpoint directory, read so that on several processes all go on or all raise.

Orbax's manager lets the processes wait for one another when each has read its part: where one of them fails, the
others wait for ever. Here each process reads on its own, and then they compare notes.
"""

import re
import textwrap
from collections.abc import Callable
from typing import Any, Final

import jax
import orbax.checkpoint as ocp  # type: ignore[import-untyped]

from relibra_jax.execution.checkpoint_layout import Layout, parse_layout
from relibra_jax.execution.dropped_reads import collect_reads, reads_to_the_end
from relibra_jax.execution.plan_agreement import processes_where

LONGEST_REASON: Final = 160
"""So many characters of what a library says are part of an error's line; a note to the error has them all."""


def find_step(manager: ocp.CheckpointManager, step: int | None) -> int:
    """``step``, or the latest one when None.

    Raises:
        ValueError: if there is no such step.
    """
    steps = sorted(manager.all_steps())
    if not steps:
        raise ValueError(f"no checkpoint in {manager.directory}")
    if step is not None and step not in steps:
        raise ValueError(f"no checkpoint of step {step} in {manager.directory}, which has {steps}")
    return steps[-1] if step is None else step


def read_layout(manager: ocp.CheckpointManager, step: int, *, verify: bool) -> Layout:
    """The layout of a step. All processes call it.

    Args:
        manager: the Orbax manager of the directory.
        step: a step that is there.
        verify: whether to compare the layout with its SHA-256.

    Raises:
        ValueError: if it cannot be read, or is not what was saved, as `raise_together` says.
    """
    return _together(
        manager, step, lambda: _read_layout(manager, step, verify=verify), lambda _: "the layout"
    )


def read_state(manager: ocp.CheckpointManager, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a step by their names; each process reads what it will hold. All processes call it.

    Args:
        manager: the Orbax manager of the directory.
        step: a step that is there.
        wanted: the form of each array on disk: a NumPy array, or a `jax.ShapeDtypeStruct` with its sharding.

    Raises:
        ValueError: if one of them cannot be read, as `raise_together` says.
    """
    restore = ocp.args.StandardRestore(wanted)
    return _together(
        manager,
        step,
        lambda: _read_item(manager, step, "state", restore),
        lambda said: next((f"array {name!r}" for name in wanted if _is_about(said, name)), "the state"),
    )


def raise_together(
    manager: ocp.CheckpointManager, step: int, problem: str | None, details: str | None = None
) -> None:
    """Raise on every process if a step has a problem on any of them. All processes call it.

    Args:
        manager: the Orbax manager of the directory.
        step: the step that is restored.
        problem: what is wrong with it on this process; None if nothing is.
        details: a note to the error.

    Raises:
        ValueError: if there is a problem; in one line that names the step and, if there is one, the newest one before
            it whose layout is sound; whether its arrays are is seen when it is restored.
    """
    failed = processes_where(problem is not None)
    if not failed.size:
        return
    problem = problem or f"process {failed[0]} cannot restore it"
    earlier = _newest_before(manager, step)
    way = (
        "there is no sound one before it"
        if earlier is None
        else f"to try step {earlier}, the newest before it, move {_folder(manager, step)} away"
    )
    error = ValueError(f"step {step} in {manager.directory}: {problem}; {way}")
    if details is not None:
        error.add_note(details)
    raise error


def _together[T](
    manager: ocp.CheckpointManager, step: int, read: Callable[[], T], what: Callable[[str], str]
) -> T:
    """What ``read`` gives, if it gives it on every process; ``what`` says of an error's text what could not be read."""
    items: list[T] = []
    problem, details = None, None
    try:
        with reads_to_the_end():
            items.append(read())
    # JSON, Orbax and TensorStore raise whatever they like: OSError, KeyError, ValueError, bare Exception.
    except Exception as error:
        details = f"{error}\n{_root(error)}"
        problem = f"{what(details)} cannot be read: {_reason(_root(error))}"
    if problem is not None:
        collect_reads()
    raise_together(manager, step, problem, details)
    return items[0]


def _root(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _root(error.__cause__)


def _reason(error: BaseException) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return textwrap.shorten(f"{kind}{error}", LONGEST_REASON, placeholder=" ...").rstrip(".")


def _read_layout(manager: ocp.CheckpointManager, step: int, *, verify: bool) -> Layout:
    return parse_layout(_read_item(manager, step, "layout", ocp.args.JsonRestore()), verify=verify)


def _read_item(manager: ocp.CheckpointManager, step: int, item: str, args: Any) -> Any:
    """One item of a step, as this process alone reads it."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone) as reader:
        return reader.restore(_folder(manager, step), args=ocp.args.Composite(**{item: args}))[item]


def _folder(manager: ocp.CheckpointManager, step: int) -> Any:
    """The folder of a step, with whatever prefix or padding the manager gives its name."""
    named = ocp.path.step.step_from_checkpoint_name
    folders = ocp.path.step.checkpoint_steps_paths(manager.directory)
    return next((folder for folder in folders if named(folder.name) == step), manager.directory / str(step))


def _newest_before(manager: ocp.CheckpointManager, step: int) -> int | None:
    """The newest step before ``step`` whose layout is sound, on this process."""
    for earlier in sorted((other for other in manager.all_steps() if other < step), reverse=True):
        try:
            _read_layout(manager, earlier, verify=True)
        except Exception:
            continue
        return earlier
    return None


def _is_about(said: str, name: str) -> bool:
    """Whether TensorStore's text speaks of a file of an array: ``"name/.zarray"``, ``'path': 'name/'``."""
    return re.search(rf"""["']{re.escape(name)}/""", said) is not None
