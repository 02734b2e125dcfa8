"""KvPool: references, names, and who is given up first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.policy.pool import ROOT, KvPool, Leaving, block_digest


def digests(*blocks: list[int]) -> list[bytes]:
    chain = []
    for tokens in blocks:
        chain.append(block_digest(chain[-1] if chain else ROOT, tokens))
    return chain


def published(pool: KvPool, names: list[bytes]) -> list[int]:
    """Take, publish and release as many blocks as there are names."""
    blocks = pool.take(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    pool.release(blocks)
    return blocks


def test_a_name_depends_on_every_token_before():
    assert digests([1, 2], [3, 4])[1] != digests([9, 2], [3, 4])[1]
    assert digests([1, 2], [3, 4]) == digests([1, 2], [3, 4])
    assert digests([1, 2])[0] != digests([2, 1])[0]
    assert len(digests([1])[0]) == 16


def test_take_is_all_or_nothing():
    pool = KvPool(4, 2)
    pool.take(3)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 available"):
        pool.take(2)
    assert (pool.used, pool.free) == (3, 1)
    pool.check()


def test_released_blocks_with_a_name_are_found_again_and_count_as_unused():
    pool = KvPool(4, 2)
    names = digests([1, 2], [3, 4])
    blocks = published(pool, names)
    assert (pool.used, pool.free, pool.reusable, pool.available) == (0, 2, 2, 4)
    assert pool.find(names) == blocks
    pool.share(blocks)
    assert (pool.used, pool.reusable) == (2, 0)
    pool.check()


def test_a_chain_is_found_only_up_to_its_first_gap():
    pool = KvPool(4, 2)
    names = digests([1, 2], [3, 4], [5, 6])
    blocks = published(pool, names)
    assert pool.find([names[0], b"unknown", names[2]]) == blocks[:1]


def test_free_blocks_go_before_named_ones_and_the_tail_of_a_chain_before_its_head():
    pool = KvPool(4, 2)
    names = digests([1, 2], [3, 4], [5, 6])
    blocks = published(pool, names)
    pool.take(1)
    assert pool.find(names) == blocks
    pool.take(1)
    assert pool.find(names) == blocks[:2]
    pool.take(1)
    assert pool.find(names) == blocks[:1]
    pool.check()


def test_the_least_recently_used_chain_is_given_up_first():
    pool = KvPool(4, 2)
    old, young = digests([1, 2], [3, 4]), digests([5, 6], [7, 8])
    old_blocks = published(pool, old)
    published(pool, young)
    pool.share(old_blocks)  # used once more: now the other is the old one
    pool.release(old_blocks)
    pool.take(2)
    assert pool.find(young) == []
    assert pool.find(old) == old_blocks


def test_of_two_blocks_with_the_same_content_the_first_is_known():
    pool = KvPool(4, 2)
    (name,) = digests([1, 2])
    first, second = pool.take(2)
    pool.publish(first, name)
    pool.publish(second, name)
    pool.release([second])
    assert pool.find([name]) == [first]
    assert pool.free == 3, "the nameless twin is simply free"
    pool.check()


def test_leaving_frees_what_nobody_else_holds():
    pool = KvPool(4, 2)
    blocks = published(pool, digests([1, 2], [3, 4]))
    pool.share(blocks)
    pool.share(blocks[:1])
    leaving = Leaving(pool)
    assert leaving.add(blocks) == 1, "the first block is held by another too"
    assert leaving.add(blocks[:1]) == 1, "who leaves now, too"
    assert leaving.remove(blocks) == 2
    assert leaving.freed == 0
    assert leaving.add(blocks) == leaving.freed == 2


def test_what_somebody_is_about_to_take_over_does_not_become_free():
    pool = KvPool(4, 2)
    blocks = pool.take(3)
    leaving = Leaving(pool, kept=blocks[:2])
    assert leaving.add(blocks) == leaving.remove(blocks) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_any_order_of_taking_sharing_and_releasing_keeps_the_book_whole(moves):
    pool = KvPool(8, 2)
    chains = [digests(*[[chain, index] for index in range(4)]) for chain in range(3)]
    held: list[list[int]] = []
    for move, number, which in moves:
        chain = chains[which % 3]
        if move == 0 and number <= pool.available:
            held.append(pool.take(number))
        elif move == 1:
            found = pool.find(chain[:number])
            pool.share(found)
            held.append(found)
        elif move == 2 and held:
            blocks = held[number % len(held)]
            start = len(pool.find(chain))
            for block, name in zip(blocks, chain[start:]):
                if pool.refs(block) == 1 and pool._digest_of[block] is None:
                    pool.publish(block, name)
        elif held:
            pool.release(held.pop(number % len(held)))
        pool.check()
        assert pool.used == len({block for blocks in held for block in blocks})
        assert pool.free + pool.reusable + pool.used == 8
