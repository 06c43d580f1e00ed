"""The folder of a run, and its settings, for resuming it."""

import json
from datetime import datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from experiments.rl.configs import Train
from experiments.rl.processes import is_first, on_any, process_count, text_from_first
from experiments.rl.settings import flat, make_settings, plain_settings
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.json_text import parse_json

SETTINGS_FILE: Final = "config.json"
"""The file of settings in the folder of a run."""
UNSAVED_SETTINGS: Final = ("out", "resume", "verify", "profile")
"""The settings that apply to one start of a run and are not saved for the next."""


def run_folder(config: Train, name: str) -> Path:
    """Choose the folder of a run, and check that all processes see it.

    Args:
        config: the settings of the run.
        name: the name or file of the configuration.

    Raises:
        ValueError: if the folder contains a run already, or a process does not see it.
    """
    folder = _new_folder(config, name) if is_first() else Path()
    if process_count() > 1:
        if is_first():
            folder.mkdir(parents=True, exist_ok=True)
        folder = Path(text_from_first(str(folder)))
        if on_any(not folder.is_dir()):
            raise ValueError(
                f"{folder} must be on a file system that all {process_count()} processes see, but some do not find it"
            )
    return folder


def _new_folder(config: Train, name: str) -> Path:
    if config.resume is not None:
        return config.resume
    folder = config.out or Path("out") / Path(name).stem / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    if (folder / SETTINGS_FILE).exists():
        raise ValueError(
            f"{folder} contains a run already: resume it with --resume {folder}, or choose another --out"
        )
    return folder


def save_config(config: Train, folder: Path, console: Console) -> None:
    """Save the settings, and print how they differ from those that a resumed run had before."""
    settings = {key: value for key, value in plain_settings(config).items() if key not in UNSAVED_SETTINGS}
    path = folder / SETTINGS_FILE
    previous = json.loads(path.read_text()) if path.exists() else settings
    for key, value in settings.items():
        if previous.get(key) != value:
            console.print(
                f"note: {key} was {previous.get(key)} and is now {value}", highlight=False, soft_wrap=True
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)


def saved_config(folder: Path) -> Train:
    """Read the settings with which the run in a folder was last started.

    Args:
        folder: the folder of the run.

    Returns:
        The settings.

    Raises:
        ValueError: if the folder contains no run, or its settings cannot be read.
    """
    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: no run to resume, because there is no {SETTINGS_FILE}")
    try:
        # Settings that did not exist when the run began have their defaults.
        settings = parse_json(path.read_text())
        if not isinstance(settings, dict):
            raise ValueError(f"{settings!r} is no object")
        return make_settings(Train, flat(settings))
    except ValueError as error:
        raise ValueError(f"{path}: not the settings of a run: {error}") from error
