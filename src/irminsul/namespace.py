"""Everything that must be equal before two requests may share rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Namespace:
    """The sharing scope of a request.

    Two requests share rows, by prefix or shifted, only if their namespaces compare equal. Fields are compared as
    they are and never hashed into each other, so no two different scopes can meet ("LoRA against salt", a missing
    against an empty salt spelled differently by a caller, and the like).
    """

    tenant: str = ""
    cache_salt: str = ""
    extra_key: str = ""
    """Whatever else the host engine keys its cache by."""
    lora: str = ""
    model: str = ""
    """Name and revision of the weights."""
    tokenizer: str = ""
    row_format: str = ""
    """RowLayout.fingerprint."""
    rope: str = ""
    """RopeSpec.fingerprint: rows rotated with other frequencies are other rows."""
