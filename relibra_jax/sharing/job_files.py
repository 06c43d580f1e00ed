"""Jobs in files: a list of JSON objects, whose names are the fields of `relibra_jax.sharing.jobs.Job`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

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
    [('a', 100)]
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
    for name, value in fields.items():
        kinds = str if _FIELDS[name].type is str else int | float
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{place}: {name}={value!r} must be a {'text' if kinds is str else 'number'}")
    try:
        return Job(**fields)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
