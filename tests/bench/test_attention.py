"""`bench attention` on the CPU: real kernels and checks, with a fake clock."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from magi_serve.bench import attention, baselines, cli, measure, report, timing
from magi_serve.bench.baselines import BASELINES
from magi_serve.bench.cases import parse
from magi_serve.bench.inputs import Inputs, make_inputs, num_buffers
from magi_serve.bench.prepared import Prepared, Refused
from magi_serve.bench.timing import Race, Rates, Spread
from magi_serve.errors import ArgumentError
from magi_serve.kernels.ffa.reference import paged_attention_ref
from magi_serve.types import SinkSpec

RATES = Rates(copy_tb_per_s=4.0, read_tb_per_s=4.5, matmul_tflops=700.0)


def test_a_ratio_is_the_median_over_neighbours_and_the_first_turn_does_not_count() -> None:
    turns: list[str] = []

    def timer(name: str, times: Iterator[float]) -> Callable[[], float]:
        def turn() -> float:
            turns.append(name)
            return next(times)

        return turn

    # The card slows down by half: medians of each alone would not show that ours is always 2x.
    base = timer("b", iter([99.0, 2.0, 2.0, 4.0, 4.0, 6.0]))
    ours = timer("o", iter([1.0, 1.0, 1.0, 2.0, 2.0, 4.0]))
    raced = timing.race(base, ours, pairs=5)
    assert turns == ["b", "o"] * 6
    assert raced.ratio == Spread(2.0, 2.0, 2.0) and raced.pairs == 5
    assert raced.baseline_ms == Spread(4.0, 2.0, 4.0)
    assert raced.ours_ms.median == 2.0


def test_one_value_has_no_spread() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Spread(3.0, 2.0, 4.0)


def test_the_fastest_setting_of_a_baseline_counts() -> None:
    slow, fast = (lambda: 2.0), (lambda: 1.0)
    assert timing.fastest([("slow", slow), ("fast", fast)]) == ("fast", fast)


@pytest.mark.parametrize("name", ["1x1@2k/64:8:64s/page16", "64x1@128k/32:8:128/page16"])
def test_buffers_push_each_other_out_of_l2(name: str) -> None:
    case, l2 = parse(name), 50 << 20
    n = num_buffers(case, l2)
    assert (n - 1) * case.bytes() >= 2 * l2 or (n == 1 and case.bytes() > 40 * l2)


class FakeReplay:
    """Runs once for real, then claims a millisecond for ours and two for everything else."""

    count = 0

    def __init__(self, run: Callable[[int], Any], calls: int) -> None:
        run(calls - 1)
        self.calls = calls
        self.ms = 1.0 if FakeReplay.count == 0 else 2.0
        FakeReplay.count += 1

    def __call__(self) -> float:
        return self.ms


def exact(inputs: Inputs, kernel: str | None) -> Prepared:
    """The reference as a baseline for pages."""

    def run(i: int) -> torch.Tensor:
        window = None if inputs.case.window is None else (inputs.case.window - 1, 0)
        sink = None if inputs.sink is None else SinkSpec(inputs.sink.float())
        scale = inputs.case.head_dim**-0.5
        return paged_attention_ref(
            inputs.buffers[i].q, inputs.kv(i), inputs.cu_seqlens_q,
            window=window, sink=sink, softmax_scale=scale,
        ).out  # fmt: skip

    return Prepared({"plain": run})


def wrong(inputs: Inputs, kernel: str | None) -> Prepared:
    return Prepared({"bad": lambda i: exact(inputs, kernel).runs["plain"](i) * 1.1})


def refuses(inputs: Inputs, kernel: str | None) -> Prepared:
    raise Refused("no pipes | here")


def breaks(inputs: Inputs, kernel: str | None) -> Prepared:
    raise RuntimeError("no such\n symbol")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeReplay.count = 0
    monkeypatch.setattr(measure, "Replay", FakeReplay)
    for function in (exact, wrong, refuses, breaks):
        monkeypatch.setitem(BASELINES, function.__name__, function)


def rows_of(name: str, *beside: str) -> list[dict[str, Any]]:
    return measure.measure(
        parse(name), beside, kernel=None, pairs=3, rates=RATES, say=lambda _: None, device="cpu"
    )


@pytest.mark.parametrize(
    "name",
    [
        "3x1@40+1x30@50/4:2:64s/page16/window9",
        "2x4@70/4:2:64/page32",
        "1x60/8:2:64s/page16",
    ],
)
def test_a_case_is_checked_and_timed_beside_each_baseline(fakes: None, name: str) -> None:
    good, bad, refused, broken = rows_of(name, "exact", "wrong", "refuses", "breaks")
    assert good["status"] == "ok" and good["kernel"] == "cpu" and 0 < good["error"] < 0.01
    assert good["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0} and good["setting"] == "plain"
    assert 0 < good["baseline_error"] < 0.02
    assert good["tflops"] == parse(name).flops() / 1e9
    assert good["share_of_read"] == parse(name).bytes() / 1e9 / 4.5
    assert bad["status"] == "baseline wrong" and "away from ours" in bad["reason"]
    assert refused["status"] == "refused" and refused["reason"] == "no pipes | here"
    assert broken["reason"] == "breaks: RuntimeError: no such symbol"
    assert not any("ratio" in row for row in (bad, refused, broken))


@pytest.mark.parametrize("mask", ["blockcausal-160", "prefix-160", "band-160", "3x20", "2x5@30"])
def test_packed_cases_are_checked_and_compared_by_rate(fakes: None, mask: str) -> None:
    case = parse(f"{mask}/4:2:64/contiguous")
    (row,) = rows_of(case.name, "causal")
    assert row["error"] < 0.01
    if case.mask is None:
        assert row["status"] == "refused"
        return
    n = case.num_tokens
    share = case.visible_pairs() / (n * (n + 1) / 2)
    assert row["ratio"]["median"] == pytest.approx(2.0 * share)


def test_a_wrong_kernel_is_reported_and_never_timed(
    fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measure.paged_attention

    def off(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        result.out[-1, 0] += 1.0
        return result

    monkeypatch.setattr(measure, "paged_attention", off)
    rows = rows_of("2x4@70/4:2:64/page32", "exact", "refuses")
    assert [row["status"] for row in rows] == ["wrong", "wrong"]
    assert "out of group 0 errs by" in rows[0]["reason"] and FakeReplay.count == 0
    assert not any("ratio" in row for row in rows)


def test_a_kernel_that_cannot_do_a_case_fails_with_its_reasons(fakes: None) -> None:
    rows = measure.measure(
        parse("1x9/4:2:64/page16"), ["exact"],
        kernel="hopper", pairs=1, rates=RATES, say=lambda _: None, device="cpu",
    )  # fmt: skip
    assert rows[0]["status"] == "failed" and "device cpu is not supported" in rows[0]["reason"]


def test_pages_of_sequences_lie_apart_and_are_never_shared() -> None:
    inputs = make_inputs(parse("3x5@40/4:2:64/page16"), buffers=2, device="cpu")
    assert inputs.page_table is not None
    assert sorted(inputs.page_table.flatten().tolist()) == list(range(9))
    assert inputs.buffers[0].k.data_ptr() != inputs.buffers[1].k.data_ptr()
    assert not any(bool(b.q.isnan().any() or b.v.isnan().any()) for b in inputs.buffers)


@pytest.mark.parametrize("name", [n for n in BASELINES if n != "causal"])
def test_a_baseline_that_cannot_do_a_case_says_why(name: str) -> None:
    # Sinks and several sequences over slices or pages: each has a reason of its own, or no package.
    refused = "2x4@70/4:2:64s/page16" if name in ("cudnn", "flex", "flashinfer") else ""
    case = parse(refused or "band-160/4:2:64/contiguous")
    with pytest.raises(Refused) as error:
        BASELINES[name](make_inputs(case, buffers=1, device="cpu"), None)
    assert str(error.value)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    inputs = make_inputs(parse("1x9/4:2:64/page16"), buffers=1, device="cpu")
    with pytest.raises(Refused, match="flashinfer-python is not installed"):
        BASELINES["flashinfer"](inputs, None)


def test_baselines_are_those_asked_for_or_those_of_the_targets() -> None:
    (case,) = attention.select(["band-32k/32:8:128/contiguous"])
    assert baselines.baselines_for(case, None) == ["causal", "flex"]
    assert baselines.baselines_for(parse("1x9/4:2:64/page16"), None) == ["fa3"]
    assert baselines.baselines_for(case, ["fa3", "fa3"]) == ["fa3"]
    assert baselines.baselines_for(case, ["all"]) == list(BASELINES)
    with pytest.raises(ArgumentError, match=r"'fa2' is unknown; accepted: fa3, triton_attn"):
        baselines.baselines_for(case, ["fa2"])


def finished(name: str, baseline: str, ratio: float) -> dict[str, Any]:
    (case,) = attention.select([name])
    raced = Race(Spread(ratio, ratio, ratio), Spread(1, 1, 1), Spread(ratio, 0.9, 1.3), 5)
    row = {
        "case": "attention", "name": name, "group": case.group, "baseline": baseline,
        "kernel": "hopper", "flops": case.flops(), "bytes": case.bytes(), "error": 1e-3,
        "work": {"targets": dict(case.targets)}, "rates": {"matmul_tflops": 700.0,
        "read_tb_per_s": 4.5},
    }  # fmt: skip
    return row | measure.result_row(case, baseline, raced, RATES)


def lines_with(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def test_the_table_shows_losses_refusals_and_means_as_openly_as_wins() -> None:
    won = finished("1x8k/64:8:64s/page16", "fa3", 1.21)
    lost = finished("1x32k/64:8:64s/page16", "fa3", 1.0)
    plain = {k: won[k] for k in ("case", "name", "group", "error", "work", "flops", "bytes")}
    refused = plain | {"baseline": "flashinfer", "status": "refused", "reason": "no | sinks"}
    decode = finished("64x1@128k/32:8:128/page16", "fa3", 1.02)
    said = attention.report([won, lost, refused, decode], RATES)
    assert "1.210x (0.900-1.300) | 1.04x" in said and "| reached |" in said
    (line,) = lines_with(said, "1x32k")
    assert "1.000x" in line and line.endswith("| missed |") and "TFLOP/s" in line
    (line,) = lines_with(said, "flashinfer")
    assert line.endswith("refused: no \\| sinks |")
    (line,) = lines_with(said, "64x1@128k")
    assert "TB/s" in line and "93% of read reached" in line
    (line,) = lines_with(said, "| prefill-sink |")
    assert "1.100x | 1.08x | 2 of 2 | reached" in line


def test_a_mean_over_cases_that_were_not_all_timed_is_not_reached() -> None:
    won = finished("1x8k/64:8:64s/page16", "fa3", 1.5)
    lost = {"group": "prefill-sink", "baseline": "fa3", "status": "failed"}
    (mean,) = measure.means([won, lost])
    assert (mean["timed"], mean["of"], mean["reached"]) == (1, 2, False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_it_says_so_and_exits_with_1(
    no_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["attention"]) == 1
    assert "NVIDIA GPU" in capsys.readouterr().err
    assert cli.main(["attention", "--list"]) == 0
    assert "1x128k/64:8:64s/page16/window128 | 1.50 fa3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "accepted"),
    [
        (["prefil"], "prefill-sink, window"),
        (["--kernel", "fa3"], "cpu, hopper"),
        (["chunk", "--baseline", "fa2"], "fa3, triton_attn"),
        (["--pairs", "0"], "1 or more"),
    ],
)
def test_unknown_names_are_told_what_is_accepted(
    no_gpu: None, capsys: pytest.CaptureFixture[str], argv: list[str], accepted: str
) -> None:
    assert cli.main(["attention", *argv]) == 1
    said = capsys.readouterr().err
    assert accepted in said and argv[-1] in said


def test_a_chart_without_matplotlib_names_the_package(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["attention", "--plot", "x.png"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_chart_has_every_ratio(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [finished(f"1x{n}/64:8:64s/page16", "fa3", 1.1) for n in ("8k", "32k")]
    attention.plot(rows, tmp_path / "x.png", attention._pyplot())
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_writes_one_json_line_per_row_and_a_table(
    fakes: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(attention, "need_gpu", lambda: None)
    monkeypatch.setattr(attention, "measure_rates", lambda: RATES)
    monkeypatch.setattr(
        attention, "measure", lambda *a, **options: measure.measure(*a, **options, device="cpu")
    )
    monkeypatch.setattr(report, "_commit", lambda: None)
    path = tmp_path / "rows.jsonl"
    argv = ["attention", "1x9/4:2:64/page16", "--baseline", "exact", "refuses"]
    assert cli.main([*argv, "--json", str(path), "--commit", "abc1234", "--pairs", "2"]) == 0
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["commit"] == "abc1234" and first["gpu"] == "none" and first["torch"]
    assert first["work"]["q_lens"] == [9] and first["pairs"] == 2 and first["ratio"]["median"] == 2
    assert second["status"] == "refused"
    said = capsys.readouterr()
    assert "2.000x" in said.out and "refused: no pipes" in said.out
    assert "[1/1] 1x9/4:2:64/page16: checking cpu" in said.err


def test_a_told_commit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_commit", lambda: "1234567")
    assert report.machine("told")["commit"] == "told"
    assert report.machine()["commit"] == "1234567"
    monkeypatch.setattr(report, "_commit", lambda: None)
    assert report.machine("told")["commit"] == "told"
    assert report.machine()["commit"] == "unknown"


def test_a_package_that_is_no_part_of_a_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = SimpleNamespace(__file__=str(tmp_path / "__init__.py"), __version__="1")
    monkeypatch.setattr(report, "magi_serve", installed)
    assert report._commit() is None
