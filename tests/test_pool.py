"""The pool and its layers, apart from any device: sizes, bounds, statistics, limits."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.drivers.driver import Memory
from penstock.errors import OutOfDeviceMemory, SettingError
from penstock.memory.pool import EXACT_FROM, GRANULE, BufferPool, size_class
from penstock.memory.resource import Limit, Statistics
from penstock.memory.trace import Trace


class Bytes:
    """A fake driver: allocates numbered memory, at most `most` bytes, and knows live allocations."""

    def __init__(self, most: int = 1 << 60) -> None:
        self.most = most
        self.out: dict[int, Memory] = {}
        self.failing = 0  # how many of the next requests fail

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.out.values())

    def reserve(self, nbytes: int) -> Memory:
        if self.failing or self.nbytes + nbytes > self.most:
            self.failing = max(self.failing - 1, 0)
            raise OutOfDeviceMemory("none left", asked=nbytes)
        memory = Memory(None, nbytes, None)
        self.out[id(memory)] = memory
        return memory

    def release(self, memory: Memory) -> None:
        del self.out[id(memory)]  # twice would be a KeyError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.integers(1, 1 << 40))
def test_a_size_class_wastes_less_than_an_eighth_or_a_granule(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % GRANULE == 0
    assert size - nbytes < max(nbytes / 8, GRANULE)
    assert size_class(size) == size
    if nbytes >= EXACT_FROM:
        assert size - nbytes < GRANULE


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_size_classes_keep_the_order_of_sizes(first: int, second: int) -> None:
    small, large = sorted((first, second))
    assert size_class(small) <= size_class(large)


def test_there_are_few_classes() -> None:
    assert len({size_class(n) for n in range(1, 1 << 20, 64)}) < 90


def test_released_memory_serves_the_next_request_of_its_class() -> None:
    driver = Bytes()
    pool = BufferPool(driver)
    first = pool.reserve(5000)
    pool.release(first)
    assert pool.reserve(4900) is first
    stats = pool.stats()
    assert (stats.hits, stats.misses, stats.reuse_count, stats.allocation_count) == (1, 1, 1, 1)
    assert stats.hit_rate == 0.5
    assert stats.live_bytes == first.nbytes == stats.peak_bytes
    pool.release(first)
    stats = pool.stats()
    assert (stats.live_bytes, stats.pooled_bytes, stats.total_pooled, stats.size_classes) == (0, 5120, 1, 1)
    assert stats.fragmentation == 1.0


def test_a_class_keeps_as_many_blocks_as_its_capacity() -> None:
    driver = Bytes()
    pool = BufferPool(driver, capacity=20)
    blocks = [pool.reserve(1000) for _ in range(30)] + [pool.reserve(3000) for _ in range(5)]
    for block in blocks:
        pool.release(block)
    assert pool.stats().total_pooled == 25
    assert BufferPool(driver).capacity == 512


def test_bounds_that_are_lowered_take_effect_at_once() -> None:
    driver, clock = Bytes(), Clock()
    pool = BufferPool(driver, clock=clock)
    for memory in [pool.reserve(nbytes) for nbytes in [256] * 8 + [4096] * 8]:
        pool.release(memory)
    assert pool.stats().total_memory == driver.nbytes == 8 * (256 + 4096)
    pool.capacity = 3
    assert (pool.capacity, driver.nbytes) == (3, 3 * (256 + 4096))
    pool.max_bytes = 2 * 4096
    assert (pool.max_bytes, pool.stats().pooled_bytes) == (2 * 4096, driver.nbytes)
    assert driver.nbytes <= 2 * 4096
    clock.now += 20
    pool.idle_seconds = 10
    assert (pool.idle_seconds, driver.nbytes) == (10, 0)
    held = pool.reserve(300)
    pool.release(pool.reserve(256))
    assert pool.stats().total_memory == driver.nbytes == held.nbytes + 256
    pool.capacity = 0
    assert pool.stats().total_memory == driver.nbytes == held.nbytes


@pytest.mark.parametrize("name", ["capacity", "max_bytes", "idle_seconds"])
@pytest.mark.parametrize("wrong", [-1, float("nan"), "many", None, True])
def test_bounds_that_cannot_be_are_refused_and_change_nothing(name: str, wrong: object) -> None:
    pool = BufferPool(Bytes())
    before = getattr(pool, name)
    with pytest.raises(SettingError, match=f"pool's {name}"):
        setattr(pool, name, wrong)
    assert getattr(pool, name) == before
    pool.release(pool.reserve(256))
    assert pool.stats().total_pooled == 1


def test_the_pool_keeps_at_most_max_bytes_and_forgets_the_longest_idle_first() -> None:
    driver, clock = Bytes(), Clock()
    pool = BufferPool(driver, max_bytes=4096, clock=clock)
    blocks = {size: pool.reserve(size) for size in (1024, 2048, 1536)}
    for block in blocks.values():
        clock.now += 1
        pool.release(block)
        pool.stats()  # sorts in what was released, at this time
    assert pool.stats().pooled_bytes == 2048 + 1536
    assert id(blocks[1024]) not in driver.out
    large = pool.reserve(1 << 20)
    pool.release(large)
    assert pool.stats().pooled_bytes == 2048 + 1536, "a block that cannot stay must not push others out"


def test_what_idles_too_long_goes_back() -> None:
    driver, clock = Bytes(), Clock()
    pool = BufferPool(driver, idle_seconds=10, clock=clock)
    for size, now in ((1024, 0), (2048, 8)):
        clock.now = now
        pool.release(pool.reserve(size))
        pool.stats()
    clock.now = 11
    assert pool.expire() == 1024
    assert pool.stats().pooled_bytes == 2048
    clock.now = 40
    pool.reserve(512)  # any miss looks as well
    assert pool.stats().pooled_bytes == 0


def test_shrink_to_fit_clear_and_clear_size() -> None:
    driver = Bytes()
    pool = BufferPool(driver)
    blocks = [pool.reserve(size) for size in (1024, 1024, 2048, 4096)]
    for block in blocks:
        pool.release(block)
    assert pool.clear_size(1000) == 2048
    assert pool.shrink_to_fit(5000) == 2048
    assert pool.stats().pooled_bytes == 4096 == driver.nbytes
    assert pool.clear() == 4096
    assert driver.nbytes == 0 == pool.clear()


def test_peak_counts_what_was_live_and_can_be_reset() -> None:
    pool = BufferPool(Bytes())
    a, b = pool.reserve(1024), pool.reserve(2048)
    pool.release(b)
    assert pool.stats().peak_bytes == 3072
    pool.reset_peak()
    assert pool.stats().peak_bytes == 1024 == a.nbytes


def test_idle_blocks_make_room_for_a_request_that_would_not_fit_beside_them() -> None:
    driver = Bytes(most=10_240)
    pool = BufferPool(driver)
    for block in [pool.reserve(1024) for _ in range(8)]:
        pool.release(block)
    assert pool.reserve(10_000).nbytes == 10_240  # only when all idle blocks are gone
    assert pool.stats().pooled_bytes == 0


@given(limit=st.integers(1, 1 << 22), data=st.data())
def test_a_limit_is_exact(limit: int, data: st.DataObject) -> None:
    """A request that fits beside the live bytes always succeeds; others always fail, without side effects."""
    driver = Bytes()
    pool = BufferPool(Limit(driver, limit))
    live: list[Memory] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if live and data.draw(st.booleans()):
            pool.release(live.pop())
            continue
        free = limit - pool.stats().live_bytes
        fits = data.draw(st.booleans())
        if fits and free:
            nbytes = data.draw(st.integers(1, free))
            live.append(pool.reserve(nbytes))
            assert live[-1].nbytes >= nbytes
        else:
            before = pool.stats().live_bytes
            with pytest.raises(OutOfDeviceMemory):
                pool.reserve(free + 1)
            assert pool.stats().live_bytes == before
        assert driver.nbytes <= limit


def test_a_pool_reaches_its_own_limit_to_the_last_byte() -> None:
    pool = BufferPool(Limit(Bytes(), 1_000_003))
    assert pool.reserve(1_000_003).nbytes == 1_000_003


def test_a_block_made_to_measure_is_not_kept() -> None:
    driver = Bytes()
    pool = BufferPool(Limit(driver, 1000))
    pool.release(pool.reserve(1000))
    assert pool.stats().total_pooled == 0 == driver.nbytes


def test_statistics_count_what_passes_through() -> None:
    counted = Statistics(Bytes())
    a, b = counted.reserve(10), counted.reserve(20)
    counted.release(a)
    assert (counted.allocation_count, counted.free_count, counted.nbytes, counted.peak_bytes) == (
        2,
        1,
        20,
        30,
    )
    assert b.nbytes == 20


def test_a_trace_ranks_the_lines_that_hold_memory() -> None:
    trace = Trace(BufferPool(Bytes()))
    small = trace.reserve(300)
    large = [trace.reserve(1024) for _ in range(3)]
    (first, first_bytes), (_, second_bytes) = trace.owners()
    assert "test_pool.py:" in first
    assert (first_bytes, second_bytes) == (3072, 512)
    assert trace.owners(most=1) == [(first, 3072)]
    for memory in large:
        trace.release(memory)
    trace.release(small)
    assert trace.owners() == []


class PoolMachine(RuleBasedStateMachine):
    """Random reserve, release, trim, failure and time against the simplest model: a list of live blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.driver, self.clock = Bytes(most=1 << 22), Clock()
        self.pool = BufferPool(
            Limit(self.driver, 3 << 20), capacity=3, max_bytes=1 << 19, idle_seconds=10, clock=self.clock
        )
        self.live: list[Memory] = []
        self.requests = 0

    def reserve_or_fail(self, nbytes: int, failing: bool = False) -> None:
        try:
            memory = self.pool.reserve(nbytes)
        except OutOfDeviceMemory:
            held = sum(memory.nbytes for memory in self.live)
            assert failing or held + max(nbytes, 1) > 3 << 20, "refused what fits"  # none takes no byte
            return
        self.requests += 1
        assert memory.nbytes >= nbytes
        assert all(memory is not other for other in self.live), "handed out twice"
        self.live.append(memory)

    @rule(nbytes=st.one_of(st.integers(0, 10_000), st.integers(0, 1 << 20)))
    def reserve(self, nbytes: int) -> None:
        self.driver.failing = 0
        self.reserve_or_fail(nbytes)

    @rule(nbytes=st.integers(0, 1 << 20), times=st.integers(1, 4))
    def reserve_while_the_driver_fails(self, nbytes: int, times: int) -> None:
        self.driver.failing = times
        before = Counter(map(id, self.live))
        try:
            self.reserve_or_fail(nbytes, failing=True)
        finally:
            self.driver.failing = 0
        assert before <= Counter(map(id, self.live))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @rule(seconds=st.integers(0, 30))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds
        self.pool.expire()

    @rule(max_bytes=st.integers(0, 1 << 20))
    def shrink(self, max_bytes: int) -> None:
        self.pool.shrink_to_fit(max_bytes)
        assert self.pool.stats().pooled_bytes <= max_bytes

    @rule(nbytes=st.integers(0, 10_000))
    def clear_size(self, nbytes: int) -> None:
        self.pool.clear_size(nbytes)

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        stats = self.pool.stats()
        assert stats.live_bytes == sum(memory.nbytes for memory in self.live)
        assert stats.live_bytes + stats.pooled_bytes == self.driver.nbytes <= 3 << 20
        assert stats.total_pooled == len(self.driver.out) - len(self.live)
        assert all(id(memory) in self.driver.out for memory in self.live), "given back while in use"
        assert stats.pooled_bytes <= 1 << 19
        assert stats.hits + stats.misses == self.requests
        assert stats.allocation_count >= stats.misses
        assert stats.peak_bytes >= stats.live_bytes


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_finalisers_may_release_inside_any_call_of_the_pool() -> None:
    """The collector can run a finaliser in the middle of `reserve`: nothing may lock, nothing be lost."""
    driver = Bytes()
    pool = BufferPool(driver)

    class Holder:
        def __init__(self) -> None:
            self.me = self  # a cycle, so that only the collector frees it
            self.memory = pool.reserve(700)

        def __del__(self) -> None:
            pool.release(self.memory)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Holder()
            pool.stats()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    stats = pool.stats()
    assert (stats.live_bytes, stats.pooled_bytes) == (0, driver.nbytes)
