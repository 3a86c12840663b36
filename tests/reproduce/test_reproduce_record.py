"""The files an experiment leaves."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from irminsul.errors import InputError
from irminsul.machine import Machine
from irminsul.reproduce.figures import Line, Panel, draw_png
from irminsul.reproduce.record import Comparison, Origin, Report, Table, number, verdict, write_report


@dataclass(frozen=True)
class Sizes:
    blocks: int = 3


PANEL = Panel("title", "tokens", "share", (Line("a", (1, 10, 100), (0.1, 0.2, 0.4)),), log_x=10, log_y=True, level=0.2)
SAME = Comparison("water runs down", "down", "down", agrees=True)
OTHER = Comparison("bread falls on its back", "back", "front", agrees=False)
OPEN = Comparison("dice fall on six", "six", "3.5", agrees=None)
ORIGIN = Origin("irminsul reproduce x", "tiny", True, 7, Machine("a computer", 2, 1, "2", "float32"), 1.5)


def report(*comparisons):
    table = Table("Numbers:", ("what", "how much"), (("a", "1"),))
    return Report("x", "A title", "A method.", Sizes(), {"a": 1.0}, (table,), comparisons, (PANEL,), ("A note.",))


def test_a_difference_in_direction_is_said_plainly():
    assert verdict([SAME]) == "In all 1 comparisons our result has the paper's direction."
    assert "differs from the paper's direction** in 1 of 2" in verdict([SAME, OTHER])
    assert verdict([SAME, OTHER]).endswith("bread falls on its back.")


def test_what_is_not_decided_is_neither():
    assert verdict([SAME, OPEN]) == "Our cases do not decide 1 of 2 comparisons."
    assert verdict([OTHER, OPEN]).count("1 of 2") == 2


def test_three_files_hold_the_numbers_and_how_to_make_them_again(tmp_path):
    paths = write_report(report(SAME, OTHER, OPEN), ORIGIN, tmp_path)
    assert [path.name for path in paths] == ["x.json", "x.md", "x.png"]
    data = json.loads(paths[0].read_text())
    assert data["results"] == {"a": 1.0}
    assert data["sizes"] == {"blocks": 3}
    assert (data["command"], data["seed"], data["quick"]) == ("irminsul reproduce x", 7, True)
    assert data["machine"]["processor"] == "a computer"
    assert {"irminsul", "python", "torch", "transformers", "matplotlib"} <= set(data["versions"])
    assert [compared["agrees"] for compared in data["comparisons"]] == [True, False, None]
    text = paths[1].read_text()
    assert "| a | 1 |" in text
    assert "| bread falls on its back | back | front | **no** |" in text
    assert "| dice fall on six | six | 3.5 | not decided |" in text
    assert report(SAME, OTHER, OPEN).verdict in text
    assert "A note." in text
    assert "`irminsul reproduce x` (reduced sizes) in 2 s" in text
    assert "(x.png)" in text


def test_a_picture_is_small_and_the_same_every_time():
    bars = Line("b", ("qa", "agent"), (0.1, 0.2), [(0.05, 0.3), None])
    panels = (PANEL, Panel("title", "task", "share", (bars,), from_zero=True))
    first = draw_png(panels, "a model")
    assert first == draw_png(panels, "a model")
    assert first != draw_png(panels, "another model")
    assert first.startswith(b"\x89PNG")
    assert len(first) < 100_000


def test_a_failed_write_leaves_all_three_files_as_they_were(tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in write_report(report(SAME), ORIGIN, tmp_path)}
    real = Path.write_bytes

    def full_disk(path, content):
        if ".png." in path.name:
            raise OSError(28, "No space left on device")
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(InputError, match=r"cannot write .*x\.png: No space left"):
        write_report(report(OTHER), ORIGIN, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.500"), (0.0, "0.000"), (0.0004, "4.00e-04"), (-0.25, "-0.250"), (12.3456, "12.346")]
)
def test_numbers_show_what_is_there(value, text):
    assert number(value) == text
