"""Stand-ins for packages that SGLang 0.5.23 imports and no test uses, where a build for this machine does not exist.

SGLang takes names from torchvision while it loads its model configurations. transformers must go on finding no
torchvision, or it would load image code with it.
"""

import importlib.abc
import importlib.machinery
import sys
from enum import Enum


class InterpolationMode(Enum):
    """As torchvision's."""

    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


CONTENTS = {
    "torchvision": {},
    "torchvision.transforms": {"InterpolationMode": InterpolationMode},
    "torchvision.transforms.functional": {"InterpolationMode": InterpolationMode},
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds them, for everybody but transformers."""

    def find_spec(self, name, path=None, target=None):
        if name not in CONTENTS or asked_by("transformers"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module):
        module.__dict__.update(CONTENTS[module.__name__])


def asked_by(package):
    """Say whether an import is asked for by a package, before the package's own imports of others."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith(package)


def install():
    """Add them behind everything that is really installed."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns())
