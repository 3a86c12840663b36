"""A plugin for tests: put this folder on PYTHONPATH, and SGLang loads it beside irminsul.

It makes SGLang serve an MLA model on a CPU (absorbed attention by the torch_native backend), gives dummy weights the
scale of trained ones, and, told by a JSON file while the server runs, forces plans that no request would get:

* ``gaps``: every reused run is cut into so many, with a stretch of computed tokens between two of them;
* ``wrong_delta``: rows are turned by so many positions too much, as a control that a test can see an error.
"""

import json
import os
from itertools import pairwise
from pathlib import Path

FORCED = "SGLANG_HOST_FORCED"
"""Path of the JSON file."""
GAP_TOKENS = 40


def activate():
    """SGLang's entry point."""
    import torch

    if not torch.cuda.is_available():
        from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

        handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)
    if os.environ.get("SGLANG_HOST_WEIGHTS") == "scaled":
        from sglang.srt.model_loader import loader

        loader.initialize_dummy_weights = scaled_weights
    if FORCED in os.environ:
        force_plans()


def forced():
    """Read what is forced now."""
    path = Path(os.environ[FORCED])
    return json.loads(path.read_text()) if path.is_file() else {}


def force_plans():
    """Let plans and moves follow the file."""
    from irminsul.sglang import admission
    from irminsul.sglang.forward import Splitter

    make_plan, init = admission.make_plan, Splitter.__init__

    def make_cut_plan(n_tokens, *, runs, **arguments):
        gaps = forced().get("gaps", 0)
        return make_plan(n_tokens, runs=[part for run in runs for part in cut(run, gaps)], **arguments)

    def init_with_wrong_turns(self, planner, mover, rope, *rest):
        def move(rope, sources, targets, old, new, source):
            mover(rope, sources, targets, old, new + forced().get("wrong_delta", 0), source)

        init(self, planner, move, rope, *rest)

    admission.make_plan = make_cut_plan
    Splitter.__init__ = init_with_wrong_turns


def cut(run, gaps):
    """Cut a run into parts with ``gaps`` stretches between them."""
    if gaps == 0:
        return [run]
    width = run.length // (gaps + 1)
    edges = [run.start + at * width for at in range(gaps + 1)] + [run.end]
    parts = [(a + (GAP_TOKENS if at else 0), b) for at, (a, b) in enumerate(pairwise(edges))]
    return [run.slice(a, b) for a, b in parts if b > a]


def scaled_weights(model, low=0, high=0, seed=1234):
    """Draw weights of the scale of trained ones; with SGLang's own, attention contributes next to nothing."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator(device=device)
    generator.manual_seed(1)
    for name, weight in model.state_dict().items():
        if not torch.is_floating_point(weight):
            continue
        if "norm" in name:
            weight.fill_(1.0)
        elif weight.dim() < 2:
            weight.zero_()
        else:
            # Queries and keys a little larger, so that attention is not flat.
            gain = 1.6 if any(part in name for part in ("q_proj", "q_b_proj", "kv_a")) else 1.0
            fan_in = 1 if "embed" in name else weight.shape[-1]
            weight.normal_(0, gain / fan_in**0.5, generator=generator)
