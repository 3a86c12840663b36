"""Run by every Python that has this folder on its path: SGLang starts processes of its own."""

import stand_ins

stand_ins.install()
