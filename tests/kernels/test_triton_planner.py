"""Triton's planner makes the tables of the torch one, bit for bit, in a launch per part."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from magi_serve.kernels.capabilities import triton_interprets
from magi_serve.kernels.ffa import plan, triton_planner
from magi_serve.kernels.ffa.plan import Batch, Buffers, Cut, Part, TileConfig
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.masks import UNBOUNDED
from magi_serve.types import AttentionProblem

many = settings(max_examples=60, derandomize=True, deadline=None, database=None)
few = settings(many, max_examples=12)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            "cpu",
            id="interpreter",
            marks=pytest.mark.skipif(not triton_interprets(), reason="needs TRITON_INTERPRET=1"),
        ),
        pytest.param(
            "cuda",
            id="gpu",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    triton_interprets() or not torch.cuda.is_available(),
                    reason="needs an NVIDIA GPU",
                ),
            ],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def tables_of(
    make: Any, batch: Batch, parts: list[Part], out: Buffers | None
) -> dict[str, Tensor | None]:
    """All that a planner writes, by name."""
    bands, of_parts = make(batch, parts, out)
    tables = {"bands": bands}
    for i, (items, reductions) in enumerate(of_parts):
        tables |= {f"items {i}": items, f"reductions {i}": reductions}
    if out is not None:
        tables |= {"all bands": out.bands, "all items": out.items, "all reductions": out.reductions}
    return tables


def assert_alike(batch: Batch, parts: list[Part], out: Buffers | None = None) -> None:
    """Triton's tables are the torch ones; both start from what `out` holds."""
    copy = None
    if out is not None:
        copy = Buffers(*(t.clone() for t in (out.bands, out.items, out.reductions)), out.counters)
    wanted = tables_of(plan.paged_tables, batch, parts, copy)
    got = tables_of(triton_planner.paged_tables, batch, parts, out)
    assert got.keys() == wanted.keys()
    for name, table in wanted.items():
        other = got[name]
        assert (table is None) == (other is None), name
        if table is not None and other is not None:
            assert other.dtype == table.dtype == torch.int32
            assert torch.equal(other, table), (name, batch, parts)


def on(device: torch.device, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def lengths_on(device: torch.device, q_lens: list[int], k_lens: list[int]) -> tuple[Tensor, Tensor]:
    return on(device, [0, *q_lens]).cumsum(0, dtype=torch.int32), on(device, k_lens)


def garbage(rows: int, device: torch.device) -> Tensor:
    """A table as `torch.empty` may find it."""
    return torch.randint(-(1 << 31), 1 << 31, (rows, plan.ROW), device=device).int()


@st.composite
def batches(draw: Any, longest: int, most_seqs: int = 20) -> tuple[list[int], list[int], Any]:
    """Query and key lengths, many of them small or 0, and the batch's other fields."""
    small = st.integers(0, 3)
    seqs = draw(st.integers(0, most_seqs))
    q_lens = draw(st.lists(small | st.integers(0, longest), min_size=seqs, max_size=seqs))
    k_lens = draw(st.lists(small | st.integers(0, 20 * longest), min_size=seqs, max_size=seqs))
    flags = st.lists(st.booleans(), min_size=seqs, max_size=seqs)
    side = st.none() | st.integers(0, 40) | st.integers(0, UNBOUNDED - 1)
    others = {
        "padding": draw(small | st.integers(0, longest)),
        "causal": draw(st.booleans() | flags),
        "window": draw(st.none() | st.tuples(side, side)),
        "max_keys": draw(st.just(UNBOUNDED) | st.integers(0, 100) | st.integers(0, 20 * longest)),
    }
    return q_lens, k_lens, others


def batch_on(
    device: torch.device, q_lens: list[int], k_lens: list[int], padding: int, **others: Any
) -> Batch:
    if isinstance(others["causal"], list):
        others["causal"] = on(device, others["causal"], torch.bool)
    lengths = lengths_on(device, q_lens, k_lens)
    return Batch(*lengths, num_tokens=sum(q_lens) + padding, **others)


@st.composite
def parts_of(draw: Any, q_lens: list[int], padding: int, tile_q: Any, block_n: Any) -> list[Part]:
    """All of a batch as one part, or sequences from some on and then those before them."""
    seqs = len(q_lens)
    split_at = draw(st.just(seqs) | st.integers(0, seqs))
    config = TileConfig(16, draw(block_n), min_share=draw(st.sampled_from([1, 2, 4])))

    def part(first: int, stop: int, rows: int) -> Part:
        tile = draw(tile_q)
        capacity = -(-rows // tile) + stop - first
        return Part(first, stop, Cut(config, tile, capacity, draw(budgets)))

    budgets = st.just(0) | st.sampled_from([1, 7, 40]) | st.integers(1, 200)
    if split_at == seqs:
        return [part(0, seqs + 1, sum(q_lens) + padding)]
    parts = [part(split_at, seqs + 1, sum(q_lens[split_at:]) + padding)]
    return [*parts, part(0, split_at, sum(q_lens[:split_at]))] if split_at else parts


def sizes(data: st.DataObject, device: torch.device, patch: pytest.MonkeyPatch) -> None:
    """In the interpreter, also so few rows and tiles at once that several of each are needed."""
    if device.type == "cpu":
        rows, chunk = data.draw(st.sampled_from([(256, 1024), (64, 64)]))
        patch.setattr(triton_planner, "INTERPRETED_ROWS", rows)
        patch.setattr(triton_planner, "CHUNK", chunk)


@many
@given(st.data())
def test_tables_are_those_of_the_torch_planner(device: torch.device, data: st.DataObject) -> None:
    q_lens, k_lens, others = data.draw(batches(longest=30, most_seqs=12))
    parts = data.draw(
        parts_of(
            q_lens,
            others["padding"],
            st.sampled_from([1, 2, 3, 16, 64]),
            st.sampled_from([1, 4, 48, 64]),
        )
    )
    out = None
    if len(parts) == 1 and data.draw(st.booleans()):
        cut = parts[0].cut
        spare = data.draw(st.sampled_from([0, 1, 40]))
        rows = max(cut.capacity, cut.budget) + spare
        out = Buffers(*(garbage(n, device) for n in (len(q_lens) + 1 + spare, rows, rows, 0)))
    with pytest.MonkeyPatch.context() as patch:
        sizes(data, device, patch)
        assert_alike(batch_on(device, q_lens, k_lens, **others), parts, out)


@few
@given(st.data())
def test_nothing_overflows(device: torch.device, data: st.DataObject) -> None:
    q_lens, k_lens, others = data.draw(batches(longest=(UNBOUNDED - 1) // 20, most_seqs=15))
    parts = data.draw(
        parts_of(
            q_lens,
            others["padding"],
            st.integers(1 << 24, 1 << 26),
            st.sampled_from([1, 16, 64, 128]),
        )
    )
    assert_alike(batch_on(device, q_lens, k_lens, **others), parts)


def test_all_key_blocks_together_need_no_int32(device: torch.device) -> None:
    batch = batch_on(
        device, [1] * 5, [UNBOUNDED - 1] * 5, 0, causal=True, window=None, max_keys=UNBOUNDED
    )
    for budget in (7, 40):
        assert_alike(batch, [Part(0, 6, Cut(TileConfig(16, 1), 1, 11, budget))])


@pytest.mark.parametrize("budget", [0, 2000])
def test_more_sequences_and_tiles_than_are_looked_at_at_once(
    device: torch.device, budget: int
) -> None:
    rng = random.Random(0)
    q_lens = [rng.choice([0, 1, 1, 1, 2]) for _ in range(1100)]
    k_lens = [rng.choice([0, 1, 70, 5000]) for _ in q_lens]
    others = {"causal": True, "window": None, "max_keys": UNBOUNDED}
    batch = batch_on(device, q_lens, k_lens, padding=5, **others)
    capacity = sum(q_lens) + 5 + len(q_lens) + 1
    assert_alike(batch, [Part(0, 1101, Cut(TileConfig(16, 64), 1, capacity, budget))])


def test_strided_lengths_are_read_rightly(device: torch.device) -> None:
    starts, lengths = lengths_on(device, [1, 3, 2], [40, 0, 9])
    flags = on(device, [1, 0, 1], torch.bool)

    def strided(x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, 1)], 1)[:, 0]

    batch = Batch(strided(starts), strided(lengths), 8, strided(flags), (3, 0), UNBOUNDED)
    for budget in (0, 9):
        assert_alike(batch, [Part(0, 4, Cut(TileConfig(16, 16), 2, 8, budget))])


def test_rows_whose_window_lies_past_the_pages_see_no_keys(device: torch.device) -> None:
    lengths = lengths_on(device, [3, 1], [40, 20])
    batch = Batch(*lengths, 4, True, (3, 0), 16)
    for budget in (0, 9):
        assert_alike(batch, [Part(0, 3, Cut(TileConfig(16, 16), 2, 5, budget))])


class Planner(PagedPlanner):
    """Plans as the module says, in tiles of two rows whose keys are split in batches of few."""

    def __init__(self, module: Any, device: torch.device, *, max_tokens: int) -> None:
        dtype = torch.float32
        problem = AttentionProblem("cpu", dtype, dtype, 8, 2, 64, 64, None, 16)
        super().__init__(problem, max_tokens=max_tokens, max_seqs=16, device=device, kernel="cpu")
        self.paged_tables = module.paged_tables

    def config(self, regime: str, max_q_len: int) -> TileConfig:  # type: ignore[override]
        return TileConfig(8, 64, programs=16, min_share=2, waves=2)


@few
@given(st.data())
def test_batches_of_any_size_follow_each_other_in_the_same_buffers(
    device: torch.device, data: st.DataObject
) -> None:
    planners = [Planner(module, device, max_tokens=64) for module in (plan, triton_planner)]
    for _ in range(3):
        seqs = data.draw(st.integers(0, 16))
        q_lens = data.draw(st.lists(st.integers(0, 4), min_size=seqs, max_size=seqs))
        k_lens = data.draw(st.lists(st.integers(0, 9000), min_size=seqs, max_size=seqs))
        lengths = lengths_on(device, q_lens, k_lens)
        wanted, got = (
            planner.plan(
                *lengths,
                num_tokens=sum(q_lens),
                num_decodes=seqs,
                num_decode_tokens=sum(q_lens),
                max_decode_q_len=4,
            )
            for planner in planners
        )
        for ours, theirs in zip(got.parts, wanted.parts, strict=True):
            assert ours.items.shape == theirs.items.shape
            assert (ours.reductions is None) == (theirs.reductions is None)
        old, new = (planner.buffers() for planner in planners)
        assert torch.equal(new.bands, old.bands)
        assert torch.equal(new.items, old.items)
        assert torch.equal(new.reductions, old.reductions)


def test_kernels_that_need_triton_are_planned_for_by_triton() -> None:
    bf16, planners = torch.bfloat16, {}
    for name, device, arch in (
        ("cpu", "cpu", None),
        ("triton", "cuda", 80),
        ("hopper", "cuda", 90),
    ):
        problem = AttentionProblem(device, bf16, bf16, 8, 2, 64, 64, arch, 16)
        planners[name] = PagedPlanner(
            problem, max_tokens=8, max_seqs=8, device=torch.device("cpu"), kernel=name
        ).paged_tables
    torch_tables, triton_tables = plan.paged_tables, triton_planner.paged_tables
    wanted = {"cpu": torch_tables, "triton": triton_tables, "hopper": triton_tables}
    assert planners == wanted


class Recorded(TorchDispatchMode):
    """Names of the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_decodes", [0, True, 2, 4])
@pytest.mark.parametrize("kept", [True, False])
def test_a_part_is_one_launch_and_no_torch_operation(
    num_decodes: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: launches.append(args)

    monkeypatch.setattr(triton_planner, "_plan_kernel", Kernel())
    planner = Planner(triton_planner, torch.device("cpu"), max_tokens=64 if kept else 0)
    lengths = lengths_on(planner.device, [1, 1, 30, 5], [300, 40, 700, 9])
    causal = on(planner.device, [1, 0, 1, 1], torch.bool)
    planner.buffers()
    with Recorded() as recorded:
        made = planner.plan(
            *lengths,
            num_tokens=40,
            num_decodes=num_decodes,
            num_decode_tokens=37 if num_decodes == 4 else num_decodes,
            max_decode_q_len=1,
            causal=causal,
        )
    assert len(made.parts) == len(launches) == (2 if 0 < num_decodes < 4 else 1)
    assert set(recorded.names) <= {"empty", "slice", "detach", "alias"}
    assert {type(arg) for args in launches for arg in args} == {int, Tensor}  # no bool, no numpy


COUNT_SPECIALISATIONS = """
import sys; sys.path.insert(0, sys.argv[1])
import aot, torch
from magi_serve.kernels.ffa import triton_planner
from magi_serve.kernels.ffa.plan import Batch, Cut, Part, TileConfig

aot.compile_only(90)
flags = torch.ones(40, dtype=torch.bool)
for seqs in (1, 3, 16, 32):
    for causal in (True, False, flags[:seqs], flags[1 : seqs + 1]):
        for window in (None, (1, 0), (16, 1)):
            for first in (0, 1):
                starts = torch.arange(40, dtype=torch.int32)[first:]
                batch = Batch(
                    starts[: seqs + 1], starts[:seqs], seqs, causal, window, 16 * seqs
                )
                for budget in (0, 1, 16, 33):
                    cut = Cut(TileConfig(16, 16 * seqs), seqs, 2 * seqs, budget)
                    triton_planner.paged_tables(batch, [Part(0, seqs + 1, cut)], None)
(cache,) = triton_planner._plan_kernel.device_caches.values()
print(len(cache[0]))
"""


@pytest.mark.skipif(triton_interprets(), reason="compiles, which is not interpreting")
def test_no_batch_compiles_the_planner_anew(tmp_path: Path) -> None:
    here = Path(__file__).parent
    path = [str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", COUNT_SPECIALISATIONS, str(here)],
        env={
            **os.environ,
            "TRITON_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(path),
        },
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["2"], done.stdout + done.stderr
