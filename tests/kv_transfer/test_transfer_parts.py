"""The small parts: digest, landing pass, coalescing, interfaces, and what must not be used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pdserve_kv_transfer
import pytest
import xxhash
from hypothesis import given, settings, strategies as st
from pdserve_kv_transfer import ucx
from pdserve_kv_transfer.codec import Lander
from pdserve_kv_transfer.digest import DIGEST_NAME, block_digest
from pdserve_kv_transfer.errors import NoSuchInterface
from pdserve_kv_transfer.interfaces import interface_of, interfaces
from pdserve_kv_transfer.landing import LandingZone
from pdserve_kv_transfer.runs import runs
from support.movers import cache_of

PACKAGE = Path(pdserve_kv_transfer.__file__).parent


def test_digest_is_the_named_one() -> None:
    block = cache_of(1, 1000, seed=2)[0]
    assert DIGEST_NAME == "xxh3-128"
    assert block_digest(block) == xxhash.xxh3_128(block.tobytes()).digest()
    block[500] ^= 1
    assert block_digest(block) != xxhash.xxh3_128(b"").digest()


def test_landing_copies_what_is_right_and_nothing_else() -> None:
    cache, sent = cache_of(2, 512), cache_of(1, 512, seed=4)[0]
    lander, slot = Lander(cache, None), sent.copy()
    assert lander.land(slot, block_digest(sent), "id", 0, 1)
    assert np.array_equal(cache[1], sent)
    slot[7] ^= 1
    cache[:] = 9
    assert not lander.land(slot, block_digest(sent), "id", 0, 0)
    assert not cache[0].any()
    assert (cache[1] == 9).all()


def test_what_is_digested_is_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    # A peer that writes once the slot has been read changes nothing, and one that writes meanwhile is noticed: the
    # digest is of the copy.
    cache, sent = cache_of(1, 512), cache_of(1, 512, seed=4)[0]
    slot = sent.copy()

    def torn(source: np.ndarray, target: np.ndarray, name: str | None) -> bytes:
        target[:256] = source[:256]
        source[256:] = 0
        target[256:] = source[256:]
        return block_digest(target)

    monkeypatch.setattr("pdserve_kv_transfer.codec.copy_block_digest", torn)
    assert not Lander(cache, None).land(slot, block_digest(sent), "id", 0, 0)
    assert not cache.any()


def test_an_abandoned_zone_keeps_its_addresses() -> None:
    zone = LandingZone(4, 4096)
    zone.memory_SB[:] = 7
    address = zone.memory_SB.ctypes.data
    assert address % 4096 == 0
    zone.abandon()
    assert zone.memory_SB.ctypes.data == address
    zone.memory_SB[1] = 5
    assert zone.memory_SB[1].all()


def test_neighbours_travel_together() -> None:
    # B112: contiguous ranges, not a descriptor a block.
    assert list(runs([(4, 0), (5, 1), (6, 2), (9, 3), (10, 5)])) == [(4, 0, 3), (9, 3, 1), (10, 5, 1)]
    assert list(runs([])) == []
    assert len(list(runs([(block, block) for block in range(1000)]))) == 1


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.integers(0, 30), st.integers(0, 30), max_size=20))
def test_runs_cover_exactly_the_pieces(pieces: dict[int, int]) -> None:
    covered = [(block + i, slot + i) for block, slot, length in runs(pieces.items()) for i in range(length)]
    assert sorted(covered) == sorted(pieces.items())


def test_interfaces() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"
    assert interface_of("0.0.0.0") is None
    for address, name in interfaces().items():
        assert address.is_link_local or interface_of(str(address)) == name
    with pytest.raises(NoSuchInterface):
        interface_of("198.51.100.7")


def test_the_operators_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mine0")
    ucx.configure_ucx("127.0.0.1")
    assert ucx.os.environ["UCX_NET_DEVICES"] == "mine0"


def test_nothing_executable_travels() -> None:
    # B106: no pickle, and none of NIXL's helpers that use it.
    banned = {"pickle", "get_serialized_descs", "deserialize_descs", "marshal", "eval", "exec"}
    for source in PACKAGE.rglob("*.py"):
        tree = ast.parse(source.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        assert not names & banned, source


@pytest.mark.slow
def test_importing_the_package_needs_no_nixl_and_no_torch() -> None:
    code = (
        "import sys, pdserve_kv_transfer.mover\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('nixl_cu12', 'torch')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
