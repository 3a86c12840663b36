"""The base install stands on its own: no torch, and polite refusals."""

import subprocess
import sys

CORE = (
    "namespace",
    "radix_cache",
    "registry",
    "plan",
    "layout",
    "matching.winnow",
    "matching.chunks",
    "matching.markers",
    "cli",
)

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "fastapi", "safetensors", "prometheus_client"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_core_imports_without_torch() -> None:
    imports = "\n".join(f"import irminsul.{name}" for name in CORE)
    done = python(BLOCK + imports)
    assert done.returncode == 0, done.stderr


def test_the_core_plans_without_torch() -> None:
    done = python(
        BLOCK + "import numpy as np\n"
        "from irminsul.registry import Registry\n"
        "from irminsul.namespace import Namespace\n"
        "from irminsul.plan import ReusePolicy, make_plan\n"
        "tokens = np.random.default_rng(0).integers(0, 9999, 500).astype(np.int32)\n"
        "registry = Registry(500)\n"
        "registry.add(Namespace(), tokens, np.arange(500, dtype=np.int32), 0)\n"
        "prompt = np.concatenate([np.arange(64, dtype=np.int32), tokens])\n"
        "runs = registry.find(Namespace(), prompt, 0)\n"
        "print(sum(run.length for run in make_plan(564, prefix=0, runs=runs, policy=ReusePolicy()).runs))\n"
    )
    assert done.stdout.strip() == "499", done.stderr


def test_a_command_that_needs_an_extra_says_which() -> None:
    done = python(BLOCK + "import sys; sys.argv = ['irminsul', 'serve', 'x']\nfrom irminsul.cli import main\nmain()")
    assert done.returncode == 1
    assert "pip install 'irminsul-kv[engine]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_load_generator_needs_no_torch_and_says_what_it_does_need() -> None:
    command = "import sys; sys.argv = ['irminsul', 'bench', 'report', 'nowhere']\nfrom irminsul.cli import main\nmain()"
    done = python(BLOCK + command)
    assert done.returncode == 1
    assert "cannot read nowhere/blocks.jsonl" in done.stderr
    done = python(BLOCK.replace('"torch"', '"httpx"') + command)
    assert done.returncode == 1
    assert done.stderr == "irminsul: this command needs httpx: pip install 'irminsul-kv[bench]'\n"
