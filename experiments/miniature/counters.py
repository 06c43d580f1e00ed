"""The bytes that a rank has sent over each network, as the kernel counts them: with headers and acknowledgements."""

import re
import subprocess
from typing import Final, NamedTuple

_CLASS: Final = re.compile(r"class htb 1:(\d).*?Sent (\d+) bytes", re.DOTALL)


class Bytes(NamedTuple):
    """Bytes that a rank has sent since the miniature was built."""

    fast: int
    """To other ranks of its node."""
    slow: int
    """To ranks of other nodes."""


def sent_bytes() -> Bytes:
    """Read the counters of this rank's interface."""
    text = subprocess.run(
        ["tc", "-s", "class", "show", "dev", "eth0"], capture_output=True, text=True, check=True
    ).stdout
    counts = {int(number): int(sent) for number, sent in _CLASS.findall(text)}
    return Bytes(counts[1], counts[2])
