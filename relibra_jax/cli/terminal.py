"""What commands draw on a terminal alike: a bar of progress, and tables that no narrow terminal cuts."""

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def progress_bar(console: Console, *, width: int) -> Progress:
    """A bar that is gone when its command ends.

    Args:
        console: the console to draw on.
        width: the characters for the description of what runs.
    """
    description = TextColumn(f"{{task.description:>{width}}}")
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def wide_table(title: str, *, width: int) -> Table:
    """A table without columns yet, which is as wide as it is on any terminal.

    Args:
        title: what was run.
        width: the characters of a line. A narrower terminal wraps lines, so that no number is cut.
    """
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0, width=width
    )
