from __future__ import annotations

import pytest
from pdserve_engine.sampling_random import philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers published with the reference implementation (Random123, kat_vectors).
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_is_a_function_of_seed_choice_and_position():
    base = uniform(1, 2, 3)
    assert uniform(1, 2, 3) == base
    assert len({base, uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4), uniform(1 << 40, 2, 3)}) == 5


def test_negative_seed_is_its_64_bits():
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_uniform_fills_the_unit_interval():
    values = [uniform(42, 0, position) for position in range(4000)]
    assert 0 <= min(values) < 0.002
    assert 0.998 < max(values) < 1
    counts = [sum(i / 10 <= value < (i + 1) / 10 for value in values) for i in range(10)]
    assert all(330 < count < 470 for count in counts)
