"""One forward for all gaps of all requests of a batch.

SGLang's attention reads the rows of a request through its line of the slot table, up to a length that each *batch row*
has for itself. So a request with k gaps is run as k batch rows over one line of the table::

    prompt          |-- prefix --|= shifted =|-- gap 1 --|==== shifted ====|-- gap 2 --|
    batch row 1     [prefix and shifted are "prefix"    ][extend by gap 1 ]
    batch row 2     [everything before gap 2, with gap 1's rows            ][extend by gap 2]

In each layer all rows are written before any is read, so gap 2 attends to gap 1 of the same forward. Shifted rows are
copied in before, on the same stream. For the sampler, and for log probabilities, a request is one row again.

Shape letters: ``T`` tokens of the batch that are computed, ``B`` batch rows, ``N`` rows to copy.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from irminsul.kernels.row_movers import RowMover
from irminsul.rope import AngleSource, RopeSpec
from irminsul.sglang.admission import OpenPlan, Planner
from irminsul.sglang.attention import AttentionShape, KeyBlocks, SharedKeys, absorbed_is_cheaper, to_device

MANY_COMPUTED = 1024
"""Tokens of a forward from which on products cost more than what launches them."""


@dataclass(frozen=True, eq=False)
class SplitBatch:
    """How the requests of a batch were split into batch rows."""

    owners_B: NDArray[np.int64]
    """Which request each batch row belongs to, ascending."""
    starts_B: NDArray[np.int64]
    """First position each row computes."""
    ends_B: NDArray[np.int64]
    tokens_T: NDArray[np.int64]
    """Which tokens of the unsplit batch are computed."""

    @classmethod
    def of(
        cls, prefix_lens: Sequence[int], extend_lens: Sequence[int], plans: Sequence[OpenPlan | None]
    ) -> "SplitBatch":
        """Split; a request without a plan stays one row.

        Args:
            prefix_lens: of each request: rows in the cache.
            extend_lens: tokens behind those, that the unsplit batch holds one after the other.
            plans: what is copied, for [prefix_len, prefix_len + extend_len).
        """
        owners: list[int] = []
        gaps: list[tuple[int, int]] = []
        tokens: list[NDArray[np.int64]] = []
        offset = 0
        for owner, (prefix, extend, plan) in enumerate(zip(prefix_lens, extend_lens, plans, strict=True)):
            assert plan is None or (plan.start, plan.end) == (prefix, prefix + extend), (plan, prefix, extend)
            for start, end in [(prefix, prefix + extend)] if plan is None else plan.gaps():
                owners.append(owner)
                gaps.append((start, end))
                tokens.append(np.arange(offset + start - prefix, offset + end - prefix))
            offset += extend
        starts, ends = np.array(gaps, dtype=np.int64).reshape(-1, 2).T
        return cls(np.array(owners, dtype=np.int64), starts, ends, np.concatenate(tokens))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens that each row computes, [B]."""
        lengths: NDArray[np.int64] = self.ends_B - self.starts_B
        return lengths


@dataclass(eq=False)
class Unsplit:
    """What a forward batch says of its requests, beside what it says of its rows; for sampler and log probabilities."""

    per_request: dict[str, Any]
    """Fields of the forward batch, one entry a request."""
    absorbed: bool
    """Whether absorbed attention is the cheaper one for these rows."""
    computed: int
    """Tokens of all rows."""
    blocks: KeyBlocks | None
    """Layout of keys that rows of a request share in up-projected attention; None: each row has its own."""
    table: Tensor
    """SGLang's slot table."""
    lines: list[int]
    """Of each request in it."""
    shared_keys: SharedKeys | None = None
    """Of the forward, from its first layer on."""

    def choose(self, handler: Callable[[Any, Any], Any], attention: Any, forward_batch: Any) -> Any:
        """Return the form of attention for a layer, in place of the one that SGLang chooses.

        Args:
            handler: SGLang's own choice, for (attention, forward batch).
            attention: the layer's attention, SGLang's DeepseekV2AttentionMLA.
            forward_batch: SGLang's ForwardBatch.

        Returns:
            An AttnForwardMethod.
        """
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (  # noqa: PLC0415
            AttnForwardMethod,
        )

        with self._whatever_the_prefix(attention):
            method = handler(attention, forward_batch)
        if method not in (AttnForwardMethod.MHA_ONE_SHOT, AttnForwardMethod.MHA_CHUNKED_KV):
            return method
        if self.absorbed:
            return AttnForwardMethod.MLA
        if self.blocks is None:
            return method
        if self.shared_keys is None:
            # One for all layers of a forward.
            self.shared_keys = SharedKeys.of(self.blocks, self.table, self.lines)
            forward_batch.mha_one_shot_kv_indices = self.shared_keys.slots
        return AttnForwardMethod.MHA_ONE_SHOT

    @contextmanager
    def _whatever_the_prefix(self, attention: Any) -> Iterator[None]:
        """Let SGLang up-project behind short prefixes, too, where that saves more than its launches take.

        SGLang absorbs behind fewer than `chunked_prefix_cache_threshold` cached tokens, however many it computes. Its
        other reasons (captured graphs, determinism, a flag) stand, and so does a threshold that the operator set.
        """
        from sglang.srt.environ import envs  # noqa: PLC0415

        own = envs.SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD.is_set()
        if own or self.blocks is None or self.absorbed or self.computed < MANY_COMPUTED:
            yield
            return
        threshold = attention.chunked_prefix_cache_threshold
        attention.chunked_prefix_cache_threshold = 0
        try:
            yield
        finally:
            attention.chunked_prefix_cache_threshold = threshold

    @contextmanager
    def shown(self, forward_batch: Any) -> Iterator[None]:  # SGLang's ForwardBatch
        """Let the batch speak of requests for a while."""
        of_rows = {name: getattr(forward_batch, name) for name in self.per_request}
        self.restore(forward_batch)
        try:
            yield
        finally:
            for name, value in of_rows.items():
                setattr(forward_batch, name, value)

    def restore(self, forward_batch: Any) -> None:
        """Let the batch speak of requests from now on."""
        for name, value in self.per_request.items():
            setattr(forward_batch, name, value)


class Splitter:
    """Carries out the open plans of a batch.

    Args:
        planner: holds the plans.
        mover: moves rows of the server's pool.
        rope: how the model turns its keys.
        shape: sizes of the model's attention.
        max_shared_keys: up to so many keys, the rows of a request share them; 0 if the attention backend cannot.
    """

    current: Unsplit | None = None
    """Of the batch whose forward is running."""

    def __init__(
        self, planner: Planner, mover: RowMover, rope: RopeSpec, shape: AttentionShape, max_shared_keys: int = 0
    ) -> None:
        self._planner = planner
        self._mover = mover
        self._rope = rope
        self._shape = shape
        self._max_shared_keys = max_shared_keys

    def make(self, batch: Any, make_forward_batch: Callable[[Any], Any]) -> Any:  # SGLang's own
        """Build the forward batch of a schedule batch, with rows split and copies launched.

        Args:
            batch: SGLang's ScheduleBatch; not changed.
            make_forward_batch: SGLang's own, for a batch.
        """
        plans = [self._planner.take(req) for req in batch.reqs] if batch.forward_mode.is_extend() else []
        if not any(plans):
            return make_forward_batch(batch)
        split = SplitBatch.of(batch.prefix_lens, batch.extend_lens, plans)
        forward_batch = make_forward_batch(_split_batch(batch, split))
        if batch.sampling_info is not None and batch.has_grammar:
            batch.sampling_info.grammars = [req.grammar for req in batch.reqs]
        self._copy_rows(batch, plans)
        blocks = KeyBlocks.of(split.owners_B, split.ends_B)
        shared = blocks.total <= self._max_shared_keys
        up_projected = blocks.total if shared else int(split.ends_B.sum())
        forward_batch.irminsul = Unsplit(
            _per_request(batch, split),
            absorbed_is_cheaper(self._shape, split.starts_B, split.ends_B, up_projected),
            int(split.lengths.sum()),
            blocks if shared else None,
            batch.req_to_token_pool.req_to_token,
            [req.kv.req_pool_idx for req in batch.reqs],
        )
        return forward_batch

    def run(self, forward_batch: Any, forward: Callable[[], Any]) -> Any:
        """Launch a forward, and let its batch speak of requests behind it."""
        self.current = getattr(forward_batch, "irminsul", None)
        try:
            return forward()
        finally:
            if self.current is not None:
                self.current.restore(forward_batch)
                self.current = None
            self._planner.settle()

    def _copy_rows(self, batch: Any, plans: Sequence[OpenPlan | None]) -> None:
        """Launch the copy of all reused rows of a batch, then unlock their donors."""
        device = batch.out_cache_loc.device
        sources, lengths, first = [], [], []
        offset = 0
        for extend, plan in zip(batch.extend_lens, plans, strict=True):
            if plan is not None:
                for copied in plan.copies:
                    run = copied.run
                    sources.append(copied.slots)
                    lengths.append(run.length)
                    first.append((offset + run.start - plan.start, run.source_start, run.start))
            offset += extend
        if device.type == "cuda":
            for part in sources:
                # Made on the scheduler's stream, and let go of before this one has read them.
                part.record_stream(torch.cuda.current_stream())
        sources_N = torch.cat(sources).to(torch.int64)
        at_N, old_N, new_N = counted_up(np.array(first), np.array(lengths), device)
        self._mover(self._rope, sources_N, batch.out_cache_loc[at_N], old_N, new_N, AngleSource.TABLE)
        for plan in plans:
            if plan is not None:
                self._planner.close(plan)


def counted_up(first_RK: NDArray[np.int64], lengths_R: NDArray[np.int64], device: torch.device) -> Tensor:
    """Count up from the first numbers of each run, [K, N]; on the device, as a long prompt's positions are megabytes.

    Args:
        first_RK: K first numbers of each run.
        lengths_R: tokens of each run, N together.
        device: of the result.
    """
    before_R = np.cumsum(lengths_R) - lengths_R
    table = to_device(np.concatenate([(first_RK - before_R[:, None]).T, lengths_R[None]]), device)
    n_rows = int(lengths_R.sum())
    run_N = torch.repeat_interleave(torch.arange(len(lengths_R), device=device), table[-1], output_size=n_rows)
    return table[:-1, run_N] + torch.arange(n_rows, device=device)


def _split_batch(batch: Any, split: SplitBatch) -> Any:
    """Return a copy of a schedule batch whose entries are batch rows."""
    device = batch.seq_lens.device
    tokens_T = to_device(split.tokens_T, device)
    owners_B = torch.from_numpy(split.owners_B)
    owners_on_device_B, ends_B = to_device(np.stack([split.owners_B, split.ends_B]), device)
    rows = copy.copy(batch)
    rows.reqs = [batch.reqs[owner] for owner in split.owners_B]
    rows.prefix_lens = split.starts_B.tolist()
    rows.extend_lens = split.lengths.tolist()
    rows.extend_num_tokens = len(split.tokens_T)
    rows.extend_logprob_start_lens = [0] * len(rows.reqs)
    rows.input_ids = batch.input_ids[tokens_T]
    rows.out_cache_loc = batch.out_cache_loc[tokens_T]
    rows.seq_lens = ends_B.to(batch.seq_lens.dtype)
    rows.seq_lens_cpu = torch.from_numpy(split.ends_B).to(batch.seq_lens_cpu.dtype)
    rows.seq_lens_sum = int(split.ends_B.sum())
    rows.orig_seq_lens = batch.orig_seq_lens[owners_on_device_B]
    rows.req_pool_indices = batch.req_pool_indices[owners_on_device_B]
    if getattr(batch, "req_pool_indices_cpu", None) is not None:
        rows.req_pool_indices_cpu = batch.req_pool_indices_cpu[owners_B]
    if getattr(batch, "max_seq_len_host", None) is not None:
        rows.max_seq_len_host = int(split.ends_B.max())
    if getattr(batch, "replace_positions", None) is not None:
        # Whoever replaces embeddings has no plan, so all of its tokens are there.
        at = torch.zeros(len(batch.input_ids), dtype=torch.int64, device=device)
        at[tokens_T] = torch.arange(len(split.tokens_T), device=device)
        rows.replace_positions = at[batch.replace_positions]
    if batch.multimodal_inputs is not None:
        rows.multimodal_inputs = [batch.multimodal_inputs[owner] for owner in split.owners_B]
    return rows


def _per_request(batch: Any, split: SplitBatch) -> dict[str, Any]:
    """Return the fields of a forward batch as they would be if each request were one row of its computed tokens."""
    n_requests = len(batch.reqs)
    computed = np.bincount(split.owners_B, weights=split.lengths, minlength=n_requests).astype(np.int64)
    # What is copied stands before the first position whose log probability is asked for.
    skipped = np.array(batch.extend_lens) - computed
    extend_seq_lens = to_device(computed, batch.seq_lens.device).to(torch.int32)
    return {
        "batch_size": n_requests,
        "seq_lens": batch.seq_lens,
        "seq_lens_cpu": batch.seq_lens_cpu,
        "seq_lens_sum": batch.seq_lens_sum,
        "orig_seq_lens": batch.orig_seq_lens,
        "req_pool_indices": batch.req_pool_indices,
        "req_pool_indices_cpu": getattr(batch, "req_pool_indices_cpu", None),
        "extend_seq_lens": extend_seq_lens,
        "extend_seq_lens_cpu": computed.tolist(),
        "extend_logprob_start_lens_cpu": (np.array(batch.extend_logprob_start_lens) - skipped).tolist(),
        "lora_ids": [req.lora_id for req in batch.reqs],
        "rids": [req.rid for req in batch.reqs],
    }
