"""The weights we recompute are those of the model's attention."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from irminsul.engine.model import MlaModel
from irminsul.reproduce.rows import extend, prefill
from irminsul.reproduce.watch import attention_weights, watched
from irminsul.testing.tiny import write_tiny_checkpoint


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_weights_times_values_are_what_the_attention_gives(tmp_path, material, family):
    """Against the attention's own output, by its own forms, in every layer."""
    model = MlaModel.load(write_tiny_checkpoint(tmp_path, family, yarn=True, q_lora=True))
    seen = []

    def look(layer, attention, query_THD, rows_SW):
        latent_dim = attention.kv_b.shape[1]
        weights_QHS = attention_weights(attention, query_THD[-9:], rows_SW, len(rows_SW) - 9)
        values_HVC = attention.kv_b.view(attention.n_heads, -1, latent_dim)[:, attention.nope_dim :]
        values_HSV = (
            F.linear(rows_SW[:, :latent_dim], values_HVC.flatten(0, 1)).view(len(rows_SW), 4, -1).transpose(0, 1)
        )
        seen.append((layer, weights_QHS, torch.einsum("qhs,hsv->qhv", weights_QHS, values_HSV)))

    ids_S = material.sources_T[:60]
    outputs = attention_outputs(watched(model, look), prefill, ids_S)
    assert [layer for layer, _, _ in seen] == [0, 1, 2]
    for (_, weights_QHS, ours_QHV), theirs_THV in zip(seen, outputs, strict=True):
        torch.testing.assert_close(ours_QHV, theirs_THV[-9:], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(weights_QHS.sum(dim=-1), torch.ones(9, 4))
        for query in range(9):
            assert bool((weights_QHS[query, :, 51 + query + 1 :] == 0).all())


def attention_outputs(model, run, *args):
    """What each attention returns while the model runs."""
    outputs = []
    own = type(model.layers[0].attention)

    class Recorded(own):
        def __call__(self, *inputs):
            outputs.append(super().__call__(*inputs))
            return outputs[-1]

    for layer in model.layers:
        object.__setattr__(layer.attention, "__class__", Recorded)
    run(model, *args)
    return outputs


def test_a_watched_model_computes_the_same(model, material):
    queries = []
    watching = watched(model, lambda _layer, _attention, query_THD, _rows: queries.append(len(query_THD)))
    ids_S = material.sources_T[:40]
    assert torch.equal(prefill(watching, ids_S), prefill(model, ids_S))
    pool_LSW = prefill(model, ids_S)
    assert torch.equal(extend(watching, pool_LSW.clone(), ids_S[33:]), extend(model, pool_LSW, ids_S[33:]))
    assert queries == [40] * 3 + [7] * 3


def test_queries_behind_the_rows_are_an_error(model):
    attention = model.layers[0].attention
    rows_SW, query_QHD = torch.zeros(5, model.layout.width), torch.zeros(2, 4, model.config.qk_head_dim)
    assert attention_weights(attention, query_QHD, rows_SW, 3).shape == (2, 4, 5)
    with pytest.raises(AssertionError):
        attention_weights(attention, query_QHD, rows_SW, 4)
