"""Names that a user chooses from."""

from enum import StrEnum

import pytest

from irminsul.choices import parse_choice
from irminsul.errors import InputError


class Colour(StrEnum):
    RED = "red"
    BLUE = "dark blue"


def test_a_known_name_is_taken():
    assert parse_choice(Colour, "dark blue", "colour") is Colour.BLUE


def test_an_unknown_name_is_refused_with_the_valid_ones():
    with pytest.raises(InputError, match=r"^unknown colour 'green'; valid colours: red, dark blue$"):
        parse_choice(Colour, "green", "colour")
    with pytest.raises(InputError, match=r"^unknown wall colour 'RED'; valid paints: red, dark blue$"):
        parse_choice(Colour, "RED", "wall colour", "paints")
