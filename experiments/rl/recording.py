"""The recorded routing of the last steps of a run, which become one trace with steps, rewards and versions."""

import typing
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.engines.protocol import UNSAMPLED
from experiments.rl.configs import Train
from experiments.rl.provenance import code
from experiments.rl.rewards import Rewards
from experiments.rl.rollout import Rollout
from experiments.rl.run_folder import UNSAVED_SETTINGS
from experiments.rl.settings import flat, plain_settings, setting_types
from experiments.rl.tasks import Task
from experiments.rl.tokens import Prompt
from relibra_jax.contract.recording import UNKNOWN, Recording
from relibra_jax.contract.replay_files import load_replay, read_recording, save_replay
from relibra_jax.contract.types import RoutingReplay

TRACE: Final = "replay.npz"
"""The name of the trace in the folder of a seed."""
PLACES: Final = (*UNSAVED_SETTINGS, "engine", "requests")
"""The settings of one machine that a trace does not state, apart from those that are paths."""


def record_batch(rollout: Rollout, rewards: Rewards, *, step: int) -> Recording:
    """Return what a step recorded of its samples: prompts, rewards, and the version of each token's weights.

    Args:
        rollout: the responses of the step, with the example of every sample. Samples with equal prompts get the same
            number, wherever they are: with windows, rows of one prompt end and begin apart from each other.
        rewards: their rewards.
        step: the number of the step, which is that of the updates before it.
    """
    numbers: dict[Prompt, int] = {}
    return Recording(
        step=np.full(len(rewards.reward), step),
        prompt=np.array(
            [numbers.setdefault(each.prompt, len(numbers)) for each in rollout.examples], np.int32
        ),
        rewards=np.where(rewards.scored, rewards.reward, np.nan).astype(np.float32),
        versions=np.where(rollout.version == UNSAMPLED, UNKNOWN, rollout.version),
    )


def describe_run(config: Train, seed: int, task: Task | None = None) -> dict[str, Any]:
    """Describe a run for its trace, without places of this machine: the model, the task, the seed and the settings.

    Args:
        config: the settings of the run.
        seed: the seed.
        task: the task, if it is not the one of the settings.
    """
    model, defaults = config.model_config, flat(plain_settings(Train()))
    types = setting_types(Train)
    settings = {
        name: value
        for name, value in flat(plain_settings(config)).items()
        if value != defaults.get(name) and name.partition(".")[0] not in PLACES and not _is_path(types[name])
    }
    return {
        "recorded by": "a training run of relibra_jax, by its setting record",
        "model": config.model_name,
        "sizes": {
            "layers": model.layers,
            "MoE layers": model.moe_layers,
            "experts": model.num_experts,
            "top-k": model.top_k,
            "width": model.width,
            "vocabulary": model.vocabulary,
        },
        "task": config.task_name if task is None else task.name,
        "algorithm": config.algorithm,
        "routes of": config.routing,
        "dtype": config.dtype,
        "rollout dtype": config.rollout_dtype or config.dtype,
        "seed": seed,
        "steps": f"{config.warmup_steps} of warm-up, then {config.steps}",
        "settings other than the defaults": settings,
        "code": code(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def _is_path(hint: Any) -> bool:
    """Return whether values of a type are paths, or have some."""
    return hint is Path or any(map(_is_path, typing.get_args(hint)))


def save_routing(
    folder: Path, step: int, replay: RoutingReplay, recording: Recording, *, num_experts: int
) -> None:
    """Save the routing of one step, for `join_routing`."""
    save_replay(_part(folder, step), replay, num_experts=num_experts, recording=recording)


def join_routing(folder: Path, steps: Sequence[int], about: dict[str, Any]) -> None:
    """Join the recorded routing of several steps into the trace `TRACE`, and delete the parts.

    Args:
        folder: the folder of the seed.
        steps: the steps whose parts may be there.
        about: the provenance of the trace.
    """
    saved_steps = [step for step in steps if _part(folder, step).exists()]
    if saved_steps and not set(saved_steps) <= _joined_steps(folder / TRACE):
        parts = [_part(folder, step) for step in saved_steps]
        replays, num_experts = zip(*map(load_replay, parts), strict=True)
        recordings = [
            read_recording(part, np.asarray(replay.mask)) for part, replay in zip(parts, replays, strict=True)
        ]
        replay = join_replays(replays)
        recording = _join_recordings(recordings, replay.mask.shape[1])._replace(provenance=about)
        save_replay(folder / TRACE, replay, num_experts=num_experts[0], recording=recording)
    for step in saved_steps:
        _part(folder, step).unlink()


def _part(folder: Path, step: int) -> Path:
    return folder / f"routing-{step}.npz"


def _joined_steps(trace: Path) -> set[int]:
    """Return the steps of a trace that is there already: a run that was killed while it deleted parts joined them."""
    if not trace.exists():
        return set()
    replay, _ = load_replay(trace)
    step = read_recording(trace, np.asarray(replay.mask)).step
    return set() if step is None else set(step.tolist())


def _join_recordings(parts: Sequence[Recording], longest: int) -> Recording:
    """Join the recordings of successive parts, whose versions are padded to the longest sample."""
    versions = [None if part.versions is None else _widen(part.versions, longest, UNKNOWN) for part in parts]
    return Recording(
        step=_join([part.step for part in parts]),
        prompt=_join([part.prompt for part in parts]),
        rewards=_join([part.rewards for part in parts]),
        versions=_join(versions),
    )


def _join(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Join arrays; None if a part does not have it, because a run of an earlier version saved it."""
    parts = [array for array in arrays if array is not None]
    return np.concatenate(parts) if len(parts) == len(arrays) else None


def join_replays(replays: Sequence[RoutingReplay]) -> RoutingReplay:
    """Join the samples of several replays into one, padded to the longest.

    >>> short, long = (RoutingReplay(np.ones((2, n, 1, 1), np.uint8), np.ones((2, n), bool)) for n in (3, 5))
    >>> joined = join_replays([short, long])
    >>> joined.expert_ids.shape, joined.mask.sum(1).tolist()
    ((4, 5, 1, 1), [3, 3, 5, 5])
    """
    longest = max(replay.mask.shape[1] for replay in replays)
    return RoutingReplay(
        *(
            np.concatenate([_widen(leaf, longest, 0) for leaf in leaves])
            for leaves in zip(*replays, strict=True)
        )
    )


def _widen(array: np.ndarray, tokens: int, value: int) -> np.ndarray:
    """Pad the second axis to a number of tokens."""
    padding = [(0, 0), (0, tokens - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
    return np.pad(array, padding, constant_values=value)
