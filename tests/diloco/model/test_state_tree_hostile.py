"""Invalid state trees raise ValueError, whatever they contain."""

from __future__ import annotations

import pytest

from diloco.model.state_tree import join_tree


@pytest.mark.parametrize(
    "skeleton",
    [{"dict": [1]}, {"dict": [[[1], 2]]}, {"dict": [["a"]]}, {"dict": [[None, 1]]}, {"list": 1}],
)
def test_an_invalid_tree_is_a_value_error(skeleton: object) -> None:
    with pytest.raises(ValueError, match="expected a"):
        join_tree(skeleton, {})
