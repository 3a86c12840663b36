"""Names that a user chooses from."""

from enum import StrEnum
from typing import TypeVar

from irminsul.errors import InputError

_Choice = TypeVar("_Choice", bound=StrEnum)


def parse_choice(kind: type[_Choice], text: str, what: str, plural: str | None = None) -> _Choice:
    """Read a name of an enumeration.

    Args:
        kind: the enumeration.
        text: what the user wrote.
        what: what it names, for the message.
        plural: of ``what``, if it is not ``what`` and an s.

    Raises:
        InputError: an unknown name; the message lists the valid ones.
    """
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"unknown {what} {text!r}; valid {plural or what + 's'}: {', '.join(kind)}") from None
