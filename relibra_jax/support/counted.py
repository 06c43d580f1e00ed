"""Numbers with their nouns, for titles and messages."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is in the plural unless the number is 1.

    Args:
        number: the number.
        noun: the noun in the singular. Its plural ends in s, or in es after ch.

    >>> counted(1, "resident slot"), counted(2, "rank"), counted(8, "micro-batch")
    ('1 resident slot', '2 ranks', '8 micro-batches')
    """
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural * (number != 1)}"
