"""Recorded routing as the commands read it: a trace file, and the one that comes with the package."""

import os
from importlib import resources
from pathlib import Path
from typing import Final, NamedTuple

from relibra_jax.limits import check_memory
from relibra_jax.replay_files import load_replay, stored_num_experts
from relibra_jax.types import RoutingReplay

RECORDED: Final = resources.files("relibra_jax") / "data" / "recorded_trace.npz"
"""The routing of two rollouts of a tiny policy, saved by ``python -m experiments.run learn --record 2``."""


class Trace(NamedTuple):
    """Routing replay and what is known of where it came from."""

    replay: RoutingReplay
    """The experts that every token used."""
    num_experts: int
    """The logical experts of a layer."""
    name: str
    """The trace's name in tables and figures."""
    note: str
    """What a reader has to know to judge the numbers; empty for nothing."""


def read_trace(path: Path | None) -> Trace:
    """Read a trace file.

    Args:
        path: a file that `relibra_jax.replay_files.load_replay` accepts; None stands for the file that the environment
            variable RELIBRA_TRACE names, else for the recorded trace that comes with the package.

    Returns:
        The trace, which notes whether its number of experts is stated in the file.

    Raises:
        ValueError: if the file is missing, truncated or malformed, or its load does not fit this machine's memory.
    """
    named = path or os.environ.get("RELIBRA_TRACE")
    if named:
        return _read(Path(named))
    with resources.as_file(RECORDED) as recorded:
        return _read(recorded)


def _read(path: Path) -> Trace:
    if not path.is_file():
        raise ValueError(f"{path}: {'not a file' if path.exists() else 'no such trace'}")
    replay, num_experts = load_replay(path)
    samples, tokens, layers, top_k = replay.expert_ids.shape
    # Ids are counted as int32, into int32.
    counting = f"counting {samples} samples x {layers} layers x ({tokens} tokens x top-{top_k} + {num_experts} experts)"
    check_memory(f"{path}: {counting}", 4 * samples * layers * (tokens * top_k + num_experts))
    note = "" if stored_num_experts(path) else f"num_experts={num_experts} inferred: the largest id + 1"
    return Trace(replay, num_experts, path.name, note)
