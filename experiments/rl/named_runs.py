"""The runs that have names: ``python -m experiments.run NAME``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from experiments.rl.configs import Train

CONFIGS: Final[Mapping[str, Train]] = MappingProxyType(
    {
        "demo": Train(),
        "learn": Train(seeds=(0, 1, 2), steps=80),
    }
)
"""The runs that have names: ``python -m experiments.run NAME``."""

SUMMARIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "demo": "RL quickstart: 2 x 4 host devices, a tiny model, under five minutes",
        "learn": "the same on three seeds, about fifteen minutes",
    }
)
