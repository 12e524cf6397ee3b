"""Tuned data: which row counts for which GPU, what files may hold, and what tiles come of it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from magi_serve.errors import ArgumentError
from magi_serve.kernels.ffa import hopper, triton_attention, tuning
from magi_serve.kernels.ffa.plan import Regime, TileConfig
from magi_serve.kernels.ffa.tuned_files import (
    DIMS,
    FIELDS,
    RowName,
    Tuned,
    loads,
    normal_name,
    read,
)
from magi_serve.types import AttentionProblem

BF16, FP32 = torch.bfloat16, torch.float32

BY_HAND = """{
  "gpus": ["NVIDIA H200"], "arch": 90, "for_all_of_arch": true, "made_by": [{"how": "by hand"}],
  "tiles": {
    "triton": {
      "prefill_16bit": {
        "64": {"block_m": 128, "block_n": 64, "num_warps": 4, "num_stages": 3,
               "programs_per_sm": 2},
        "256": {"block_m": 128, "block_n": 32, "num_warps": 8, "num_stages": 2,
               "programs_per_sm": 1}
      },
      "slices_16bit": {
        "128": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2,
               "programs_per_sm": 1}
      }
    },
    "hopper": {
      "prefill_16bit": {
        "64": {"consumers": 3, "block_n": 128, "num_stages": 2, "programs_per_sm": 1,
               "min_tiles_per_sm": 1},
        "128": {"consumers": 2, "block_n": 128, "num_stages": 2, "programs_per_sm": 1,
                "min_tiles_per_sm": 1}
      },
      "window_16bit": {
        "64": {"consumers": 1, "block_n": 64, "num_stages": 3, "programs_per_sm": 3,
               "min_tiles_per_sm": 1}
      },
      "slices_16bit": {
        "128": {"consumers": 2, "block_n": 128, "num_stages": 2, "programs_per_sm": 1,
                "min_tiles_per_sm": 1}
      }
    }
  }
}"""
"""The numbers for an H200 that stood in the code before they were data."""


@pytest.fixture(autouse=True)
def on_132_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton_attention, "num_sms", lambda device: 132)
    monkeypatch.setattr(tuning, "gpu_name", lambda: None)
    tuning.use(None)
    yield
    tuning.use(None)


def ship(monkeypatch: pytest.MonkeyPatch, *tuned: Tuned) -> None:
    """Let these be the package's files."""
    monkeypatch.setattr(tuning, "shipped", lambda: tuned)


def problem(
    heads: str, dtype: torch.dtype = BF16, arch: int | None = 90, window: bool = False
) -> AttentionProblem:
    q, kv, dim = map(int, heads.split(":"))
    device = "cpu" if arch is None else "cuda"
    return AttentionProblem(device, dtype, dtype, q, kv, dim, dim, arch, 16, window=window)


D64, D128, D256 = "64:8:64", "32:8:128", "8:1:256"


# Kernel, architecture, heads, dtype, regime, rows, window; and what was chosen for them by code:
# block_m, block_n, warps, stages, programs per multiprocessor, Gluon's or not.
CHOSEN: list[tuple[Any, ...]] = [
    ("hopper", 90, D128, BF16, "prefill", 512, False, 128, 64, 8, 3, 1, False),
    ("hopper", 90, D128, BF16, "prefill", 513, False, 128, 128, 4, 2, 1, True),
    ("hopper", 90, D128, BF16, "prefill", 8192, True, 128, 128, 4, 2, 1, True),
    ("hopper", 90, D64, BF16, "prefill", 384, False, 128, 64, 4, 3, 2, False),
    ("hopper", 90, D64, BF16, "prefill", 385, False, 192, 128, 4, 2, 1, True),
    ("hopper", 90, D64, BF16, "prefill", 128, True, 128, 64, 4, 3, 2, False),
    ("hopper", 90, D64, BF16, "prefill", 129, True, 64, 64, 4, 3, 3, True),
    ("hopper", 90, D128, BF16, "slices", 8192, False, 128, 128, 4, 2, 1, True),
    ("hopper", 90, D128, BF16, "slices", 100, False, 128, 64, 8, 2, 1, False),
    ("hopper", 90, D64, BF16, "decode", 1, False, 16, 64, 4, 5, 2, False),
    ("hopper", 90, D64, BF16, "decode", 8, False, 64, 64, 4, 5, 2, False),
    ("triton", 90, D256, BF16, "prefill", 8192, False, 128, 32, 8, 2, 1, False),
    ("triton", 90, D64, BF16, "prefill", 8192, True, 128, 64, 4, 3, 2, False),
    ("triton", 90, D64, BF16, "slices", 8192, False, 64, 64, 4, 2, 2, False),
    ("triton", 90, D128, FP32, "prefill", 8192, False, 32, 32, 8, 1, 1, False),
    ("triton", 90, D256, BF16, "decode", 1, False, 16, 32, 4, 4, 2, False),
    ("triton", 80, D128, BF16, "prefill", 8192, False, 128, 32, 8, 3, 1, False),
    ("triton", 80, D64, BF16, "slices", 8192, False, 64, 32, 4, 2, 2, False),
    ("triton", 80, D256, BF16, "prefill", 8192, False, 64, 32, 8, 2, 1, False),
    ("triton", 86, D128, BF16, "prefill", 8192, False, 128, 64, 8, 3, 1, False),
    ("triton", 100, D64, BF16, "prefill", 8192, False, 128, 64, 8, 3, 1, False),
    ("triton", 100, D128, BF16, "slices", 8192, False, 64, 64, 8, 3, 1, False),
    ("triton", None, "32:8:80", BF16, "decode", 16, False, 64, 64, 4, 5, 2, False),
    ("triton", None, "9:3:32", FP32, "decode", 1, False, 16, 32, 4, 2, 2, False),
    ("triton", None, "8:8:192", FP32, "slices", 64, False, 32, 16, 8, 1, 1, False),
]


@pytest.mark.parametrize("line", CHOSEN, ids=lambda line: "-".join(map(str, line[:7])))
def test_tiles_are_those_that_code_chose_before_they_were_data(
    monkeypatch: pytest.MonkeyPatch, line: tuple[Any, ...]
) -> None:
    kernel, arch, heads, dtype, regime, rows, window, m, n, warps, stages, per_sm, gluon = line
    others = [t for t in tuning.shipped() if not t.gpus]
    ship(monkeypatch, loads(BY_HAND, "by hand"), *others)
    module = {"hopper": hopper, "triton": triton_attention}[kernel]
    found = module.tile_config(problem(heads, dtype, arch, window), regime, rows)
    programs = per_sm * 132
    assert found == TileConfig(
        m, n, warps, stages, packed=not gluon, programs=programs, programs_per_sm=per_sm,
        queued=gluon,
    )  # fmt: skip


def test_shipped_files_are_as_they_would_be_written() -> None:
    folder = files("magi_serve.kernels.ffa") / "tuned"
    for tuned in tuning.shipped():
        assert (folder / Path(tuned.name).name).read_text() == tuned.dumps()


def test_shipped_files_leave_no_choice_open() -> None:
    names = [normal_name(gpu) for tuned in tuning.shipped() for gpu in tuned.gpus]
    archs = [t.arch for t in tuning.shipped() if t.arch and (t.for_all_of_arch or not t.gpus)]
    assert len(names) == len(set(names)) and len(archs) == len(set(archs))
    (general,) = [t for t in tuning.shipped() if t.arch is None]
    kinds = [k for k in FIELDS["triton"] if k not in ("window", "verify")]
    assert {n for n in general.rows if n.kernel == "triton"} == {
        RowName("triton", kind, bits, dim)
        for kind in kinds for bits in (8, 16, 32) for dim in DIMS["triton"]
        if bits > 8 or kind != "slices"  # what is quantised lies in pages
    }  # fmt: skip


def walk(block_n: int, **others: int) -> dict[str, int]:
    numbers = {"block_n": block_n, "num_warps": 4, "num_stages": 5, "programs_per_sm": 2}
    return {**numbers, **others}


DECODE = RowName("triton", "decode", 16, 128)
VERIFY = RowName("triton", "verify", 16, 128)


def block_n(arch: int | None, gpu: str | None, *kinds: str) -> int | float:
    kinds = kinds or ("decode",)
    row = tuning.lookup("triton", kinds, bits=16, dim=128, arch=arch, gpu=gpu)
    assert row is not None
    return row["block_n"]


def test_a_gpu_takes_its_own_file_then_its_architectures_then_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ship(
        monkeypatch,
        Tuned("any", rows={DECODE: walk(16)}),
        Tuned("h100", ("NVIDIA H100 80GB HBM3",), 90, rows={DECODE: walk(32)}),
        Tuned("h200", ("NVIDIA H200",), 90, for_all_of_arch=True, rows={DECODE: walk(64)}),
        Tuned("sm80", arch=80, rows={DECODE: walk(128)}),
    )
    assert block_n(90, "NVIDIA H200") == block_n(90, "nvidia  h200") == 64
    assert block_n(90, "NVIDIA H100 80GB HBM3") == 32
    assert block_n(90, "NVIDIA H20") == block_n(90, None) == 64
    assert block_n(80, "NVIDIA A100-SXM4-80GB") == 128
    assert block_n(86, "NVIDIA A10") == block_n(None, None) == 16
    assert block_n(80, "NVIDIA H200") == 128  # compiled for another one than is here
    assert tuning.lookup("triton", ["window"], bits=16, dim=128, arch=90, gpu=None) is None


def test_a_row_that_a_file_lacks_is_the_next_files(monkeypatch: pytest.MonkeyPatch) -> None:
    ship(
        monkeypatch,
        Tuned("any", rows={DECODE: walk(16), VERIFY: walk(128)}),
        Tuned("sm80", arch=80, rows={DECODE: walk(32)}),
        Tuned("sm90", arch=90, rows={}),
    )
    assert block_n(90, None) == 16
    assert block_n(90, None, "verify", "decode") == 128
    assert block_n(80, None, "verify", "decode") == 32  # a closer file comes before a closer kind


def test_special_kinds_of_work_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(kernel: str, kinds: dict[str, dict[str, float]]) -> dict[RowName, Any]:
        return {RowName(kernel, kind, 16, 128): row for kind, row in kinds.items()}

    tiles = {k: {"block_m": 64, **walk(n)} for k, n in (("prefill", 64), ("window", 32))}
    decodes = {"decode": walk(64), "verify": walk(128, waves=3, min_share=2)}
    ship(monkeypatch, Tuned("any", rows=rows("triton", tiles | decodes)))
    config = triton_attention.tile_config
    assert config(problem(D128), "prefill", 999).block_n == 64
    assert config(problem(D128, window=True), "prefill", 999).block_n == 32
    assert config(problem(D128), "decode", 4).block_n == 64
    several = config(problem(D128), "decode", 5)
    assert (several.block_m, several.block_n, several.waves, several.min_share) == (32, 128, 3, 2)
    assert config(problem("32:1:128"), "decode", 1).block_n == 128


@pytest.mark.parametrize("regime", ["prefill", "slices"])
def test_the_crossover_to_gluon_is_data(monkeypatch: pytest.MonkeyPatch, regime: Regime) -> None:
    by_hand = loads(BY_HAND, "by hand")
    ship(monkeypatch, by_hand, *[t for t in tuning.shipped() if not t.gpus])
    name = RowName("hopper", regime, 16, 128)
    row = by_hand.rows[name]
    for least, rows in ((0, 1), (0.5, 257), (2.5, 1281)):
        with tuning.used(by_hand.with_row(name, {**row, "min_tiles_per_sm": least})):
            assert hopper.tile_config(problem(D128), regime, rows).queued
            if rows > 1:
                assert not hopper.tile_config(problem(D128), regime, rows - 1).queued


def test_a_file_that_is_asked_for_comes_first_until_the_shipped_ones_alone_do() -> None:
    def config() -> int:
        return triton_attention.tile_config(problem(D128), "decode", 1).block_n

    before = config()
    with tuning.used(Tuned("mine", arch=90, rows={DECODE: walk(16)})):
        assert config() == 16
        assert triton_attention.tile_config(problem(D64), "decode", 1).block_m == 16
        with tuning.used(Tuned("other", rows={DECODE: walk(256)})):
            assert config() == 256
        assert config() == 16
    assert config() == before
    tuning.use(Tuned("mine", rows={DECODE: walk(16)}))
    assert config() == 16
    tuning.use(None)
    assert config() == before


def test_a_file_for_another_architecture_is_refused_on_this_one() -> None:
    tuning.use(Tuned("/tmp/b200.json", arch=100, rows={DECODE: walk(16)}))
    with pytest.raises(ArgumentError, match=r"/tmp/b200.json holds tuned data for sm_100 .* sm_90"):
        triton_attention.tile_config(problem(D128), "decode", 1)
    # Without a GPU there is no architecture to hold it against.
    triton_attention.tile_config(problem(D128, arch=None), "decode", 1)


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    tuned = replace(
        loads(BY_HAND, "x"),
        made_by=({"how": "magi-serve tune", "rows": {str(DECODE): "1.04x"}},),
    ).with_row(DECODE, walk(32, min_share=8))
    path = tmp_path / "x.json"
    path.write_text(tuned.dumps())
    assert read(path) == replace(tuned, name=str(path))
    assert all(len(line) < 140 for line in tuned.dumps().splitlines())


def test_names_of_gpus_are_compared_without_their_maker() -> None:
    assert normal_name("NVIDIA H200") == "h200"
    assert normal_name("NVIDIA GeForce RTX 4090") == "geforce-rtx-4090"
    assert normal_name("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


def file(**changes: Any) -> str:
    data = {**json.loads(BY_HAND), **changes}
    return json.dumps({k: v for k, v in data.items() if v is not ...})


def tiles(kernel: str, table: str, dim: str, **row: Any) -> dict[str, Any]:
    return {kernel: {table: {dim: row}}}


GLUON = {
    "consumers": 1, "block_n": 64, "num_stages": 3, "programs_per_sm": 1, "min_tiles_per_sm": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "f.json is not JSON: Expecting"),
        ("[]", r"f.json: the file = \[\] is not accepted; expected an object of gpus, arch"),
        (file(tile={}), "f.json: the file has 'tile', which is unknown; expected an object of"),
        (file(gpus="H200"), "gpus = 'H200' is not accepted; expected a list"),
        (file(arch=...), "arch = None is not accepted; expected the compute capability of NVIDIA"),
        (file(arch=9.0), "arch = 9.0 is not accepted; expected a compute capability, as 90"),
        (file(gpus=..., arch=...), "for_all_of_arch = True is not accepted"),
        (file(made_by=...), "made_by = None is not accepted; expected a list of objects"),
        (file(made_by=[{"rows": ["x"]}]), "made_by = .* is not accepted"),
        (file(tiles=...), "tiles = None is not accepted; expected an object of triton, hopper"),
        (file(tiles={"cuda": {}}), "tiles has 'cuda', which is unknown"),
        (file(tiles={"hopper": {"decode_4bit": {}}}), "tiles.hopper has 'decode_4bit'"),
        (
            file(tiles={"hopper": {"prefill_16bit": {"96": GLUON}}}),
            "tiles.hopper.prefill_16bit has '96', which is unknown; expected an object of 64, 128",
        ),
        (
            file(tiles=tiles("triton", "decode_16bit", "64", **walk(64), block_m=16)),
            "tiles.triton.decode_16bit.64 has 'block_m', which is unknown; expected an object of "
            "block_n, num_warps",
        ),
        (
            file(tiles=tiles("triton", "decode_16bit", "64", block_n=64)),
            "tiles.triton.decode_16bit.64 has no num_warps; expected one of 1, 2, 4, 8, 16",
        ),
        (
            file(tiles=tiles("triton", "decode_16bit", "64", **walk(48))),
            "f.json: tiles.triton.decode_16bit.64.block_n = 48 is not accepted; expected one of",
        ),
        (
            file(tiles=tiles("triton", "decode_16bit", "64", **walk(64, num_stages=True))),
            "num_stages = True is not accepted; expected an integer from 1 to 8",
        ),
        (
            file(tiles=tiles("hopper", "prefill_16bit", "64", **{**GLUON, "min_tiles_per_sm": -1})),
            "min_tiles_per_sm = -1 is not accepted; expected a number from 0 to 1000",
        ),
        (
            file(
                tiles=tiles(
                    "hopper", "window_16bit", "64", **GLUON | {"consumers": 2, "programs_per_sm": 2}
                )
            ),
            "programs_per_sm = 2 is not accepted; expected 1 with 2 consumers",
        ),
        (
            file(tiles=tiles("triton", "verify_16bit", "64", **walk(64))),
            "tiles.triton.verify_16bit.64 needs a row of decode beside it",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_by_key_and_value(text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        loads(text, "f.json")


def test_a_verifying_row_splits_keys_no_further_than_decode_does() -> None:
    tuned = Tuned("f.json", rows={DECODE: walk(64)})
    assert tuned.with_row(VERIFY, walk(64, programs_per_sm=1, waves=8)).rows[VERIFY]["waves"] == 8
    with pytest.raises(ArgumentError, match=r"into 10 shares .* at most the 8 of its row"):
        tuned.with_row(VERIFY, walk(64, waves=5))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"none.json cannot be read: .*No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match=r"binary.json cannot be read: .*utf-8"):
        read(tmp_path / "binary.json")
