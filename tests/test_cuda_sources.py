"""Every kernel that the suite generates for CUDA compiles with NVRTC, also on machines without a GPU."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest
from test_random_graphs import grown

import penstock as ps
from penstock import Device, nn, optim
from penstock.compiler.launches import arranged, launch_parts, may_begin_early
from penstock.compiler.pipeline import compile_graph
from penstock.compiler.target import Target
from penstock.drivers.binaries import Binaries
from penstock.drivers.cuda import compile_text
from penstock.drivers.cuda import launches as cuda_launches
from penstock.drivers.cuda.graphs import _edge
from penstock.drivers.driver import Event, Grid, Kernel, Queue, Source
from penstock.drivers.host import HostDriver
from penstock.errors import CompileError, PenstockWarning
from penstock.execution.executable import Executable
from penstock.execution.realize import executables
from penstock.execution.structure import Structure
from penstock.graph import contraction, elementwise, moving_slices, quantization, reducing, shaping
from penstock.graph.dtypes import bfloat16, checked
from penstock.graph.gradient import gradients
from penstock.graph.node import Node, leaf, placeholder
from penstock.graph.paged_attention import paged_attention
from penstock.kernels.cache import KernelCache, whole_text
from penstock.kernels.concatenation import Call
from penstock.kernels.hazards import Touched
from penstock.kernels.sizes import Sizes
from penstock.kernels.source import KernelSource
from penstock.tuning_cache import TuningCache

BOOL, UINT32 = np.dtype(bool), np.dtype(np.uint32)
WHOLE = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = [BOOL, *WHOLE, *(np.dtype(f"float{bits}") for bits in (16, 32, 64)), bfloat16]
QUICK = [BOOL, np.dtype("uint8"), np.dtype("int64"), np.dtype("float16"), np.dtype("float32"), bfloat16]
TRIED = DTYPES if conftest.whole else QUICK
ARCHITECTURES = ("sm_80", "sm_90")
_TOGETHER = 32  # kernels in a source


class Imagined(HostDriver):
    """A CUDA device that holds memory and computes nothing."""

    def __init__(self, tensor_cores: bool = False) -> None:
        super().__init__("cuda-imagined", shared_memory=False)
        self.capabilities = replace(
            self.capabilities,
            tensor_cores=tensor_cores,
            kind="gpu",
            language="cuda",
            offset_alignment=256,
            compute_units=132,
            local_bytes=48 << 10,
        )

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        return {name: Kernel(name, signature, None) for name, signature in signatures.items()}

    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Sequence[Any]) -> Any:
        return (lambda *_: None), [None] * len(args)

    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        pass

    def launch(self, queue: Queue, kernel: Kernel, *rest: Any) -> Event:
        return self._record(queue, lambda: None, None)


class Gathering(KernelCache):
    """Keeps the sources of all kernels, of which each has a name of its own."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.sources: dict[str, KernelSource] = {}

    def kernels(self, sources: Sequence[KernelSource], functions: Mapping[str, Any]) -> list[Kernel]:
        for source in sources:
            if source.name not in functions:
                assert self.sources.setdefault(source.name, source).text == source.text
        return super().kernels(sources, functions)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    monkeypatch.setattr(Executable, "_on_host", lambda *_: None)  # it would read what was not computed
    made = Device.over(Imagined(getattr(request, "param", False)))
    executables(made).kernels = Gathering(made)
    yield made
    made.close()


class Given:
    """Makes leaves, of zeros."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Node:
        return leaf(self._device.upload(np.zeros(shape, dtype)), shape, dtype)


@pytest.fixture
def given(device: Device) -> Given:
    return Given(device)


def build(device: Device, wanted: Sequence[Node]) -> None:
    """The program of some nodes, run on a device that computes nothing: the first run writes its kernels."""
    structure = Structure(wanted)
    built = executables(device).build(structure)
    built.run([node.value for node in structure.inputs], structure.constants())


def check(device: Device, at_least: int, architectures: Sequence[str] = ()) -> None:
    """All that was gathered compiles for the architectures that are named, or for the newest.

    Without names, the whole suite compiles every second source for the oldest too: only the prelude, which
    each of them has, depends on the architecture.
    """
    gathered = executables(device).kernels
    assert isinstance(gathered, Gathering)
    sources = list(gathered.sources.values())
    assert len(sources) >= at_least
    parts = [sources[start : start + _TOGETHER] for start in range(0, len(sources), _TOGETHER)]
    texts = [whole_text(part, "cuda") for part in parts]
    pairs = list(itertools.product(texts, architectures or ARCHITECTURES[-1:]))
    if conftest.whole and not architectures:
        pairs += itertools.product(texts[::2], ARCHITECTURES[:1])
    with ThreadPoolExecutor(2) as threads:
        for code in threads.map(lambda pair: compile_text(*pair), pairs):
            assert code.startswith(b"\x7fELF")


def applied(given: Given, primitive: Any, dtype: np.dtype[Any]) -> Node | None:
    """A primitive of one, two or three inputs; None if NumPy does not have it for the dtype."""
    for count in (1, 2, 3):
        inputs = [given((5, 70), dtype) for _ in range(count)]
        if primitive.name == "where":
            inputs[0] = given((5, 70), BOOL)
        try:
            with np.errstate(all="ignore"):
                primitive.reference(*(np.ones(tensor.shape, tensor.dtype) for tensor in inputs))
            return Node(primitive, tuple(inputs), {})
        except (TypeError, ValueError):
            continue
    return None


def test_elementwise_primitives_of_every_dtype(device: Device, given: Given) -> None:
    for dtype in TRIED:
        nodes = [
            node
            for primitive in elementwise.PRIMITIVES.values()
            if primitive not in (elementwise.CAST, elementwise.FULL)
            and (node := applied(given, primitive, dtype)) is not None
        ]
        nodes += [elementwise.cast(given((5, 70), dtype), other) for other in TRIED if other != dtype]
        nodes.append(elementwise.add(given((9,), dtype), elementwise.full((9,), dtype, 3)))
        for node in nodes:
            build(device, [node])
    check(device, conftest.examples(300, quick=100))


def test_reductions_and_views_of_every_dtype(device: Device, given: Given) -> None:
    for dtype in TRIED:
        for axes in ((1,), (0,), (0, 1)):
            for reduce in (reducing.sum_, reducing.prod, reducing.max_, reducing.min_):
                x = given((6, 300), dtype)
                if dtype != BOOL or reduce not in (reducing.sum_, reducing.prod):
                    build(device, [reduce(x, axes)])
        x = given((4, 6), dtype)
        build(device, [elementwise.positive(shaping.permute(x, (1, 0)))])
        build(device, [shaping.concat([x, shaping.slice_(x, ((0, 4, 2), (0, 6, 1)))], 0)])
        index = given((7,), np.dtype(np.int64))
        build(device, [contraction.gather(x, index)])
        whole = shaping.slice_(x, ((1, 2, 1), (4, 3, -2)))
        part = moving_slices.moved(whole, x, (0, 1))
        build(device, [part, *gradients(part, whole, [x])[:1]])
    check(device, conftest.examples(150, quick=60))


def test_kernels_of_single_nodes(device: Device, given: Given) -> None:
    shapes = [((5, 6), 0), ((3, 500), 1), ((2, 9000), 1)]
    for number, dtype in enumerate(TRIED):
        # Each dtype meets two of the shapes, or one, and each shape several dtypes of every kind.
        for shape, axis in (shapes * 2)[number % 3 :][: 2 if conftest.whole else 1]:
            x = given(shape, dtype)
            build(device, [reducing.argmax(x, axis), reducing.argmin(x, axis)])
            build(device, [reducing.argsort(x, axis, False), reducing.argsort(x, axis, True)])
            if x.dtype.kind in "iuf":
                build(device, [reducing.cumulative_max(x, axis)])
            for reverse in (False, True):
                sums, products = (reducing.cumulative_sum, reducing.cumulative_prod)
                build(device, [sums(x, axis, reverse), products(x, axis, reverse)])
                if x.dtype.kind == "f":
                    build(device, [reducing.linear_recurrence(x, x, axis, reverse)])
        index = given((40,), np.dtype(np.int32))
        build(device, [contraction.scatter_add(given((40, 3), dtype), index, 11)])
        build(device, [contraction.put_rows(given((60, 3), dtype), given((40, 3), dtype), index)])
        if dtype == bfloat16 or (dtype.kind == "f" and dtype.itemsize <= 4):
            for pages in (4, 400):  # of a row, which a workgroup or several attend to
                cache, table = given((2, 9, 2, 8, 24), dtype), given((3, pages), np.dtype("int32"))
                positions = given((3, 1), np.dtype("int32"))
                query = given((3, 1, 4, 24), dtype)
                build(device, [paged_attention(query, cache, table, positions, 0.5, 7, 3.0)])
    check(device, conftest.examples(150, quick=20))


def test_rows_of_many_shapes(device: Device, given: Given) -> None:
    """Kernels of the first shapes have constants, and those of later shapes arguments."""
    lengths = (7, 64, 1000, 16_000, 33_000, 32_772)
    for rows, length in itertools.product((2, 3, 1, 5), lengths):
        x, w = given((rows, length), np.dtype("float32")), given((length,), np.dtype("float32"))
        weighted = elementwise.multiply(x, reducing.expand(shaping.reshape(w, (1, length)), x.shape))
        build(
            device,
            [reduce(value, (1,)) for value in (x, weighted) for reduce in (reducing.sum_, reducing.max_)],
        )
    check(device, 25)


def test_sums_of_gathered_rows(device: Device, given: Given) -> None:
    table, index = given((4096, 4096), np.dtype("float32")), given((5,), np.dtype("int32"))
    build(device, [reducing.sum_(contraction.gather(table, index), (0, 1))])
    check(device, 1)


def test_random_graphs(device: Device, given: Given) -> None:
    for seed in range(conftest.examples(24, quick=8)):
        _, wanted = grown(seed, 60, 0, lambda array: given(array.shape, array.dtype))
        build(device, wanted)
    check(device, conftest.examples(80, quick=24))


def test_products(device: Device, given: Given) -> None:
    for dtype in (np.float32, np.float16):
        for m, n, k in ((3, 5, 7), (64, 64, 64), (200, 2000, 130)):
            left, right = given((2, m, k), np.dtype(dtype)), given((2, n, k), np.dtype(dtype))
            build(device, [contraction.matmul(left, shaping.permute(right, (0, 2, 1)))])
    check(device, 6, ARCHITECTURES)


@pytest.mark.parametrize("device", [False, True], indirect=True)  # with tensor cores
def test_products_with_packed_integers(device: Device, given: Given) -> None:
    for number, (rows, bits) in enumerate(itertools.product((1, 2, 7, 16), (4, 8))):
        dtype = (bfloat16, np.dtype(np.float16), np.dtype(np.float32))[number % 3]
        columns = 14336 if number % 2 else 2048
        words, scales = given((50, columns * bits // 32), UINT32), given((50, columns // 32), dtype)
        product = quantization.packed_matmul(given((rows, columns), dtype), words, scales)
        build(device, [elementwise.add(product, given((rows, 50), dtype))])
    gathered = executables(device).kernels
    assert isinstance(gathered, Gathering)
    tiles = ["MULTIPLY_TILES" in source.text for source in gathered.sources.values()]
    assert sum(tiles) == (6 if device.capabilities.tensor_cores else 0), "not in float32"
    check(device, 8, ARCHITECTURES)


def test_random_numbers(device: Device) -> None:
    generator = ps.random.Generator(1, device)
    for make in (generator.uniform, generator.normal):
        for dtype in (ps.float32, ps.float16, ps.bfloat16, ps.float64):
            draw: Callable[[], Any] = ps.jit(lambda make=make, dtype=dtype: make((100,), dtype=dtype))
            draw()
    ps.jit(lambda: generator.integers(0, 9, (30,)))()
    ps.jit(lambda: generator.permutation(300))()
    check(device, 8)


@pytest.mark.slow
def test_training_steps(device: Device) -> None:
    ps.random.manual_seed(0)
    gpt = nn.GPT(vocab_size=50, context=16, width=32, layers=2, heads=2, device=device)
    xor = nn.Sequential(nn.Linear(2, 8, device=device), nn.Tanh(), nn.Linear(8, 1, device=device))
    adam, adamw = optim.Adam(xor.parameters()), optim.AdamW(gpt.parameters(), clip_norm=1.0)

    @ps.jit
    def learn(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = nn.functional.cross_entropy(gpt(x).reshape(-1, 50), y.reshape(-1))
        loss.backward()
        adamw.step()
        return loss

    @ps.jit
    def separate(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = nn.functional.mse_loss(xor(x), y)
        loss.backward()
        adam.step()
        return loss

    tokens = ps.asarray(np.zeros((4, 16), np.int32), device=device)
    learn(tokens, tokens)
    separate(ps.zeros((4, 2), device=device), ps.zeros((4, 1), device=device))
    check(device, 40, (*ARCHITECTURES, "sm_90a"))  # with what only Hopper has, as the driver asks for it


def test_what_nvrtc_says_is_told() -> None:
    with pytest.raises(CompileError, match="bogus"):
        compile_text('extern "C" __global__ void f(int *x) { x[0] = bogus; }', "sm_90")


def test_code_is_kept_on_disk_within_bounds(tmp_path: Path) -> None:
    binaries = Binaries(tmp_path, max_files=8, max_bytes=10_000)
    for number in range(20):
        binaries.put(str(number), bytes([number]) * 100)
        assert len(list(tmp_path.iterdir())) <= 8
    assert binaries.get("19") == bytes([19]) * 100
    assert binaries.get("0") is None
    binaries.put("large", bytes(9_000))
    binaries.put("larger", bytes(9_500))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000
    binaries.put("damaged", b"code")
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(PenstockWarning, match="was damaged: its kernels are compiled again"):
        assert binaries.get("damaged") is None
    Binaries(tmp_path / "file" / "folder").put("x", b"code")
    (tmp_path / "taken").touch()
    with pytest.warns(PenstockWarning, match="going on without it"):
        Binaries(tmp_path / "taken").put("x", b"code")  # nothing can be kept there, and nothing breaks
    assert Binaries(tmp_path / "taken").get("x") is None


# Edges of graphs


class _Function:
    """A kernel of which only its arguments and whether it waits by itself matter."""

    formats = dtypes = ()
    format = struct.Struct("")

    def __init__(self, waits: bool, waits_first: bool = False) -> None:
        self.waits, self.waits_first = waits, waits_first
        self.native = None


@pytest.mark.parametrize(
    ("first", "workgroups", "overlaps"), [(True, 4096, True), (True, 8, False), (False, 4096, False)]
)
def test_large_kernels_that_wait_before_they_read_overlap_with_the_kernel_before(
    first: bool, workgroups: int, overlaps: bool
) -> None:
    launch = cuda_launches.Launch(_Function(True, first), (workgroups,), (256,))
    launch.aim(1)
    called: Any = launch.call
    if overlaps:
        assert called.func is cuda_launches.cu.cuLaunchKernelEx
        config = called.args[0]
        assert (config.gridDimX, config.blockDimX, int(config.hStream)) == (workgroups, 256, 1)
        assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1
    else:
        assert called.func is cuda_launches.cu.cuLaunchKernel


def test_only_kernels_that_wait_by_themselves_start_before_others_have_ended() -> None:
    waiting, own = (cuda_launches.Launch(_Function(waits)) for waits in (True, False))
    reading = cuda_launches.Launch(_Function(True), early=False)  # what another writes, before it waits
    library, copy = cuda_launches.LibraryCall(print, ()), cuda_launches.GraphCopy(0, 0, 16, True, None)
    pairs = list(itertools.product((waiting, own, reading, library, copy), repeat=2))
    early = {(first, later): bool(_edge(first, later, alone=True).type) for first, later in pairs}
    assert not any(_edge(first, later, alone=False).type for first, later in pairs)
    assert [pair for pair, starts_early in early.items() if starts_early] == [
        (waiting, waiting),
        (own, waiting),
        (reading, waiting),
    ]


def test_generated_kernels_wait_before_they_read(device: Device, given: Given) -> None:
    build(device, [reducing.sum_(given((70, 1024), np.dtype("float32")), (1,))])
    gathered = executables(device).kernels
    assert isinstance(gathered, Gathering)
    (source,) = gathered.sources.values()
    body = whole_text([source], "cuda").partition(f" {source.name}(")[2]
    assert 0 < body.index("WAIT_FOR_EARLIER;") < body.index("in0 +=")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_sums_of_very_short_rows_compile(dtype: str) -> None:
    """Nothing else of the words for threads is in them."""
    x = placeholder((1 << 20, 3), checked(dtype))
    (call,) = _calls(reducing.sum_(x, (1,)), [x])
    assert compile_text(whole_text([call.source], "cuda"), "sm_90").startswith(b"\x7fELF")


def _calls(wanted: Node, inputs: Sequence[Node]) -> list[Call]:
    can = replace(Imagined(tensor_cores=True).capabilities, max_group_size=1024)
    schedule = compile_graph([wanted], inputs, {}, Target.of(can))
    return [call for step in schedule.groups for call in step.calls]


def _linear(x: Node, matrix: Node) -> Node:
    return contraction.matmul(x, shaping.permute(matrix, (1, 0)))


@pytest.mark.parametrize("packed", [False, True])
def test_a_product_reads_its_matrix_before_it_waits_unless_another_kernel_writes_it(packed: bool) -> None:
    product = quantization.packed_matmul if packed else _linear
    x, last = placeholder((2, 2048), bfloat16), placeholder((512, 64 if packed else 2048), bfloat16)
    inputs = [x, *([placeholder((512, 256), UINT32)] if packed else []), last]
    (call,) = _calls(product(*inputs), inputs)
    early, _, late = call.source.text.partition("WAIT_FOR_EARLIER;")
    row, *matrices = (f"in{inputs.index(node)} " for node in inputs)
    assert all(f"{name}+ " in early for name in matrices[:1])
    assert f"{row}+ " in late
    assert f"{row}+ " not in early
    computed, again = calls = _calls(product(*inputs[:-1], elementwise.add(last, last)), inputs)
    assert again.source.text == call.source.text
    assert may_begin_early([call, call], [[], [0]]) == [False, True]
    assert may_begin_early(calls, [[], [0]]) == [False, False]
    assert may_begin_early([computed, call], [[], [0]]) == [False, True]  # which reads something else
    # Also if that kernel is not the last before it, unless one between them begins when it has ended.
    other = replace(call, touched=Touched())
    assert may_begin_early([computed, other, again], [[], [0], [1]]) == [False, True, False]
    assert may_begin_early([computed, again, again], [[], [0], [1]]) == [False, False, True]


def test_long_rows_are_shared_by_the_workgroups_of_a_cluster() -> None:
    can = replace(Imagined(tensor_cores=True).capabilities, clusters=True, compute_units=132)

    def cluster(inner: int) -> int:
        inputs = [placeholder((32, inner), bfloat16), placeholder((2048, inner), bfloat16)]
        schedule = compile_graph([_linear(*inputs)], inputs, {}, Target.of(can))
        (source,) = (call.source for step in schedule.groups for call in step.calls)
        return source.cluster

    assert [cluster(inner) for inner in (192, 512, 4096)] == [1, 4, 8]


def test_no_load_may_be_moved_before_the_wait(device: Device, given: Given) -> None:
    """Not even of large matrices, which leave caches to vectors: a kernel before may have written them."""
    matrix, vector = given((700, 1024), np.dtype("float32")), given((1, 1024), np.dtype("float32"))
    weighted = elementwise.multiply(matrix, reducing.expand(vector, matrix.shape))
    build(device, [reducing.sum_(weighted, (1,))])
    gathered = executables(device).kernels
    assert isinstance(gathered, Gathering)
    text = whole_text(list(gathered.sources.values()), "cuda")
    assert "LOAD_ONCE_4(v" in text
    assert 'asm volatile("ld.global.L1::no_allocate' in text
    assert "ld.global.nc" not in text


# Copies in graphs


@pytest.mark.parametrize("to_device", [False, True])
def test_a_copy_is_a_node_that_knows_which_end_is_the_hosts(
    to_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Any, ...]] = []
    for name in ("cuGraphAddMemcpyNode", "cuGraphExecMemcpyNodeSetParams"):
        answer = (0, "node") if name.endswith("Node") else (0,)
        monkeypatch.setattr(cuda_launches.cu, name, lambda *args, answer=answer: given.append(args) or answer)
    copy = cuda_launches.GraphCopy(1 << 40, 2 << 40, 4096, to_device, "context")
    assert copy.add_to("graph", "queue") == ["node"]
    copy.changes = changes = []
    copy.change(0, 3 << 40)
    copy.change(1, 4 << 40)
    assert changes == [copy, copy]
    copy.update("executable", ["node"], "queue")
    (graph, after, count, first, context), (executable, node, second, again) = given
    assert (graph, after, count, context) == ("graph", None, 0, "context")
    assert (executable, node, again) == ("executable", "node", "context")
    for target, source, parameters in ((1 << 40, 2 << 40, first), (3 << 40, 4 << 40, second)):
        host, device = (source, target) if to_device else (target, source)
        ends = {"src": parameters.srcMemoryType, "dst": parameters.dstMemoryType}
        assert ends["src" if to_device else "dst"] == cuda_launches.cu.CUmemorytype.CU_MEMORYTYPE_HOST
        assert ends["dst" if to_device else "src"] == cuda_launches.cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        assert (parameters.srcHost if to_device else parameters.dstHost) == host
        assert int(parameters.dstDevice if to_device else parameters.srcDevice) == device
        assert (parameters.WidthInBytes, parameters.Height, parameters.Depth) == (4096, 1, 1)


@pytest.mark.parametrize("rows", [1, 32])
def test_products_with_packed_matrices_are_one_launch(rows: int) -> None:
    """As the queries, keys and values of a layer are."""
    inputs = [placeholder((rows, 256), bfloat16)]
    nodes = []
    for outputs in (512, 128, 128):
        inputs += [placeholder((outputs, 32), UINT32), placeholder((outputs, 8), bfloat16)]
        nodes.append(quantization.packed_matmul(inputs[0], *inputs[-2:]))
    can = replace(Imagined(tensor_cores=True).capabilities, max_group_size=1024)
    schedule = compile_graph(nodes, inputs, {}, Target.of(can))
    (part,) = parts = launch_parts(schedule, can)
    assert isinstance(part, list)
    assert [len(calls) for calls in part if isinstance(calls, list)] == [3]
    (launches,) = arranged(parts, schedule, can, None, Sizes(TuningCache("")))
    assert isinstance(launches, list)
    (source,) = [call.source for call in launches if isinstance(call, Call)]
    assert compile_text(whole_text([source], "cuda"), "sm_90").startswith(b"\x7fELF")
