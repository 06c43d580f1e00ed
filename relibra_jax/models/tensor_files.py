"""The safetensors files of a checkpoint: one file, or shards with an index."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relibra_jax.atomic_write import write_atomically, write_json

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"


class TensorFiles:
    """The tensors of a folder, read part by part: what is not asked for is not read.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        ValueError: if there are neither ``model.safetensors`` nor an index with all its shards, a file is no
            safetensors file, two files have a tensor of one name, or the
            index names a tensor that no file has.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}
        for path in _paths(self.folder):
            try:
                file = safe_open(path, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: no safetensors file ({error})") from error
            names = set(file.keys())
            if twice := self._files.keys() & names:
                raise ValueError(f"{path}: another file of the folder has {group_names(sorted(twice))} too")
            self._files |= dict.fromkeys(names, file)
        if lost := _indexed(self.folder) - self._files.keys():
            raise ValueError(
                f"{self.folder}: the index names tensors that no shard has: {group_names(sorted(lost))}"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def dtypes(self) -> dict[str, str]:
        """The dtype of every tensor, as safetensors names it: ``F32``, ``BF16`` and others."""
        return {name: file.get_slice(name).get_dtype() for name, file in self._files.items()}

    def read(self, name: str, rows: tuple[int | slice, ...] = ()) -> np.ndarray:
        """A tensor, or the part of it that the index ``rows`` gives, in its own dtype."""
        found = self._files[name].get_slice(name)
        return found[rows] if rows else found[:]


def _paths(folder: Path) -> list[Path]:
    """The files of a checkpoint: the single one if it is there, as `transformers` has it, else the shards."""
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
    """The tensors that the index names, where there are shards."""
    return set() if (folder / SINGLE).exists() else set(_weight_map(folder))


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        where = json.loads((folder / INDEX).read_text())["weight_map"]
        if not all(isinstance(file, str) for file in where.values()):
            raise ValueError("files are named by strings")
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / INDEX}: no index of tensors ({error!r})") from error
    return where


def write_tensors(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], sizes: Mapping[str, int], *, shard_bytes: int
) -> None:
    """Write tensors as one file, or as shards with an index, which comes last.

    Args:
        folder: an existing folder.
        tensors: names and values in the order of ``sizes``; as many as fill a shard are held at a time.
        sizes: the bytes of every tensor.
        shard_bytes: the most bytes of tensors in a file; one larger tensor has a file for itself.
    """
    shards = split_shards(sizes, shard_bytes)
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with write_atomically(folder / file) as part:
            # save_file writes the memory of an array as it lies, whatever its strides say.
            shard = {
                name: np.ascontiguousarray(value) for name, value in itertools.islice(tensors, len(names))
            }
            save_file(shard, part, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        metadata = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": where})


def split_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """The names of the tensors of each shard, in order.

    >>> split_shards({"a": 4, "b": 4, "c": 9, "d": 1}, 8)
    [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def group_names(names: Iterable[str]) -> str:
    """Names in one line, those that differ in nothing but their numbers together.

    >>> group_names(["a.0.b.1.w", "a.0.b.2.w", "a.1.b.1.w", "a.1.b.2.w", "norm"])
    'a.{0..1}.b.{1..2}.w (4), norm'
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(number) for number in re.findall(r"(?<=\.)\d+(?=\.)", name))
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "{}", name), []).append(numbers)
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
