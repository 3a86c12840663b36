"""What an API key may be."""

from irminsul.errors import InputError


def check_api_key(key: str) -> None:
    """Raise InputError unless a key can be sent in a header as it is."""
    if not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise InputError("the API key must be printable ASCII, not empty, without spaces around it")
