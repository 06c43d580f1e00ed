"""Terminal output that the commands share: a progress bar, and tables that a narrow terminal does not cut."""

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def progress_bar(console: Console, *, width: int) -> Progress:
    """Make a progress bar that disappears when its command ends.

    Args:
        console: the console to draw on.
        width: the width of the description beside the bar, in characters.
    """
    description = TextColumn(f"{{task.description:>{width}}}")
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def wide_table(title: str, *, width: int) -> Table:
    """Make a table without columns, of a fixed width that does not depend on the terminal.

    Args:
        title: the title above the table.
        width: the width of a line, in characters. A narrower terminal wraps the lines instead of cutting numbers.
    """
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0, width=width
    )
