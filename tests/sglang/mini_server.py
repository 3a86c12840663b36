"""SGLang's tree, allocator, pool, requests and admission, with a forward that writes rows one can check.

No model runs. A computed row says which token it belongs to and is turned to its position; so whatever a request finds
in its slots, copied or computed, can be compared with what must be there.
"""

from array import array
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_for_extend
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from irminsul.kernels.row_movers import row_mover
from irminsul.layout import RowLayout
from irminsul.namespace import Namespace
from irminsul.rope import AngleSource, Pairing, RopeSpec, apply_rope
from irminsul.sglang.admission import Planner
from irminsul.sglang.attention import AttentionShape
from irminsul.sglang.cache import IrminsulRadixCache
from irminsul.sglang.donors import DonorIndex
from irminsul.sglang.forward import Splitter
from irminsul.sglang.settings import Settings

LATENT, ROTARY, LAYERS = 8, 4, 2
CONTEXT = 4096


def publish_configuration(model_path):
    """Publish SGLang's configuration for this process, as its scheduler does."""
    arguments = ServerArgs(model_path=str(model_path), device="cpu", skip_tokenizer_init=True, disable_cuda_graph=True)
    publish(arguments, role="scheduler")
    return arguments


class MiniServer:
    """One scheduler's worth of SGLang, driven by hand."""

    def __init__(
        self,
        *,
        slots=2048,
        page_size=1,
        core="python",
        chunk=1024,
        settings=None,
        overlap=False,
        context=CONTEXT,
        computes=True,
    ):
        self.settings = settings or Settings(row_kernel="reference", self_test=False)
        self.chunk = chunk
        self.page_size = page_size
        self.pool = MLATokenToKVPool(
            size=slots,
            page_size=page_size,
            dtype=torch.float32,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROTARY,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.slots = slots
        self.computes = computes
        self.table = ReqToTokenPool(64, context, "cpu", False)
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(slots, torch.float32, "cpu", self.pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(slots, page_size, torch.float32, "cpu", self.pool, False)
        self.cache = IrminsulRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.rope = RopeSpec((1.0, 0.1), Pairing.INTERLEAVED)
        layout = RowLayout(LATENT, ROTARY, "float32")
        index = DonorIndex(
            slots + page_size, page_size=page_size, matcher=self.settings.matcher, seed=7, max_bytes=2**30
        )
        self.cache.attach(index, Namespace(model="mini"), self.settings)
        self.counted = []
        self.planner = Planner(
            self.cache, self.settings.policy, lambda state, step: self.counted.append(step), mixed=False
        )
        mover = row_mover("reference", self.pool.kv_buffer, layout)
        self.splitter = Splitter(self.planner, mover, self.rope, AttentionShape(2, LATENT, ROTARY, 8, 8))
        self.waiting, self.running, self.chunked = [], [], None
        self.served = 0
        self.overlap = overlap
        self.in_flight = 0

    def submit(self, tokens, *, output=2, options=None, logprob_start_len=-1, **arguments):
        """Queue a request."""
        self.served += 1
        sampling = SamplingParams(max_new_tokens=output, custom_params={"irminsul": options} if options else None)
        req = Req(f"r{self.served}", "", array("q", tokens), sampling, **arguments)
        req.logprob_start_len = logprob_start_len
        req.output_tokens = output
        self.waiting.append(req)
        return req

    def step(self):
        """Build and run one prefill batch; return its requests."""
        adder = PrefillAdder(self.page_size, self.cache, self.allocator, None, 0.5, 16_384, self.chunk)
        if self.chunked is not None:
            # As the scheduler: the chunk before is published when the next one is planned.
            checkpoint_kv_cache(self.chunked, self.cache)
            self.chunked.init_next_round_input()
            chunked = self.chunked
            self.chunked = self.planner.admit(adder, chunked, lambda: adder.add_chunked_req(chunked), first=False)
        for req in list(self.waiting):
            if adder.budget_state() is AddReqResult.OTHER:
                break
            req.init_next_round_input(self.cache)
            has_chunked = self.chunked is not None
            result = self.planner.admit(
                adder, req, lambda req=req, has=has_chunked: adder.add_one_req(req, has, None), first=True
            )
            if req in adder.can_run_list:
                self.waiting.remove(req)
            if result is not AddReqResult.CONTINUE:
                break
        if adder.new_chunked_req is not None:
            assert self.chunked is None
            self.chunked = adder.new_chunked_req
        if adder.can_run_list:
            self._run(adder.can_run_list)
        return adder.can_run_list

    def _run(self, reqs):
        batch = SimpleNamespace(
            reqs=reqs,
            prefix_lens=[req.prefix_len for req in reqs],
            extend_lens=[req.extend_len for req in reqs],
            extend_num_tokens=sum(req.extend_len for req in reqs),
            seq_lens=torch.tensor([req.extend_end for req in reqs]),
            seq_lens_cpu=torch.tensor([req.extend_end for req in reqs]),
            orig_seq_lens=torch.tensor([req.extend_end for req in reqs]),
            extend_logprob_start_lens=[req.extend_len for req in reqs],
            input_ids=torch.tensor([token for req in reqs for token in req.get_fill_ids()[req.prefix_len :]]),
            forward_mode=ForwardMode.EXTEND,
            device="cpu",
            req_to_token_pool=self.table,
            tree_cache=self.cache,
            token_to_kv_pool_allocator=self.allocator,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            hisparse_coordinator=None,
            sampling_info=None,
            has_grammar=False,
            multimodal_inputs=None,
        )
        batch.out_cache_loc, batch.req_pool_indices, batch.req_pool_indices_cpu = alloc_for_extend(batch)
        batch.seq_lens_sum = int(batch.seq_lens.sum())
        for req, prefix in zip(reqs, batch.prefix_lens, strict=True):
            # What the tree gave must be right before anything is written.
            self.check_rows(req, prefix)
        self.planner.launched()
        self.in_flight += 1
        rows = self.splitter.make(batch, lambda made: made)
        assert len(rows.prefix_lens) <= self.table.size, "more batch rows than request slots"
        self._write(rows)
        # With overlap, the results of a batch are processed when the next one is running.
        self.end_flights(but=1 if self.overlap else 0)
        for req in reqs:
            self.check_rows(req, req.extend_end)
            if req is not self.chunked:
                checkpoint_kv_cache(req, self.cache)
                self.check_rows(req, req.extend_end)
                self.running.append(req)

    def end_flights(self, but=0):
        """Process the results of batches, except of the last ones."""
        while self.in_flight > but:
            self.planner.processed()
            self.in_flight -= 1

    def _write(self, rows):
        """Compute the rows of a batch: token and turned position."""
        if not self.computes:
            return
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(rows.prefix_lens, rows.extend_lens, strict=True)])
        for layer, buffer in enumerate(self.pool.kv_buffer):
            buffer[rows.out_cache_loc, 0] = self.row(rows.input_ids, positions, layer)

    def row(self, tokens, positions, layer):
        """Return what a row of a token at a position must be, [N, W]."""
        latent = (tokens[:, None] * 16 + layer + torch.arange(LATENT) / 16).float()
        rotary = torch.stack([tokens % 7 + 1, tokens % 5 - 2, tokens % 3 + 1, tokens % 11 - 5], -1).float()
        return torch.cat([latent, apply_rope(rotary, positions, self.rope, AngleSource.TABLE)], -1)

    def check_rows(self, req, length):
        """Compare all rows of a request, below a position, with what they must be."""
        if not self.computes:
            return
        slots = self.table.req_to_token[req.kv.req_pool_idx, :length].long()
        tokens = torch.tensor(list(req.full_untruncated_fill_ids[:length]), dtype=torch.int64)
        for layer, buffer in enumerate(self.pool.kv_buffer):
            expected = self.row(tokens, torch.arange(length), layer)
            assert torch.allclose(buffer[slots, 0], expected, atol=1e-3), f"{req.rid} has a wrong row"

    def finish(self, req, outputs=None):
        """Let a running request draw its tokens and end."""
        for token in outputs or [(len(req.origin_input_ids) * 31 + i) % 997 for i in range(req.output_tokens)]:
            req.output_ids.append(token)
        req.refresh_fill_ids()
        self._decode(req)
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        req.finished_len = len(req.output_ids)
        self.running.remove(req)
        release_kv_cache(req, self.cache, checkpoint=True)

    def _decode(self, req):
        """Give all but the last drawn token a slot and a row; none if there is no room."""
        start, end = req.kv.kv_allocated_len, len(req.full_untruncated_fill_ids) - 1
        count = end - start
        if count <= 0 or self.page_size > 1:
            del req.output_ids[1:]
            req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
            return
        self.allocator.evict_to_free_tokens(self.cache, count)
        slots = self.allocator.alloc(count)
        if slots is None:
            del req.output_ids[1:]
            req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
            return
        self.table.write((req.kv.req_pool_idx, slice(start, end)), slots.to(torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        tokens = torch.tensor(list(req.full_untruncated_fill_ids[start:end]))
        for layer, buffer in enumerate(self.pool.kv_buffer):
            buffer[slots, 0] = self.row(tokens, torch.arange(start, end), layer)

    def abort(self, req):
        """Drop a request wherever it is."""
        if req in self.waiting:
            self.waiting.remove(req)
            return
        if req is self.chunked:
            self.chunked = None
        else:
            self.running.remove(req)
        release_kv_cache(req, self.cache, checkpoint=False)

    def serve(self, tokens, **arguments):
        """Serve one request alone; return it."""
        req = self.submit(tokens, **arguments)
        while req in self.waiting or req is self.chunked:
            assert self.step(), "nothing could run"
        self.finish(req)
        return req

    def flush(self):
        """Empty the tree."""
        self.cache.reset()
        self.allocator.clear()

    def check_identity(self):
        """Every slot is free, in the tree, or held by one request; the index names rows of the tree only."""
        held = [self.chunked] if self.chunked is not None else []
        own = sum(
            -(-req.kv.kv_allocated_len // self.page_size) * self.page_size - req.kv.cache_protected_len
            for req in [*self.running, *held]
        )
        tree = self.cache.evictable_size() + self.cache.protected_size()
        assert self.allocator.available_size() + tree + own == self.slots, (
            self.allocator.available_size(),
            tree,
            own,
        )
        if not self.running and not held:
            assert self.cache.protected_size() == 0, "a donor is still locked"
        everyone = [*self.waiting, *self.running, *held]
        assert not any(self.cache.state_of(req).open_plan for req in everyone)
        if self.in_flight:
            return  # the index may lag behind the tree
        index = self.cache.donors
        index.settle()
        live = np.flatnonzero(index.registry.store.arrays.namespace >= 0)
        in_tree = set(self.cache.all_values_flatten().tolist())
        assert len(in_tree) == tree
        assert set(live.tolist()) <= in_tree, "the index names rows that the tree does not hold"
