"""``python -m irminsul``."""

from irminsul.cli import main

main()
