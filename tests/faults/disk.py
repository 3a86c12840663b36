"""A disk that is full, as far as an ordinary process can have one.

RLIMIT_FSIZE lets the kernel take the first bytes of a file and refuse the rest with EFBIG; a full disk does the same
with ENOSPC. So files are half-written for real, by whatever writes them. ``/dev/full`` is the same for streams.
"""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(room: int = 64):
    """Let no file grow beyond ``room`` bytes while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder):
    """Return every file below a folder by its name, hidden ones, too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
