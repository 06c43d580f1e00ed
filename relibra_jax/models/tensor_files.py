"""Read and write the safetensors files of a checkpoint: one file, or shards with an index."""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relibra_jax.support.atomic_write import write_atomically, write_json
from relibra_jax.support.json_text import parse_json

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"


class TensorFiles:
    """The tensors of a checkpoint folder; only the requested parts are read.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        ValueError: if the folder has neither ``model.safetensors`` nor an index with all its shards, a file is not a
            safetensors file, two files have a tensor of the same name, or the index names a tensor that no file has.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        # Gate and up of GPT-OSS are alternating columns of one entry, which is read once for both.
        self._entry = functools.lru_cache(maxsize=1)(self._read_entry)
        self._files: dict[str, Any] = {}
        for path in _paths(self.folder):
            try:
                file = safe_open(path, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: not a safetensors file ({error})") from error
            names = set(file.keys())
            if duplicates := self._files.keys() & names:
                raise ValueError(
                    f"{path}: another file of the folder also has {group_names(sorted(duplicates))}"
                )
            self._files |= dict.fromkeys(names, file)
        if unknown := _indexed(self.folder) - self._files.keys():
            raise ValueError(
                f"{self.folder}: the index names tensors that no shard has: {group_names(sorted(unknown))}"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor in the names of safetensors: ``F32``, ``BF16`` and others."""
        return {name: file.get_slice(name).get_dtype() for name, file in self._files.items()}

    def read(self, name: str, rows: tuple[int | slice, ...] = ()) -> np.ndarray:
        """Read a tensor, or the part of it that the index ``rows`` selects, in its own dtype."""
        if any(isinstance(each, slice) and each.step is not None for each in rows):
            return self._entry(name, rows[0])[rows[1:]]  # safetensors has no steps
        tensor = self._files[name].get_slice(name)
        return tensor[rows] if rows else tensor[:]

    def _read_entry(self, name: str, index: int) -> np.ndarray:
        """Read one entry along the first axis of a tensor."""
        return self._files[name].get_slice(name)[index]


def _paths(folder: Path) -> list[Path]:
    """Return the files of a checkpoint: the single file if it exists, as `transformers` does, otherwise the shards."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder}: there is neither {SINGLE} nor {INDEX}")
    files = sorted(set(_weight_map(folder).values()))
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise ValueError(f"{folder}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing)}")
    return [folder / file for file in files]


def _indexed(folder: Path) -> set[str]:
    """Return the names of the tensors in the index; empty for a single file."""
    return set() if (folder / SINGLE).exists() else set(_weight_map(folder))


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        file_of = parse_json((folder / INDEX).read_text())["weight_map"]
        files = set(file_of.values())
        if not all(isinstance(file, str) for file in files):
            raise ValueError("weight_map must map names to file names")
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / INDEX}: not an index of tensors ({error!r})") from error
    for file in sorted(files):
        if Path(file).name != file:
            raise ValueError(f"{folder / INDEX}: the shard {file!r} must be a file of this folder")
    return file_of


def write_tensors(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], sizes: Mapping[str, int], *, shard_bytes: int
) -> None:
    """Write tensors as one file, or as shards followed by their index.

    Args:
        folder: an existing folder.
        tensors: the names and values in the order of ``sizes``. The tensors of one shard are in memory at a time.
        sizes: the bytes of every tensor.
        shard_bytes: the largest number of bytes of tensors in one file. A larger tensor gets a file of its own.
    """
    shards = split_shards(sizes, shard_bytes)
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with write_atomically(folder / file) as part:
            # save_file writes the memory of an array and ignores its strides.
            shard = {
                name: np.ascontiguousarray(value) for name, value in itertools.islice(tensors, len(names))
            }
            save_file(shard, part, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(shards) > 1:
        metadata = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": file_of})


def split_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Split tensors into shards.

    Args:
        sizes: the bytes of every tensor, in order.
        shard_bytes: the largest number of bytes of a shard. A larger tensor gets a shard of its own.

    Returns:
        The names of the tensors of each shard, in order.

    >>> split_shards({"a": 4, "b": 4, "c": 9, "d": 1}, 8)
    [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[str]] = [[]]
    shard_size = 0
    for name, size in sizes.items():
        if shards[-1] and shard_size + size > shard_bytes:
            shards.append([])
            shard_size = 0
        shards[-1].append(name)
        shard_size += size
    return shards


def group_names(names: Iterable[str]) -> str:
    """Join names in one line, and group names that differ only in their numbers.

    >>> group_names(["a.0.b.1.w", "a.0.b.2.w", "a.1.b.1.w", "a.1.b.2.w", "norm"])
    'a.{0..1}.b.{1..2}.w (4), norm'
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(number) for number in re.findall(r"(?<=\.)\d+(?=\.)", name))
        escaped = name.replace("{", "{{").replace("}", "}}")
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "{}", escaped), []).append(numbers)
    return ", ".join(_group(pattern, members) for pattern, members in groups.items())


def _group(pattern: str, members: list[tuple[int, ...]]) -> str:
    if len(members) == 1:
        return pattern.format(*members[0])
    ranges = [sorted(set(column)) for column in zip(*members, strict=True)]
    size = int(np.prod([each[-1] - each[0] + 1 for each in ranges]))
    if size != len(members):
        return ", ".join(pattern.format(*member) for member in members)
    spans = [str(each[0]) if len(each) == 1 else f"{{{each[0]}..{each[-1]}}}" for each in ranges]
    return f"{pattern.format(*spans)} ({len(members)})"
