"""The errors a user can meet.

* IrminsulError
    * InputError (also ValueError): something given to us is wrong; the message says what, and what is allowed
        * UnsupportedModelError: a model or option that has not been shown to work, refused by name
        * CheckpointError: a checkpoint, its config or its tokenizer cannot be read
    * OverloadedError: there is no room for this request now; try again later

Broken invariants of our own are ``assert`` or ``AssertionError``, never one of these.
"""


class IrminsulError(Exception):
    """Base of every error that irminsul raises on purpose."""


class InputError(IrminsulError, ValueError):
    """A value from outside is wrong."""


class UnsupportedModelError(InputError):
    """A model, cache format or option that has not been shown to work."""


class CheckpointError(InputError):
    """A checkpoint, its configuration or its tokenizer cannot be read."""


class OverloadedError(IrminsulError):
    """There is no room for the request now."""
