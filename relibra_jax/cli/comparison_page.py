"""The HTML page of a comparison: tables, figures and explanations in one file that loads nothing else."""

import base64
import dataclasses
import datetime
import shlex
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import jax

from relibra_jax.cli.pages import page_template, read_part
from relibra_jax.cli.palette import planner_style
from relibra_jax.evaluation import Outcome, table_columns
from relibra_jax.support.atomic_write import write_atomically

TEMPLATE: Final = "comparison_page.html.jinja"


def write_page(
    path: Path, outcomes: list[Outcome], about: Mapping[str, str], figures: Mapping[str, Path]
) -> None:
    """Write the page of a comparison.

    Args:
        path: the HTML file to write.
        outcomes: the outcome of each planner, in the order of the rows.
        about: what was compared, as names and values: the command, the trace and the settings.
        figures: the PNG files ``compare`` and ``timeline``, which become part of the page.
    """
    template = page_template(read_part(TEMPLATE))
    now = datetime.datetime.now(tz=datetime.UTC)
    versions = f"relibra_jax {version('relibra-jax')}, jax {jax.__version__}"
    page = template.render(
        about={**about, "Date": f"{now:%Y-%m-%d %H:%M} UTC", "Versions": versions},
        outcomes=outcomes,
        fastest=min(outcomes, key=lambda outcome: outcome.modelled_seconds),
        colours={outcome.planner: planner_style(outcome.planner).colour for outcome in outcomes},
        columns=table_columns(outcomes[0]),
        figures={name: base64.b64encode(figure.read_bytes()).decode() for name, figure in figures.items()},
    )
    with write_atomically(path) as part:
        part.write_text(page, encoding="utf-8")


def command_line(program: str, options: Any) -> str:
    """Return the command that has these options, without those that have their defaults.

    Args:
        program: the command, for example ``relibra compare``.
        options: a dataclass of options, as tyro reads it; its ``trace`` is positional.

    >>> from relibra_jax.evaluation import Costs
    >>> command_line("relibra compare", Costs(updates=2, recompute=True))
    'relibra compare --updates 2 --recompute'
    """
    return " ".join([program, *_arguments(options)])


def _arguments(options: Any) -> Iterator[str]:
    for field in dataclasses.fields(options):
        value, flag = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            yield from _arguments(value)
        elif value == field.default:
            continue
        elif field.name == "trace":
            yield shlex.quote(str(value))
        elif value is True:
            yield flag
        elif field.name == "planner":
            yield from (f"{flag} {shlex.quote(name)}" for name in value)
        else:
            values = value if isinstance(value, tuple) else (value,)
            yield " ".join([flag, *(shlex.quote(str(each)) for each in values)])
