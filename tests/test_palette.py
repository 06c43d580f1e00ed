"""The colours of figures: the same for a planner everywhere, visible, and apart for readers who see fewer of them."""

import itertools

import numpy as np
import pytest

from relibra_jax.cli.figures import LINES
from relibra_jax.cli.palette import GRID, IDLE, OUTSIDE, PHASES, SERIES, SYSTEMS, planner_style, system_of
from relibra_jax.planning.planners import PLANNERS

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "full": np.eye(3),
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
}
# Oklab (Ottosson, 2020).
CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
USED_TOGETHER = {
    "lines of planners": ([planner_style(name).colour for name in LINES] + list(OUTSIDE), 0.06),
    "all systems": ([system.colour for system in SYSTEMS.values()] + list(OUTSIDE), 0.05),
    "series": (SERIES, 0.08),
    "phases": (list(PHASES.values()), 0.06),
}
"""The colours of a figure, and the least distance of two of them; 0.02 is just noticeable."""


LEAST_CONTRAST = 1.6
"""The least contrast of a colour with the white page. WCAG asks 3 of a thin line; yellow and pale violet have less."""


def linear_rgb(colour):
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def oklab(colour, vision="full"):
    seen = np.clip(np.array(VISION[vision]) @ linear_rgb(colour), 0, 1)
    return np.array(OKLAB) @ np.cbrt(np.array(CONES) @ seen)


def contrast_with_white(colour):
    """Return the contrast of WCAG, which is 1 for white and 21 for black."""
    luminance = np.array([0.2126, 0.7152, 0.0722]) @ linear_rgb(colour)
    return 1.05 / (luminance + 0.05)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("figure", USED_TOGETHER)
def test_palette_colours_stay_apart_from_each_other_and_from_white(figure, vision):
    colours, least = USED_TOGETHER[figure]
    for one, other in itertools.combinations(colours, 2):
        distance = np.linalg.norm(oklab(one, vision) - oklab(other, vision))
        assert distance > least, f"{one} and {other}: {distance:.3f}"
    for colour in colours:
        assert contrast_with_white(colour) >= LEAST_CONTRAST, f"{colour}: {contrast_with_white(colour):.2f}"
    assert max(map(contrast_with_white, (GRID, IDLE))) < LEAST_CONTRAST, "pale colours would pass"


def test_planner_style_lines_differ_in_a_grey_print():
    """Two lines differ in lightness, or in their markers and line styles."""
    for one, other in itertools.combinations(map(planner_style, LINES), 2):
        lightness = abs(oklab(one.colour)[0] - oklab(other.colour)[0])
        assert lightness > 0.05 or (one.marker, one.line) != (other.marker, other.line)


def test_system_of_gives_every_planner_a_system():
    assert {system_of(name) for name in PLANNERS} == SYSTEMS.keys()


def test_planner_style_of_a_planner_from_outside_keeps_its_colour():
    assert planner_style("mine:planner") == planner_style("mine:planner")
    assert {planner_style(f"mine:planner_{number}").colour for number in range(50)} == set(OUTSIDE)
