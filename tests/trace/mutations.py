"""JSON values, and what becomes of them by accident."""

from hypothesis import strategies as st

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def mutated(value, draw):
    """Replace, drop or repeat something in a JSON value."""
    if draw(st.integers(0, 9)) == 0:
        return draw(json_values)
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 4)) == 0:
            return {name: kept for name, kept in value.items() if name != key}
        return value | {key: mutated(value[key], draw)}
    if isinstance(value, list) and value:
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], mutated(value[place], draw), *value[place:]]
    return draw(json_values) if draw(st.booleans()) else value
