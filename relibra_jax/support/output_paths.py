"""Checks of the paths that programs write to, before anything else runs."""

import os
from collections.abc import Sequence
from pathlib import Path


def check_page(path: Path, *, option: str, example: str) -> None:
    """Reject a path that cannot become a page, before anything runs.

    Args:
        path: the file to write.
        option: the name of the option that gives it.
        example: the name of a file, for the error message.

    Raises:
        ValueError: if ``path`` is a folder, or its folder does not exist.
    """
    _check_no_folder(path, option, example)
    if not path.parent.is_dir():
        raise ValueError(f"{option}={path}: the folder {path.parent} does not exist")


def check_file(path: Path, *, option: str, example: str) -> None:
    """Reject a path that cannot become a file, before anything runs. Its folder need not exist yet.

    Args:
        path: the file to write.
        option: the name of the option that gives it.
        example: the name of a file, for the error message.

    Raises:
        ValueError: if ``path`` is a folder, or a part of it before its name is a file.
    """
    _check_no_folder(path, option, example)
    _check_no_file((path.parent, *path.parent.parents), f"{option}={path}")


def check_folder(path: Path, *, option: str) -> None:
    """Reject a path that cannot become a folder, before anything runs. It need not exist yet.

    Args:
        path: the folder to write to.
        option: the name of the option that gives it.

    Raises:
        ValueError: if ``path``, or a part of it, is a file.
    """
    _check_no_file((path, *path.parents), f"{option}={path}")


def _check_no_folder(path: Path, option: str, example: str) -> None:
    if path.is_dir():
        raise ValueError(f"{option}={path} is a folder; name a file in it, such as {path / example}")


def _check_no_file(folders: Sequence[Path], place: str) -> None:
    for folder in folders:
        if os.path.lexists(folder) and not folder.is_dir():
            raise ValueError(f"{place}: {folder} is not a folder")
