"""Jobs from files, and jobs drawn at random for comparisons of schedulers.

A file has a JSON list of objects, whose keys are the fields of `experiments.multiplex.jobs.Job`. The distributions of
drawn jobs are assumed; no cluster ran them.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.multiplex.jobs import Job
from relibra_jax.support.json_text import parse_json
from relibra_jax.support.limits import INT32_MAX, check_integer, check_seed
from relibra_jax.support.suggestions import suggest_names

_FIELDS = {field.name: field for field in dataclasses.fields(Job)}
_REQUIRED = [name for name, field in _FIELDS.items() if field.default is dataclasses.MISSING]

STEP_SECONDS: Final = (120.0, 900.0)
"""The range of the seconds of a step on separate pools, drawn log-uniformly."""
ROLLOUT_SHARE: Final = (0.4, 0.8)
"""The range of the rollout's share of a step, drawn uniformly. Rollouts of reasoning models are most of a step."""
TAIL_SHARE: Final = (0.2, 0.6)
"""The range of the share of a rollout that waits for its longest responses, drawn uniformly."""
SLO: Final = (1.0, 2.0)
"""The range of the objective, drawn uniformly."""
SIZES: Final = ((7, 1, 1), (14, 1, 2), (32, 2, 4))
"""The sizes of jobs, equally likely: billions of parameters, rollout nodes, and training nodes, of 8 devices each."""
ENGINE_BYTES, TRAINER_BYTES = 2, 12
"""Bytes per parameter. Every rollout node holds bfloat16 weights. The training nodes share float32 weights and two
float32 moments of Adam, which is what `experiments.multiplex.park` measures of a run; bfloat16 weights and gradients
are made anew."""


def read_jobs(path: str | os.PathLike) -> list[Job]:
    """Read the jobs of a file.

    Args:
        path: the path of the JSON file.

    Raises:
        ValueError: if the file is not a JSON list of objects, or a field of a job is unknown, missing, of a different
            type or out of its range.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "jobs.json"
    >>> _ = path.write_text(
    ...     '[{"name": "a", "rollout_seconds": 60, "training_seconds": 40, "rollout_nodes": 1, "training_nodes": 1}]'
    ... )
    >>> [(job.name, job.alone_seconds) for job in read_jobs(path)]
    [('a', 100.0)]
    """
    try:
        jobs = parse_json(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file ({error})") from None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise ValueError(f"{path} must contain a JSON list of jobs, each a JSON object")
    return [_read_job(f"{path}: job {number}", fields) for number, fields in enumerate(jobs)]


def draw_jobs(count: int, *, seed: int) -> list[Job]:
    """Draw jobs from the assumed distributions, named ``drawn-0`` and so on.

    Args:
        count: the number of jobs.
        seed: the seed of the draw.

    Raises:
        ValueError: if ``count`` is less than 1, or ``seed`` is out of its range.

    >>> [job.name for job in draw_jobs(2, seed=0)]
    ['drawn-0', 'drawn-1']
    """
    check_integer("count", count, least=1)
    check_seed("seed", seed)
    rng = np.random.default_rng(seed)
    return [_draw_job(f"drawn-{number}", rng) for number in range(count)]


def _read_job(place: str, fields: dict[str, Any]) -> Job:
    for name in fields:
        if name not in _FIELDS:
            raise ValueError(f"{place}: unknown field {name!r}{suggest_names(name, _FIELDS)}")
    for name in _REQUIRED:
        if name not in fields:
            raise ValueError(f"{place}: required field {name!r} is missing")
    values = {
        name: _read_value(f"{place}: {name}", value, _FIELDS[name].type) for name, value in fields.items()
    }
    try:
        return Job(**values)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _read_value(place: str, value: Any, kind: Any) -> Any:
    """Return the value of a field if it has the field's type. An integer is accepted for a float and converted."""
    if kind is float and type(value) is int and abs(value) <= INT32_MAX:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{place}={value!r} must be of type {kind.__name__}")
    return value


def _draw_job(name: str, rng: np.random.Generator) -> Job:
    seconds = float(np.exp(rng.uniform(*np.log(STEP_SECONDS))))
    share = rng.uniform(*ROLLOUT_SHARE)
    billions, rollout_nodes, training_nodes = SIZES[rng.integers(len(SIZES))]
    return Job(
        name=name,
        rollout_seconds=seconds * share,
        training_seconds=seconds * (1 - share),
        rollout_nodes=rollout_nodes,
        training_nodes=training_nodes,
        tail_share=rng.uniform(*TAIL_SHARE),
        slo=rng.uniform(*SLO),
        rollout_bytes=billions * 10**9 * ENGINE_BYTES,
        training_bytes=billions * 10**9 * TRAINER_BYTES // training_nodes,
    )
