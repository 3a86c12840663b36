"""What goes wrong inside a chat template; needs jinja2."""

from jinja2 import TemplateError

RENDERING_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)
"""What a template's code raises on a conversation it was not written for (a missing field, None + text, ...)."""
COMPILING_ERRORS = (*RENDERING_ERRORS, SyntaxError)
"""Also what Python says, which compiles what jinja2 makes of a template and has limits of its own."""
