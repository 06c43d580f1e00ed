"""Conversion of payloads to integer arrays: base64 buffers, base64 ``.npy``, wire strings and nested lists.

Nothing is unpickled. The dtype that a payload states is accepted only if it is one of the integer dtypes of engines.
"""

import base64
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

INTEGERS: Final = ("int8", "uint8", "int16", "uint16", "int32", "int64")
ASK_FOR_START: Final = (
    ", and nothing says at which token they start; pass start, the token of each sample's first row"
    " (0 if the engine skipped none)"
)
NEMO_RL_TAG: Final = "nrlre1"
NEMO_RL_INTEGERS: Final = ("int8", "int16", "int32")


class Recorded(NamedTuple):
    """The recording of one sample: the routes of n successive real tokens, in order."""

    rows: np.ndarray
    """``[n, layers, K]`` integers in the dtype of the recording. A row of -1 is a missing route."""
    start: int | None
    """The index, among the real tokens, of the first row's token; None if the recording does not state it."""


def sequence(value: Any, *, of: str) -> Iterable[Any]:
    """Return ``value`` if it is an iterable other than a mapping or a string.

    Args:
        value: the value to check.
        of: the name of its items, for the error message.

    Raises:
        ValueError: if it is not iterable, or if it is a mapping or a string.
    """
    if isinstance(value, Mapping | str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"expected a sequence of {of}, found {type(value).__name__}")
    return value


def integers(value: Any, *, ndim: int) -> np.ndarray:
    """Convert an array, a tensor on the host or nested lists to an integer array of ``ndim`` axes.

    Raises:
        ValueError: if the value is ragged, has a different number of axes, or is not of integers.

    >>> integers([[[0, 1]], [[3, 2]]], ndim=3).shape
    (2, 1, 2)
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError("nested lists of unequal length") from error
    if array.dtype.kind not in "iu" or array.ndim != ndim:
        raise ValueError(f"expected integers of {ndim} axes, found {array.dtype}{list(array.shape)}")
    return array


def from_base64(text: Any, *, dtype: str) -> np.ndarray:
    """Decode a base64 buffer of little-endian integers to a flat array.

    Raises:
        ValueError: if the text is not base64, if its bytes are not whole items, or if ``dtype`` is not in `INTEGERS`.

    >>> from_base64("AAEC", dtype="uint8").tolist()
    [0, 1, 2]
    """
    if dtype not in INTEGERS:
        raise ValueError(f"dtype {dtype!r} must be one of {', '.join(INTEGERS)}")
    return _integers_of(_bytes(text), dtype)


def from_fields(fields: Mapping[str, Any], *, dtypes: Sequence[str] = INTEGERS) -> np.ndarray:
    """Decode an array from a mapping of ``data``, ``shape`` and ``dtype``, in C order and little-endian.

    Args:
        fields: the mapping. Its data are bytes, or a str of base64.
        dtypes: the dtypes that the engine writes.

    Returns:
        ``[rows, layers, K]`` integers.

    Raises:
        ValueError: if a part is missing, has the wrong type, or does not fit the others.

    >>> from_fields({"data": bytes([0, 1, 3, 2]), "shape": [2, 1, 2], "dtype": "uint8"}).tolist()
    [[[0, 1]], [[3, 2]]]
    """
    data, shape, dtype = (fields.get(key) for key in ("data", "shape", "dtype"))
    if dtype not in dtypes:
        raise ValueError(f"dtype {dtype!r} must be one of {', '.join(dtypes)}")
    flat = _integers_of(data if isinstance(data, bytes) else _bytes(data), str(dtype))
    sizes = list(shape) if isinstance(shape, list | tuple) else []
    whole = len(sizes) == 3 and all(type(size) is int and size >= 0 for size in sizes)
    if not whole or math.prod(sizes) != flat.size:
        raise ValueError(f"shape {shape!r} is not [rows, layers, K] of {flat.size} ids")
    return flat.reshape(sizes)


def from_http(value: Any) -> np.ndarray:
    """Decode one routed-experts field of an HTTP response of vLLM, in any of its three encodings.

    Args:
        value: base64 of an ``.npy``, ``{"encoding": "base64", "dtype", "shape", "data"}``, or nested lists.

    Returns:
        ``[rows, layers, K]`` integers; an array of shape ``[0, 0, 0]`` for an empty list.

    Raises:
        ValueError: if the value has none of these encodings, or is damaged.
    """
    if isinstance(value, Mapping):
        if value.get("encoding") != "base64":
            raise ValueError(f"encoding {value.get('encoding')!r} is not 'base64'")
        return from_fields(value)
    if isinstance(value, str | bytes):
        file = io.BytesIO(_bytes(value))
        try:
            array = np.lib.format.read_array(file, allow_pickle=False)
        # NumPy parses the header as Python, so a damaged one can raise many kinds of exceptions.
        except Exception as error:
            raise ValueError(f"not base64 of an .npy ({error})") from error
        if rest := len(file.read()):
            raise ValueError(f"{rest} bytes follow the array of the .npy")
        return integers(array, ndim=3)
    return np.zeros((0, 0, 0), np.uint8) if value == [] else integers(value, ndim=3)


def from_nemo_rl(text: str) -> np.ndarray:
    """Decode NeMo-RL's wire string of one sample, ``nrlre1:<dtype>:<tokens>x<layers>x<K>:<base64>``.

    The last field is padded standard base64 of the bytes of the array: C order, little-endian, not compressed
    (``nemo_rl/utils/routed_experts_codec.py``).

    Args:
        text: the wire string.

    Returns:
        ``[tokens, layers, K]`` integers of the dtype that the string states: int8, int16 or int32.

    Raises:
        ValueError: if the tag, the dtype, the shape or the bytes violate the format. The message has what was found and
            what was expected.

    >>> from_nemo_rl("nrlre1:int16:2x1x2:AAABAAIBAwA=").tolist()
    [[[0, 1]], [[258, 3]]]
    """
    fields = text.split(":")
    if fields[0] != NEMO_RL_TAG or len(fields) != 4:
        raise ValueError(
            f"found a string of {len(fields)} fields that begins {text[:16]!r},"
            f" expected {NEMO_RL_TAG}:<dtype>:<tokens>x<layers>x<K>:<base64>"
        )
    _, dtype, shape, data = fields
    if dtype not in NEMO_RL_INTEGERS:
        raise ValueError(f"found dtype {dtype!r}, expected one of {', '.join(NEMO_RL_INTEGERS)}")
    if not re.fullmatch(r"\d{1,10}x\d{1,10}x\d{1,10}", shape, re.ASCII):
        raise ValueError(f"found shape {shape[:40]!r}, expected <tokens>x<layers>x<K>")
    sizes, item = [int(size) for size in shape.split("x")], np.dtype(dtype).newbyteorder("<")
    count = math.prod(sizes) * item.itemsize
    try:
        data_bytes = _bytes(data)
    except ValueError as error:
        raise ValueError(
            f"found {len(data)} characters that are not base64 ({error}), expected {-(-count // 3) * 4}"
            f" for {shape} of {dtype}"
        ) from error
    if len(data_bytes) != count:
        raise ValueError(f"found {len(data_bytes)} bytes, expected {count} for {shape} of {dtype}")
    return np.frombuffer(data_bytes, item).reshape(sizes)


def _integers_of(data: bytes, dtype: str) -> np.ndarray:
    item = np.dtype(dtype).newbyteorder("<")
    if len(data) % item.itemsize:
        raise ValueError(f"{len(data)} bytes are not whole {dtype} items")
    return np.frombuffer(data, item)


def _bytes(text: Any) -> bytes:
    if not isinstance(text, str | bytes):
        raise ValueError(f"expected base64, found {type(text).__name__}")
    return base64.b64decode(text, validate=True)
