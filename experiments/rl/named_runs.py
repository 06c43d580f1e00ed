"""The named training runs of ``python -m experiments.run NAME``, and their one-line descriptions."""

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
"""The settings of each named run."""

SUMMARIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "demo": "RL quickstart: 2 x 4 host devices, a tiny model, under five minutes",
        "learn": "the same with 80 learning steps on three seeds, about fifteen minutes",
    }
)
"""A description of each named run, in one line."""
