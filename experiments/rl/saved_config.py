"""The settings that a run has saved, for resuming it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from experiments.rl.algorithms import Critic
from experiments.rl.configs import Train
from experiments.rl.dapo import Dapo
from experiments.rl.planner_settings import Reorder, Replicate
from experiments.rl.step import Clip
from relibra_jax.evaluation import Ranks


def saved_config(folder: Path) -> Train:
    """Read the settings with which the run in a folder was last started.

    Args:
        folder: the folder of the run.

    Returns:
        The settings.

    Raises:
        ValueError: if the folder contains no run, or its settings cannot be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no run to resume, because there is no config.json")
    try:
        saved = json.loads(path.read_text())
        _check_types(saved, json.loads(json.dumps(dataclasses.asdict(Train()), default=str)))
        kinds = {
            "ranks": Ranks,
            "clip": Clip,
            "reorder": Reorder,
            "replicate": Replicate,
            "critic": Critic,
            "dapo": Dapo,
        }
        parts = {name: kind(**saved[name]) for name, kind in kinds.items()}
        model = None if saved.get("model") is None else Path(saved["model"])
        return Train(**{**saved, **parts, "seeds": tuple(saved["seeds"]), "model": model})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the settings of a run ({error!r})") from error


def _check_types(saved: Any, default: Any, name: str = "settings") -> None:
    """Raise ValueError unless saved JSON has the types of the default settings.

    Where the default is None, the saved setting may be None, a text or a number.
    """
    types = {float: (int, float), type(None): (str, int, float, type(None))}.get(
        type(default), (type(default),)
    )
    if type(saved) not in types:
        raise ValueError(f"{name}={saved!r} must be of type {type(default).__name__}, like {default!r}")
    if isinstance(default, list):
        for element in saved:
            _check_types(element, default[0], name)
    if isinstance(default, dict):
        for key in saved.keys() & default.keys():
            _check_types(saved[key], default[key], key)
