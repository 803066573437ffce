"""The account of pages: who uses them, which prefixes they hold, and which go first."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.models.decoders import PAGE
from penstock.models.paging import Pages, digests


def test_the_page_that_was_not_used_for_the_longest_time_goes_first() -> None:
    pages = Pages(4)
    old, new = digests(list(range(2 * PAGE)), PAGE), digests(list(range(5, 5 + PAGE)), PAGE)
    first = pages.take(2)
    for page, digest in zip(first, old, strict=True):
        pages.publish(page, digest)
    pages.give_back(first)
    second = pages.take(1)
    pages.publish(second[0], new[0])
    pages.give_back(second)
    assert (pages.used, pages.kept, pages.available) == (0, 3, 4)
    assert pages.share(old[:1]) == first[:1]
    taken = pages.take(2)
    assert first[1] in taken, "the later page of the older prefix"
    assert pages.knows(new[0])
    assert not pages.knows(old[1])
    assert pages.share(old) == first[:1], "used by two now"
    pages.give_back(first[:1])
    assert pages.used == 3
    pages.give_back([*first[:1], *taken])
    assert pages.used == 0


def test_digests_are_of_the_whole_prefix() -> None:
    tokens = list(range(3 * PAGE + 5))
    whole = digests(tokens, PAGE)
    assert len(whole) == len(set(whole)) == 3
    assert digests(tokens, PAGE, whole[:2]) == whole
    assert digests([7, *tokens[1:]], PAGE)[2] != whole[2]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 2)), max_size=60))
def test_every_page_is_free_or_known_or_used(actions: list[tuple[int, int, int]]) -> None:
    pages = Pages(12)
    held: list[list[int]] = []
    prompts = [digests([prompt] * (5 * PAGE), PAGE) for prompt in range(3)]
    for action, count, prompt in actions:
        if action < 3:
            shared = pages.share(prompts[prompt][:count])
            if pages.available < count - len(shared):
                pages.give_back(shared)
                continue
            own = shared + pages.take(count - len(shared))
            for page, digest in zip(own, prompts[prompt], strict=False):
                pages.publish(page, digest)
            held.append(own)
        elif held:
            pages.give_back(held.pop(prompt % len(held)))
        users = Counter(page for own in held for page in own)
        assert pages.used == len(users)
        assert pages._users == [users[page] for page in range(12)]
        assert sorted([*pages._free, *pages._unused, *users]) == list(range(12))
        assert {pages._known[digest] for digest in pages._digests.values()} == set(pages._digests)
