"""Splitting cores between nodes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from pdserve_cli.cores import split_cores


@pytest.mark.parametrize(
    ("cores", "num_nodes", "split"),
    [
        ([0, 1], 2, [(0,), (1,)]),
        ([4, 0, 2], 2, [(0, 2), (4,)]),
        (range(8), 3, [(0, 1, 2), (3, 4, 5), (6, 7)]),
        ([5], 3, [(5,), (5,), (5,)]),
        ([0, 1], 3, [(0,), (1,), (0,)]),
    ],
)
def test_split(cores: list[int], num_nodes: int, split: list[tuple[int, ...]]) -> None:
    assert split_cores(cores, num_nodes) == split


@given(st.sets(st.integers(0, 300), min_size=1, max_size=64), st.integers(1, 16))
def test_every_node_has_a_core_and_no_core_two_nodes(cores: set[int], num_nodes: int) -> None:
    split = split_cores(sorted(cores), num_nodes)
    assert len(split) == num_nodes
    assert all(share for share in split)
    if len(cores) >= num_nodes:
        assert sorted(core for share in split for core in share) == sorted(cores)
        assert max(map(len, split)) - min(map(len, split)) <= 1


def test_nothing_to_split_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 cores"):
        split_cores([], 1)
