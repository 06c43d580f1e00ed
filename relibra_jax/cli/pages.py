"""The environment of all HTML pages: whole in one file, escaped, in one style, and nothing loaded from elsewhere."""

from importlib.resources import files

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
