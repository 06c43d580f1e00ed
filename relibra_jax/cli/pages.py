"""The environment of all HTML pages: whole in one file, escaped, in one style, and nothing loaded from elsewhere."""

from importlib.resources import files
from pathlib import Path

import jinja2


def page_template(text: str) -> jinja2.Template:
    """Compile the template of a page. It escapes all values.

    It can include ``page_style.css``, the style of all pages.

    Args:
        text: the template, in the language of Jinja.

    >>> page_template("<b>{{ name }}</b>").render(name="a < b")
    '<b>a &lt; b</b>'
    """
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read_part),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.from_string(text)


def read_part(name: str) -> str:
    """Read a template or style of this package."""
    return files("relibra_jax.cli").joinpath(name).read_text(encoding="utf-8")


def check_page(path: Path, *, option: str, example: str) -> None:
    """Reject a path that cannot become a page, before anything runs.

    Args:
        path: the file to write.
        option: the name of the option that gives it.
        example: the name of a file, for the error message.

    Raises:
        ValueError: if ``path`` is a folder, or its folder does not exist.
    """
    if path.is_dir():
        raise ValueError(f"{option}={path} is a folder; name a file in it, such as {path / example}")
    if not path.parent.is_dir():
        raise ValueError(f"{option}={path}: the folder {path.parent} does not exist")
