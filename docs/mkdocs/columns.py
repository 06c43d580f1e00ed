"""MkDocs hook: show the numbers of a comparison as a table, from the records in `relibra_jax.evaluation`."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from relibra_jax.evaluation import COLUMNS

PLACE = "<!-- the numbers of a comparison -->"
"""The line that the table takes the place of."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the table where a page asks for it."""
    return markdown.replace(PLACE, table_of_columns())


def table_of_columns() -> str:
    """The heading, the name in the JSON file and the meaning of every number, as a Markdown table."""
    lines = [f"| {each.heading} | `{each.name}` | {each.meaning} |" for each in COLUMNS]
    return "\n".join(["| column | in `compare.json` | meaning |", "|---|---|---|", *lines])
