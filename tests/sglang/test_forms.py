"""Which form of attention the batch rows of a plan take, by SGLang's own choice and ours."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.sglang

PROMPT = 8192


@pytest.fixture(scope="module")
def sglang(published):
    """SGLang's choice for FlashAttention 3, its forms and its modes; and ours."""
    del published
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    from irminsul.sglang import attention, forward

    return SimpleNamespace(
        choose=lambda attention, batch: handlers._handle_attention_backend(attention, batch, "fa3"),
        forms=AttnForwardMethod,
        extend=ForwardMode.EXTEND,
        key_blocks=attention.KeyBlocks.of,
        unsplit=forward.Unsplit,
        many=forward.MANY_COMPUTED,
    )


def form(sglang, shifted, *, absorbed=False, shares_keys=True, without_up_projection=False):
    """The form for a prompt with 200 new tokens, so many shifted ones, and the rest new; SGLang's threshold stays."""
    starts, ends = np.array([0, 200 + shifted]), np.array([200, PROMPT])
    batch = SimpleNamespace(
        forward_mode=sglang.extend,
        extend_prefix_lens_cpu=starts.tolist(),
        seq_lens_cpu=ends.tolist(),
        get_max_chunk_capacity=lambda: 131_072,
    )
    attention = SimpleNamespace(
        disable_chunked_prefix_cache=without_up_projection, chunked_prefix_cache_threshold=PROMPT
    )
    unsplit = sglang.unsplit(
        per_request={},
        absorbed=absorbed,
        computed=int((ends - starts).sum()),
        blocks=sglang.key_blocks(np.array([0, 0]), ends) if shares_keys else None,
        table=torch.arange(PROMPT, dtype=torch.int32)[None],
        lines=[0],
    )
    chosen = unsplit.choose(sglang.choose, attention, batch)
    assert attention.chunked_prefix_cache_threshold == PROMPT
    if chosen is sglang.forms.MHA_ONE_SHOT:
        assert len(batch.mha_one_shot_kv_indices) == PROMPT
    return chosen


def test_many_tokens_behind_few_shifted_ones_are_up_projected(sglang):
    assert form(sglang, 2048) is sglang.forms.MHA_ONE_SHOT


def test_few_computed_tokens_take_the_form_that_sglang_takes(sglang):
    assert form(sglang, PROMPT - sglang.many) is sglang.forms.MHA_ONE_SHOT
    assert form(sglang, PROMPT - sglang.many + 1) is sglang.forms.MLA


@pytest.mark.parametrize(
    "reason", [{"absorbed": True}, {"shares_keys": False}, {"without_up_projection": True}], ids=lambda r: next(iter(r))
)
def test_whatever_else_speaks_against_it_counts(sglang, reason):
    assert form(sglang, 2048, **reason) is sglang.forms.MLA


def test_a_threshold_that_the_operator_set_counts(sglang, monkeypatch):
    monkeypatch.setenv("SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD", str(PROMPT))
    assert form(sglang, 2048) is sglang.forms.MLA


def test_the_threshold_is_restored_when_the_choice_fails(sglang):
    attention = SimpleNamespace(chunked_prefix_cache_threshold=PROMPT)
    blocks = sglang.key_blocks(np.array([0]), np.array([PROMPT]))
    unsplit = sglang.unsplit({}, False, PROMPT, blocks, torch.empty(0), [0])
    with pytest.raises(ZeroDivisionError):
        unsplit.choose(lambda *_: 1 / 0, attention, None)
    assert attention.chunked_prefix_cache_threshold == PROMPT
