"""Functions that numba compiles; needs no other part of irminsul."""

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numba import njit

_P = ParamSpec("_P")
_R = TypeVar("_R")
_logger = logging.getLogger(__name__)


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function at its first call, without the interpreter's lock; machine code is kept for the next process.

    numba keeps it beside the source or, if that cannot be written, in the user's cache directory. Where neither can be
    (a read-only image without a home), each process compiles anew, seconds, and says so once.
    """
    try:
        made: Callable[_P, _R] = njit(cache=True, nogil=True)(function)
    except RuntimeError:
        _warn()
        made = njit(nogil=True)(function)
    return made


@functools.cache
def _warn() -> None:
    _logger.warning(
        "compiled code cannot be kept and is compiled at each start; NUMBA_CACHE_DIR may name a place for it"
    )
