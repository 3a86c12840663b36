"""What the plugin remembers of a request: its scope, its lineage, its plan, and the counters it reports."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from irminsul.errors import InputError
from irminsul.namespace import Namespace
from irminsul.plan import Mode, Run
from irminsul.sglang.histories import holds_marks
from irminsul.sglang.settings import Settings, read_request_options

ATTRIBUTE = "irminsul"
SEPARATOR = "\x1f"
INFO_KEY = "irminsul"
"""Under which a request's counters stand in ``meta_info``."""


@dataclass(frozen=True)
class StepTokens:
    """Prompt tokens of one step of a request's prefill, by what became of them."""

    prefix: int
    """Lossless, from the tree; of the first step only."""
    history: int
    """Derived rows of the request's own session; of the first step only."""
    shifted: int
    computed: int
    gaps: int
    runs: int


@dataclass(frozen=True, eq=False)
class FoundRuns:
    """What a search found, and what it depends on."""

    depends_on: tuple[int, int, int]
    """Epoch of the index, tokens held by the tree, tokens of the request."""
    runs: list[Run]


TOKEN_CLASSES = ("prefix", "history", "shifted", "computed")


@dataclass
class ReuseState:
    """One request, from its first match to its end."""

    namespace: Namespace
    extra_key: str | None
    """The request's own, with its tenant."""
    cache_salt: str | None
    mode: Mode
    refusal: str | None
    """Why nothing is shifted for this request; None if it may be."""
    donates: bool
    """Whether its token ids determine its rows, so that others may copy them."""
    marked: bool
    """Whether it holds ids that mark derived rows; it must meet nothing, and leave nothing."""
    approximate_prefix: bool
    """Whether the policy lets a session continue from its derived rows."""
    derived_from: int | None = None
    """Rows from this position on are approximate; a multiple of the page size. None: all are exact."""
    inherited: int | None = None
    """What ``derived_from`` was when the request was matched."""
    indexed: int = 0
    """Rows below this position have been announced to the index."""
    steps: list[StepTokens] = field(default_factory=list)
    """Since the first match, whatever is computed again after a retraction."""
    declined: int = 0
    """Plans given up because the pool had no room for donors and request together."""
    open_plan: Any = field(default=None, repr=False)
    """An OpenPlan between admission and copy."""
    found: FoundRuns | None = field(default=None, repr=False)
    """Of the last search; None: there was nothing to search for."""

    @property
    def follows_history(self) -> bool:
        """Whether the request may continue from derived rows."""
        return self.mode is Mode.LIVE and self.refusal is None and self.approximate_prefix

    def report(self) -> dict[str, Any]:
        """Return the counters, in tokens of the prompt, for ``meta_info``."""
        return {
            "mode": self.mode.value,
            "prefix_tokens": sum(step.prefix for step in self.steps),
            "approximate_prefix_tokens": sum(step.history for step in self.steps),
            "shifted_tokens": sum(step.shifted for step in self.steps),
            "computed_tokens": sum(step.computed for step in self.steps),
            "gaps": sum(step.gaps for step in self.steps),
            "runs": sum(step.runs for step in self.steps),
            "declined_plans": self.declined,
            **({} if self.refusal is None else {"refusal": self.refusal}),
        }


def token_array(req: Any) -> NDArray[np.int32]:  # SGLang's Req
    """Return a request's tokens, its own output too, shape [n]."""
    tokens: NDArray[np.int32] = np.array(req.full_untruncated_fill_ids, dtype=np.int64).astype(np.int32)
    return tokens


def new_state(req: Any, settings: Settings, identity: Namespace) -> ReuseState:  # SGLang's Req
    """Read what a request asks for and what it may have.

    Args:
        req: SGLang's request.
        settings: the server's.
        identity: model, row format and rope.
    """
    refusal = _refusal(req)
    marked = holds_marks(req.origin_input_ids)
    if marked:
        refusal = "token ids: one is far above any vocabulary"
    try:
        options = read_request_options(req.sampling_params.custom_params)
        mode = _least(settings.mode, settings.mode if options.mode is None else options.mode)
        tenant = options.tenant
    except InputError as error:
        # The front end refuses these; whatever comes past it gets nothing.
        mode, tenant, refusal = Mode.OFF, "", str(error)
    extra_key = tree_key(req.extra_key, tenant)
    namespace = Namespace(
        tenant=tenant,
        cache_salt=req.cache_salt or "",
        extra_key=extra_key or "",
        lora=req.lora_id or "",
        model=identity.model,
        tokenizer=identity.tokenizer,
        row_format=identity.row_format,
        rope=identity.rope,
    )
    return ReuseState(
        namespace=namespace,
        extra_key=extra_key,
        cache_salt=req.cache_salt or None,
        mode=mode,
        refusal=refusal,
        marked=marked,
        donates=not marked and not any(_asked(req, name) for name in _NOT_BY_TOKENS),
        approximate_prefix=settings.policy.approximate_prefix,
    )


def tree_key(extra_key: str | None, tenant: str) -> str | None:
    """Join an ``extra_key`` and a tenant so that no two different pairs meet, whatever a client writes."""
    if extra_key is not None:
        extra_key = extra_key.replace(SEPARATOR, 2 * SEPARATOR)
    return f"{extra_key or ''}{SEPARATOR}tenant{SEPARATOR}{tenant}" if tenant else extra_key


_RANK = {Mode.OFF: 0, Mode.OBSERVE: 1, Mode.LIVE: 2}


def _least(a: Mode, b: Mode) -> Mode:
    return min(a, b, key=_RANK.__getitem__)


_NOT_BY_TOKENS = {
    "input_embeds": "its rows follow from embeddings, not from token ids",
    "positional_embed_overrides": "its rows follow from embeddings, not from token ids",
    "multimodal_inputs": "its rows follow from images or sound, not from token ids",
}
_REFUSED_ATTRIBUTES = _NOT_BY_TOKENS | {
    "session": "rows of a session have not been shown to be safe to shift",
    "return_hidden_states": "hidden states of reused tokens are not computed",
    "return_routed_experts": "experts of reused tokens are not computed",
    "return_indexer_topk": "the index of reused tokens is not computed",
    "token_indices_to_pool": "pooled tokens must be computed",
    "multi_item_delimiter_indices": "items are scored apart",
    "beam_group": "beam search keeps rows of its own",
}


def _refusal(req: Any) -> str | None:
    """Say why no row may be shifted for a request, or None."""
    return next((f"{name}: {reason}" for name, reason in _REFUSED_ATTRIBUTES.items() if _asked(req, name)), None)


def _asked(req: Any, name: str) -> bool:
    # Some are flags, others objects, and tensors among those have no truth value.
    value = getattr(req, name, None)
    return value is not None and value is not False
