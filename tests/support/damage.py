"""Damage to files: flipped bits and lost ends."""

import numpy as np


def files_under(folder):
    """Return the contents of all files by their paths."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip_bit_of(array, folder):
    """Flip one bit of some element of ``array`` in the one file under ``folder`` that holds a copy of that element."""
    pattern = np.asarray(array).tobytes()[64:96]
    [path] = [path for path, content in files_under(folder).items() if pattern in content]
    content = bytearray((folder / path).read_bytes())
    content[content.index(pattern) + 9] ^= 16
    (folder / path).write_bytes(content)


def cut_in_half(path):
    """Lose the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_middle_bit(path):
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
