"""Scopes of requests."""

from hypothesis import given
from hypothesis import strategies as st

from irminsul.sglang.requests import tree_key

NAMES = st.text(alphabet="a\x1ft=enant", max_size=12)


@given(NAMES | st.none(), NAMES, NAMES | st.none(), NAMES)
def test_no_two_scopes_share_a_tree(extra_key, tenant, other_key, other_tenant):
    # SGLang takes a missing and an empty key for different trees; a tenant's tree does not need to.
    same = (extra_key or "", tenant) == (other_key or "", other_tenant) and (tenant or extra_key == other_key)
    assert (tree_key(extra_key, tenant) == tree_key(other_key, other_tenant)) == bool(same)


def test_a_plain_key_stays_as_it_is():
    assert tree_key("lora-1", "") == "lora-1"
    assert tree_key(None, "") is None
