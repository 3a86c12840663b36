"""Text that is not ours, from servers, logs and command lines, made fit for where it goes."""


def printable(text: str) -> str:
    """Write what a terminal would obey, or break the line at, as Python writes it in a string."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def encodable(text: str) -> str:
    """Replace half surrogate pairs, which stand for bytes of a file's name that are no text, by question marks."""
    return text.encode(errors="replace").decode()
