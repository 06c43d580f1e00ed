"""Reading of traces by name or from a file, and the recorded trace that comes with the package."""

import functools
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np

from relibra_jax.contract.replay_files import (
    load_replay,
    read_labels,
    read_recording,
    read_token_ids,
    stored_num_experts,
)
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_memory
from relibra_jax.support.suggestions import suggest_names
from relibra_jax.traces.calibrated import SYNTHETIC, Synthetic, draw_trace
from relibra_jax.traces.drawn_steps import draw_steps
from relibra_jax.traces.imbalance_benchmark import WORKLOADS, imbalance_benchmark
from relibra_jax.traces.trace import Trace, make_trace

RECORDED: Final = resources.files("relibra_jax") / "data" / "recorded_trace.npz"
"""The routing of two rollouts of a tiny policy, saved by ``python -m experiments.run learn --record 2``."""


def _recorded() -> Trace:
    with resources.as_file(RECORDED) as recorded:
        return _read(recorded)


def _synthetic(size: Synthetic) -> Trace:
    return draw_trace(size.calibration, num_experts=size.num_experts, top_k=size.top_k)


NAMED_TRACES: Final[dict[str, Callable[[], Trace]]] = {
    "recorded": _recorded,
    **{name: functools.partial(imbalance_benchmark, name) for name in WORKLOADS},
    **{name: functools.partial(_synthetic, size) for name, size in SYNTHETIC.items()},
    "synthetic-128-steps": functools.partial(draw_steps, SYNTHETIC["synthetic-128"]),
}
"""Functions that read or draw the named traces, by name."""


@checks_arguments
def read_trace(name: str | Path | None) -> Trace:
    """Read a trace by its name or from a file.

    Args:
        name: a name of `NAMED_TRACES`, or the path of a file that `relibra_jax.contract.replay_files.load_replay`
            accepts. A `Path` is always a path. None for the value of the environment variable RELIBRA_TRACE, or, if it
            is not set, for the recorded trace that comes with the package.

    Returns:
        The trace. Its note says if the number of experts was inferred. Its domains are the strings ``category [B]`` of
        the file, or else ``dataset [B]``. Its token ids are the integers ``token_ids [tokens]`` of the file, if any.
        Its recording is as `relibra_jax.contract.recording.recording_from_arrays` reads it.

    Raises:
        ValueError: if there is no such trace; the message suggests similar names. Also if the file is truncated or
            malformed, or if its load does not fit into the memory of this machine.

    >>> read_trace("recorded").num_experts
    16
    >>> read_trace("recordings")
    Traceback (most recent call last):
    ValueError: recordings: no such trace, neither a file nor one of recorded...; did you mean recorded?
    """
    name = name or os.environ.get("RELIBRA_TRACE") or "recorded"
    if isinstance(name, str) and name in NAMED_TRACES:
        return NAMED_TRACES[name]()
    return _read(Path(name))


def _read(path: Path) -> Trace:
    if not path.is_file():
        raise ValueError(f"{path}: {'not a file' if path.exists() else _no_such_trace(path)}")
    replay, num_experts = load_replay(path)
    samples, tokens, layers, top_k = replay.expert_ids.shape
    # Counting casts the ids to int32, and the counts are int32.
    counting = f"counting {samples} samples x {layers} layers x ({tokens} tokens x top-{top_k} + {num_experts} experts)"
    check_memory(f"{path}: {counting}", 4 * samples * layers * (tokens * top_k + num_experts))
    note = "" if stored_num_experts(path) else f"num_experts={num_experts} inferred: the largest id + 1"
    labels = read_labels(path, ("category", "dataset"), samples=samples)
    return make_trace(
        replay,
        num_experts,
        path.name,
        note,
        category=next(iter(labels.values()), None),
        token_ids=read_token_ids(path, np.asarray(replay.mask)),
        recording=read_recording(path, np.asarray(replay.mask)),
    )


def _no_such_trace(path: Path) -> str:
    # A path with a folder or a suffix is certainly meant as a file.
    if path.suffix or len(path.parts) > 1:
        return "no such trace"
    names = ", ".join(NAMED_TRACES)
    return f"no such trace, neither a file nor one of {names}{suggest_names(path.name, NAMED_TRACES)}"
