"""Jobs from files: a JSON list of objects, whose keys are the fields of `experiments.multiplex.jobs.Job`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from experiments.multiplex.jobs import Job
from relibra_jax.support.limits import INT32_MAX
from relibra_jax.support.suggestions import suggest_names

_FIELDS = {field.name: field for field in dataclasses.fields(Job)}
_REQUIRED = [name for name, field in _FIELDS.items() if field.default is dataclasses.MISSING]


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
        jobs = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file ({error})") from None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise ValueError(f"{path} must contain a JSON list of jobs, each a JSON object")
    return [_read_job(f"{path}: job {number}", fields) for number, fields in enumerate(jobs)]


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
