"""Numbers with their nouns, for titles and messages."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is in the plural unless the number is 1.

    Args:
        number: the number.
        noun: the noun in the singular. Its plural ends in s, or in es after ch, but for epochs.

    >>> counted(1, "resident slot"), counted(8, "micro-batch"), counted(4, "epoch")
    ('1 resident slot', '8 micro-batches', '4 epochs')
    """
    plural = "es" if noun.endswith("ch") and noun != "epoch" else "s"
    return f"{number} {noun}{plural * (number != 1)}"
