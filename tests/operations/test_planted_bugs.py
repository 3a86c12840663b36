"""The random operations can fail: each bug that is planted is found, and soon."""

import pytest
from planted_bugs import PLANTED, operations_until_found


@pytest.mark.parametrize(("host", "bug"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_it_is_found(host, bug):
    assert operations_until_found(host, bug) is not None
