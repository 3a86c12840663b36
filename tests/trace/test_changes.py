import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul.trace.changes import FIXES, ChangeClass, common_length, value_change

CASES = [
    ("2026-01-05T10:00:01Z", "2026-01-05T10:00:02Z", ChangeClass.TIMESTAMP),
    ("2026-01-05 09:59:01.123", "2026-01-06 10:00:02.000", ChangeClass.TIMESTAMP),
    ("Monday, January 5, 2026 at 10:30 AM", "Monday, January 5, 2026 at 10:31 AM", ChangeClass.TIMESTAMP),
    ("1767607201", "1767607999", ChangeClass.TIMESTAMP),
    ("2026-01-05", "2026-01-06", ChangeClass.DATE),
    ("January 5, 2026", "February 6, 2026", ChangeClass.DATE),
    ("10:30", "10:31", ChangeClass.TIME),
    ("123e4567-e89b-12d3-a456-426614174000", "123e4567-e89b-12d3-a456-42661417ffff", ChangeClass.ID),
    ("req_8fa3b2c1d0", "req_77a3b2c1d0", ChangeClass.ID),
    ("/home/anna/project/a.py", "/home/bert/project/a.py", ChangeClass.PATH),
    ("17", "18", ChangeClass.NUMBER),
    ("9", "10", ChangeClass.NUMBER),
    ("1,024.5", "1,025.5", ChangeClass.NUMBER),
]


@pytest.mark.parametrize(("old", "new", "kind"), CASES, ids=[case[0] for case in CASES])
def test_a_value_in_place_of_another_is_told_by_its_kind(old: str, new: str, kind: ChangeClass) -> None:
    frame = "You help.\nNow: {}\nRules follow."
    change = value_change(frame.format(old), frame.format(new))
    assert change is not None
    assert (change.kind, change.old, change.new, change.before) == (kind, old, new, "Now: ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Now: 17\nRules follow.", "Now: 18 and then something else"),  # what follows differs, too
        ("The cat sat.", "The dog sat."),
        ("Now: 17", "Now: soon"),
        ("same", "same"),
        ("", ""),
    ],
)
def test_other_differences_are_no_values(old: str, new: str) -> None:
    assert value_change(old, new) is None


@given(st.text(max_size=80), st.text(max_size=80), st.text(max_size=80))
def test_values_stand_where_the_change_says(before: str, old: str, new: str) -> None:
    change = value_change(before + old, before + new)
    if change is not None:
        assert change.old != change.new
        assert change.old in before + old
        assert change.new in before + new
        assert "\n" not in change.before


@given(st.text(), st.text(), st.text())
def test_common_length_is_the_longest_common_prefix(shared: str, left: str, right: str) -> None:
    n = common_length(shared + left, shared + right)
    assert (shared + left)[:n] == (shared + right)[:n]
    assert n >= len(shared)
    assert (shared + left)[n : n + 1] != (shared + right)[n : n + 1] or n == len(shared + left) == len(shared + right)


def test_every_class_has_a_fix_of_one_line() -> None:
    assert set(FIXES) == set(ChangeClass)
    assert all(fix.endswith(".") and "\n" not in fix for fix in FIXES.values())
