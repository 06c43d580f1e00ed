"""Versions of a run's weights as folders in Hugging Face's format, which servers load.

A folder appears whole, under a name of this run alone. The one before stays until all servers that answer have
confirmed the new one.
"""

import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Final

from experiments.engines.protocol import EngineError
from experiments.rl.processes import is_first, text_from_first
from relibra_jax.execution.plan_agreement import fail_together
from relibra_jax.models import LanguageModel, save_pretrained
from relibra_jax.models.hf_config import saved_dtype

MEMORY: Final = Path("/dev/shm")
"""The file system in memory of Linux, where folders of weights lie unless the settings name another place."""
PREFIX: Final = "relibra-weights-"


class WeightFolders:
    """The folders of weights that a run sends. None is made before the first weights.

    Args:
        source: the checkpoint that the run started from, whose configuration, tokenizer and dtype the folders get.
        place: the folder to make them in, which the servers' hosts must see under the same path. None takes the memory
            of this host, and removes what processes have left there that are gone.
    """

    def __init__(self, source: Path, place: Path | None):
        self._source, self._shared = source, place is not None
        # Two runs with the same servers or place must not take each other's weights for their own.
        self._run = text_from_first(f"{os.getpid()}-{secrets.token_hex(4)}")
        memory = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
        self._folder = (place or memory).absolute() / f"{PREFIX}{self._run}"
        self.current: Path | None = None
        """The folder of the newest version. None before the first."""
        self.tag: str | None = None
        """The name of the newest version, which no other run has. None before the first."""

    def write(self, policy: LanguageModel, version: int) -> int:
        """Write the weights of a version; return the number of bytes. All processes of a run call it; the first writes.

        The experts are in logical order. No device holds the model whole, and the host at most one file of it.

        Raises:
            EngineError: if there is no room for them.
        """
        folder = self._folder / f"version-{version}"
        try:
            with fail_together(f"making {self._folder}"):
                if is_first():
                    if not self._shared:
                        remove_left(self._folder.parent)
                    self._folder.mkdir(parents=True, exist_ok=True)
                    shutil.rmtree(folder, ignore_errors=True)
            save_pretrained(policy, folder, source=self._source, dtype=saved_dtype(self._source))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise EngineError(f"{folder}: {reason}; --requests.weights names another place") from None
        self.current, self.tag = folder, f"{self._run}-{version}"
        return sum(path.stat().st_size for path in folder.iterdir()) if is_first() else 0

    def forget_others(self) -> None:
        """Remove all versions but the newest."""
        for folder in self._folder.glob("version-*"):
            if folder != self.current and is_first():
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove what `write` has written."""
        self.current = self.tag = None
        if is_first():
            shutil.rmtree(self._folder, ignore_errors=True)


def remove_left(place: Path) -> None:
    """Remove the weights of processes of this host that are gone, which a killed run leaves."""
    for folder in place.glob(f"{PREFIX}*"):
        process = folder.name.removeprefix(PREFIX).partition("-")[0]
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)
