"""Jobs in files: a list of JSON objects, whose names are the fields of `relibra_jax.sharing.jobs.Job`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from relibra_jax.limits import INT32_MAX
from relibra_jax.sharing.jobs import Job
from relibra_jax.suggestions import suggest_names

_FIELDS = {field.name: field for field in dataclasses.fields(Job)}
_NEEDED = [name for name, field in _FIELDS.items() if field.default is dataclasses.MISSING]


def read_jobs(path: str | os.PathLike) -> list[Job]:
    """The jobs of a file.

    Args:
        path: the JSON file.

    Raises:
        ValueError: if it is no list of objects, or a field is unknown, missing or out of its range.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "jobs.json"
    >>> _ = path.write_text(
    ...     '[{"name": "a", "rollout_seconds": 60, "training_seconds": 40, "rollout_nodes": 1, "training_nodes": 1}]'
    ... )
    >>> [(job.name, job.alone_seconds) for job in read_jobs(path)]
    [('a', 100.0)]
    """
    try:
        listed = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not a file of JSON ({error})") from None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ValueError(f"{path}: must be a list of jobs, each an object of JSON")
    return [_read_job(f"{path}: job {number}", fields) for number, fields in enumerate(listed)]


def _read_job(place: str, fields: dict[str, Any]) -> Job:
    for name in fields:
        if name not in _FIELDS:
            raise ValueError(f"{place}: unknown field {name!r}{suggest_names(name, _FIELDS)}")
    for name in _NEEDED:
        if name not in fields:
            raise ValueError(f"{place}: {name} is missing")
    values = {
        name: _read_value(f"{place}: {name}", value, _FIELDS[name].type) for name, value in fields.items()
    }
    try:
        return Job(**values)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _read_value(place: str, value: Any, kind: Any) -> Any:
    """A value of a field's type; a whole number may stand for a float."""
    if kind is float and type(value) is int and abs(value) <= INT32_MAX:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{place}={value!r} must be of type {kind.__name__}")
    return value
