from __future__ import annotations

from pdserve_engine.block_hash import HASH_BYTES, BlockHasher
from pdserve_engine.request import Request
from pdserve_protocol.sampling import SamplingParams


def request(token_ids: list[int], salt: str = "") -> Request:
    return Request(request_id="r", prompt_token_ids=token_ids, sampling=SamplingParams(), cache_salt=salt)


def hashes(token_ids: list[int], *, salt: str = "", model_id: str = "m", key: bytes = b"k") -> list[bytes]:
    return BlockHasher(model_id, 2, key).extend(request(token_ids, salt), len(token_ids) // 2)


def test_chain_names_a_block_by_all_that_lies_before() -> None:
    names = hashes([1, 2, 3, 4])
    assert [len(name) for name in names] == [HASH_BYTES, HASH_BYTES]
    assert hashes([1, 2, 3, 4, 5]) == names
    assert hashes([1, 2, 3, 5])[0] == names[0]
    assert hashes([1, 2, 3, 5])[1] != names[1]
    assert hashes([2, 2, 3, 4])[1] != names[1]
    assert hashes([3, 4])[0] != names[1]


def test_everything_that_decides_the_content_is_in_the_name() -> None:
    names = [hashes([1, 2]), hashes([1, 2], salt="s"), hashes([1, 2], model_id="n"), hashes([1, 2], key=b"l")]
    assert len({name for (name,) in names}) == len(names)
    lossy = request([1, 2])
    hasher = BlockHasher("m", 2, b"k")
    assert hasher.extend(lossy, 1) == names[0]
    lossy.set_kv_origin("int8")
    assert hasher.extend(lossy, 1) not in names
    assert hashes([1, 2], model_id="ab", salt="c") != hashes([1, 2], model_id="a", salt="bc")


def test_names_are_computed_once_and_grow_over_the_border_to_the_output() -> None:
    hasher = BlockHasher("m", 2, b"k")
    one = request([1, 2, 3])
    first = hasher.extend(one, 1)
    one.output_token_ids += [4, 5, 6]
    assert hasher.extend(one, 3) == hashes([1, 2, 3, 4, 5, 6])
    assert one.block_hashes[0] is first[0]
