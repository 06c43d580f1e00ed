"""Versions of a run's weights as folders in Hugging Face's format, which servers load.

A folder appears whole, under a name with its version. The one before stays until all servers have confirmed the new
one, so that a server that starts again always finds the weights that the others have.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Final

from relibra_jax.models import LanguageModel, save_pretrained
from relibra_jax.models.hf_config import read_config

MEMORY: Final = Path("/dev/shm")
"""The file system in memory of Linux, where folders of weights lie unless the settings name another place."""


class WeightFolders:
    """The folders of weights that a run sends.

    Args:
        source: the checkpoint that the run started from, whose configuration, tokenizer and dtype the folders get.
        place: the folder to make them in, which the servers' hosts must see under the same path. None takes a new one
            in memory, for servers on this host.
    """

    def __init__(self, source: Path, place: Path | None):
        self._source = source
        fields = read_config(source)
        self._dtype = fields.get("dtype") or fields.get("torch_dtype")
        in_memory = MEMORY if MEMORY.is_dir() else None
        if place is None:
            self._place = Path(tempfile.mkdtemp(prefix="relibra-weights-", dir=in_memory))
        else:
            place.mkdir(parents=True, exist_ok=True)
            self._place = place.absolute()
        self._owned = place is None
        self.current: Path | None = None
        """The folder of the newest version. None before the first."""

    def write(self, policy: LanguageModel, version: int) -> int:
        """Write the weights of a version; return the number of bytes.

        The experts are in logical order. No device holds the model whole, and the host at most one file of it.
        """
        folder = self._place / f"version-{version}"
        # A folder from before, of a run that was killed and resumed, may have other weights of the same version.
        shutil.rmtree(folder, ignore_errors=True)
        save_pretrained(policy, folder, source=self._source, dtype=self._dtype)
        self.current = folder
        return sum(path.stat().st_size for path in folder.iterdir())

    def forget_others(self) -> None:
        """Remove all versions but the newest."""
        for folder in self._place.glob("version-*"):
            if folder != self.current:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove what `write` has written."""
        self.current = None
        self.forget_others()
        if self._owned:
            shutil.rmtree(self._place, ignore_errors=True)
