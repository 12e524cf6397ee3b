"""`magi-serve tune` on the CPU, by a fake clock: what it chooses, when it ends, what it writes."""

import contextlib
import json
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from magi_serve import cli
from magi_serve.bench import measure, report, tune, tune_bench, tune_choice, tune_run, tune_targets
from magi_serve.bench.cases import parse
from magi_serve.bench.inputs import make_inputs
from magi_serve.bench.timing import Spread
from magi_serve.bench.tune_bench import Lost, Unfit
from magi_serve.bench.tune_choice import Trial, best, crossover, mean, wins
from magi_serve.bench.tune_compile import Compiler, Gpu, Job
from magi_serve.bench.tune_run import Clock, Outcome, Tuning, signed
from magi_serve.bench.tune_targets import Target
from magi_serve.errors import ArgumentError, NoKernelError
from magi_serve.kernels.ffa import tuning
from magi_serve.kernels.ffa.tuned_files import Row, RowName, Tuned, read

H200 = Gpu("NVIDIA H200", 90, 132)
DECODE = RowName("triton", "decode", 16, 128)
VERIFY = RowName("triton", "verify", 16, 128)
PREFILL = RowName("hopper", "prefill", 16, 128)
PRESENT = {"block_n": 64, "num_warps": 4, "num_stages": 5, "programs_per_sm": 2}
GLUON = {
    "consumers": 2, "block_n": 128, "num_stages": 2, "programs_per_sm": 1, "min_tiles_per_sm": 1,
}  # fmt: skip
FACTS = {"how": "magi-serve tune", "gpu": "NVIDIA H200", "date": "2026-01-01"}
BASE = Tuned(
    "h200.json", ("NVIDIA H200",), 90, made_by=({"how": "by hand"},),
    rows={DECODE: PRESENT, PREFILL: GLUON},
)  # fmt: skip


def near(median: float, noise: float = 0.001) -> Spread:
    return Spread(median, median - noise, median + noise)


# Which of several rows is better.


def test_means_are_geometric() -> None:
    assert mean([near(4.0, 0), near(1.0, 0)]) == pytest.approx(
        Spread(2.0, 2.0, 2.0).__class__(2, 2, 2)
    )


@pytest.mark.parametrize(
    ("ratios", "won"),
    [
        ([near(1.05)], True),
        ([near(1.05), near(1.0)], True),
        ([near(1.003)], False),  # beyond the noise, and not worth it
        ([near(1.05, noise=0.06)], False),  # within the noise
        ([near(1.20), near(0.97)], False),  # a case lost
        ([near(1.20), near(0.995)], True),  # by less than is borne
        ([near(1.20), near(0.97, noise=0.04)], True),  # or than the noise
    ],
)
def test_a_row_wins_by_more_than_the_noise_and_loses_no_case(
    ratios: list[Spread], won: bool
) -> None:
    assert wins(ratios) is won


def test_the_best_is_the_first_of_the_fastest_that_were_timed_on_every_case() -> None:
    trials = [
        Trial({"block_n": 16}, [near(1.5)]),
        Trial({"block_n": 32}, [near(1.4), near(1.4)], reason="wrong"),
        Trial({"block_n": 64}, [near(1.1), near(1.2)]),
        Trial({"block_n": 128}, [near(1.2), near(1.1)]),
    ]
    assert best(trials, 2) is trials[2]
    assert best(trials[:2], 2) is None


SIZES = (0.25, 0.5, 1.0, 1.5, 2.0)


@pytest.mark.parametrize(
    ("present", "ratios", "chosen"),
    [
        (1, (0.8, 0.9, 1.1, 1.2, 1.3), 1),
        (1, (0.8, 1.1, 1.1, 1.2, 1.3), 0.5),
        (1, (1.1, 1.1, 1.1, 1.2, 1.3), 0.25),
        (1, (1.1, 0.9, 1.1, 1.2, 1.3), 1),  # no gap is crossed
        (1, (0.5, 0.6, 0.8, 0.9, 1.1), 2.0),
        (1, (0.5, 0.6, 0.8, 1.0, 1.1), 1.5),
        (1, (0.5, 0.6, 0.7, 0.8, 0.9), 2.01),
        (1, (1.0, 1.0, 1.0, 1.0, 1.0), 1),
        (0, (0.5, 1.1, 1.1, 1.1, 1.1), 0.5),
        (5, (0.5, 0.6, 1.1, 1.2, 1.3), 1.0),
    ],
)
def test_the_crossover_moves_as_far_as_one_side_is_faster(
    present: float, ratios: tuple[float, ...], chosen: float
) -> None:
    assert crossover(present, [(s, near(r)) for s, r in zip(SIZES, ratios, strict=True)]) == chosen


def test_work_of_the_size_at_the_crossover_reaches_it() -> None:
    size = 128 / 132
    assert crossover(2, [(size, near(1.2))]) <= size


# A run, on a bench that knows all times.


@dataclass
class FakeBench:
    """Milliseconds by what a function of case, row and file says, or the error that it raises."""

    ms: Callable[[str, Row], float]
    gpu: Gpu = H200
    clock_s: float = 0.0
    seen: list[str] = field(default_factory=list)
    expected: list[Job] = field(default_factory=list)
    step_s: float = 0.0

    def expect(self, jobs: Iterable[Job]) -> None:
        self.expected += jobs

    @contextlib.contextmanager
    def open(self, case: str) -> Iterator[Any]:
        self.seen.append(case)
        yield SimpleNamespace(contender=lambda job, present=False: self.contender(case, job))

    def contender(self, case: str, job: Job) -> Callable[[], float]:
        assert job.case == case
        assert job.tuned.rows[job.name] == job.row
        self.clock_s += self.step_s
        milliseconds = self.ms(case, job.row)
        return lambda: milliseconds

    def now(self) -> float:
        return self.clock_s


def tuned_by(
    bench: FakeBench, targets: list[Target], base: Tuned = BASE, budget_s: float = 1000
) -> tuple[list[Outcome], Tuned, list[Tuned], list[dict[str, Any]]]:
    saved: list[Tuned] = []
    logged: list[dict[str, Any]] = []
    tuner = Tuning(
        bench, base, facts=FACTS, pairs=3, clock=Clock(budget_s, bench.now), say=lambda _: None,
        log=logged.append, save=saved.append,
    )  # fmt: skip
    return tuner.run(targets), tuner.base, saved, logged


CASES = ("1x1@8k/32:8:128/page16", "1x1@64k/32:8:128/page16")
TILES = ({"block_n": 32}, {"block_n": 64}, {"block_n": 128, "num_stages": 3})
DECODES = Target(DECODE, CASES, (TILES,))


def by_block(times: dict[float, float]) -> Callable[[str, Row], float]:
    return lambda case, row: times[row["block_n"]]


def test_the_faster_row_takes_the_place_of_the_present_one() -> None:
    bench = FakeBench(by_block({64: 1.0, 32: 0.9, 128: 0.8}))
    (outcome,), base, saved, logged = tuned_by(bench, [DECODES])
    assert outcome.status == "changed" and outcome.before == PRESENT
    assert outcome.after == base.rows[DECODE] == PRESENT | {"block_n": 128, "num_stages": 3}
    assert outcome.gain is not None and outcome.gain.median == pytest.approx(1.25)
    assert saved == [base] and base.rows[PREFILL] == GLUON
    assert base.made_by[-1]["date"] == "2026-01-01"
    assert base.made_by[-1]["rows"] == {str(DECODE): outcome.said}
    assert "1.250" in outcome.said and "2 cases" in outcome.said
    # What changes nothing is not tried against itself.
    assert [(r["case"], r["row"]["block_n"]) for r in logged] == [
        (case, n) for case in CASES for n in (32, 128)
    ]
    assert {r["status"] for r in logged} == {"ok"}


def test_a_present_row_that_is_not_beaten_stays_and_that_is_written_too() -> None:
    bench = FakeBench(by_block({64: 1.0, 32: 0.998, 128: 1.2}))
    (outcome,), base, saved, logged = tuned_by(bench, [DECODES])
    assert outcome.status == "kept" and base.rows == BASE.rows and saved == [base]
    assert base.made_by[-1]["rows"][str(DECODE)].startswith("kept: 2 others tried over 2 cases")
    # What was clearly slower on the first case is not timed on the next.
    assert [(r["row"]["block_n"], r["status"]) for r in logged] == [
        (32, "ok"), (128, "slower"), (32, "ok"),
    ]  # fmt: skip


def test_a_row_that_cannot_be_timed_is_skipped_with_the_reason() -> None:
    def ms(case: str, row: Row) -> float:
        if row["block_n"] == 32:
            raise Unfit("_attention_kernel spills 8 bytes per thread")
        return {64: 1.0, 128: 0.5}[int(row["block_n"])]

    (outcome,), _, _, logged = tuned_by(FakeBench(ms), [DECODES])
    assert outcome.status == "changed" and outcome.after["block_n"] == 128
    (skipped,) = [r for r in logged if r["status"] == "skipped"]
    assert skipped["reason"] == "_attention_kernel spills 8 bytes per thread"


def test_a_later_round_starts_from_what_the_first_one_chose() -> None:
    def ms(case: str, row: Row) -> float:
        return (0.8 if row["block_n"] == 32 else 1.0) * (0.5 if row.get("waves") == 8 else 1.0)

    target = replace(DECODES, rounds=(TILES, ({"waves": 8}, {"waves": 2})))
    (outcome,), base, saved, _ = tuned_by(FakeBench(ms), [target])
    assert base.rows[DECODE] == PRESENT | {"block_n": 32, "waves": 8} and len(saved) == 1
    assert outcome.gain is not None and outcome.gain.median == pytest.approx(2.5)


def test_a_later_target_stands_on_what_was_decided_before() -> None:
    bench = FakeBench(by_block({64: 1.0, 32: 0.9, 128: 0.8}))
    verify = Target(VERIFY, ("16x8@8k/32:8:128/page16",), (({"num_warps": 8},),))
    (_, second), base, _, _ = tuned_by(bench, [DECODES, verify])
    # It has no row of its own yet and takes decode's, which is 128 wide now.
    assert second.before["block_n"] == 128 and second.status == "kept"
    assert VERIFY not in base.rows and str(VERIFY) not in base.made_by[-1]["rows"]


def test_a_row_for_verifying_brings_decodes_into_a_file_without_one() -> None:
    bench = FakeBench(lambda case, row: 1.0 / row["num_warps"])
    verify = Target(VERIFY, ("16x8@8k/32:8:128/page16",), (({"num_warps": 8},),))
    (outcome,), base, _, _ = tuned_by(bench, [verify], replace(BASE, rows={PREFILL: GLUON}))
    assert outcome.status == "changed" and base.rows[VERIFY]["num_warps"] == 8
    assert base.rows[DECODE] == outcome.before


def test_a_row_that_files_may_not_hold_is_skipped() -> None:
    class Strict(FakeBench):
        def contender(self, case: str, job: Job) -> Callable[[], float]:
            try:
                job.tuned  # noqa: B018
            except ArgumentError as error:
                raise Unfit(str(error)) from error
            return super().contender(case, job)

    target = replace(DECODES, rounds=(({"num_warps": 3},),))
    (outcome,), _, _, logged = tuned_by(Strict(lambda case, row: 1.0), [target])
    assert outcome.status == "kept" and "none could be timed" in outcome.said
    assert "num_warps = 3 is not accepted" in logged[0]["reason"]


def test_crossovers_are_measured_as_gluon_against_triton() -> None:
    def ms(case: str, row: Row) -> float:
        rows = parse(case).q_lens[0]
        gluon = row["min_tiles_per_sm"] == 0
        assert gluon or row["min_tiles_per_sm"] == 1000
        return (0.5 if rows >= 256 else 2.0) if gluon else 1.0

    cases = ("1x{rows}/32:8:128/page16", "1x{rows}@16k/32:8:128/page16")
    target = Target(PREFILL, cases, sizes=(64, 128, 256, 512))
    bench = FakeBench(ms)
    (outcome,), base, _, _ = tuned_by(bench, [target])
    assert bench.seen[:2] == ["1x64/32:8:128/page16", "1x64@16k/32:8:128/page16"]
    # 256 rows are two tiles of each of 32 heads, over 132 multiprocessors.
    assert outcome.after == base.rows[PREFILL] == GLUON | {"min_tiles_per_sm": 0.48}
    assert "crossover 1 -> 0.48" in outcome.said and "0.97: 2.00" in outcome.said


def test_the_budget_ends_a_run_and_what_was_decided_is_kept() -> None:
    bench = FakeBench(by_block({64: 1.0, 32: 0.9, 128: 0.8}), step_s=10)
    # Present and two candidates on each of two cases take a minute; the second target has no time.
    second = replace(DECODES, row=DECODE._replace(dim=64))
    outcomes, base, saved, _ = tuned_by(bench, [DECODES, second, second], budget_s=75)
    assert [o.status for o in outcomes] == ["changed", "not decided", "not decided"]
    assert "budget of 75 s" in outcomes[1].said and bench.clock_s <= 75
    assert saved == [base] and base.rows[DECODE]["block_n"] == 128


def test_a_step_that_would_not_fit_is_not_begun() -> None:
    now = [0.0]
    clock = Clock(100, lambda: now[0])
    for _ in range(2):
        with clock.step():
            now[0] += 40
    with pytest.raises(tune_run.OutOfTime), clock.step():
        pass
    assert clock.left_s() == 20


def test_a_gpu_that_fails_ends_the_run() -> None:
    def ms(case: str, row: Row) -> float:
        if row["block_n"] == 128:
            raise Lost("the GPU failed: illegal memory access")
        return 1.0

    bench = FakeBench(ms)
    outcomes, _, saved, _ = tuned_by(bench, [DECODES, DECODES])
    assert [o.status for o in outcomes] == ["failed", "not decided"] and not saved
    assert "illegal memory access" in outcomes[1].said


def test_a_present_row_that_is_wrong_fails_and_a_kernel_that_cannot_is_left_out() -> None:
    def wrong(case: str, row: Row) -> float:
        raise Unfit("wrong: out errs by 1")

    def refused(case: str, row: Row) -> float:
        raise NoKernelError("no", {"hopper": ["needs sm_90"]})

    assert tuned_by(FakeBench(wrong), [DECODES])[0][0].status == "failed"
    left = tuned_by(FakeBench(refused), [DECODES])[0][0]
    assert left.status == "left out" and left.said == "hopper: needs sm_90"
    # No shipped file has Gluon's numbers for this architecture.
    bench = FakeBench(refused, gpu=Gpu("NVIDIA A10", 86, 72))
    gluon = Target(PREFILL, CASES, (({"consumers": 1},),))
    ampere = Tuned("a10.json", ("NVIDIA A10",), 86)
    assert tuned_by(bench, [gluon], ampere)[0][0].said == "no row to start"
    assert not bench.seen


def test_candidates_are_compiled_ahead_in_the_order_of_their_turns() -> None:
    bench = FakeBench(by_block({64: 1.0, 32: 0.9, 128: 0.8}))
    tuned_by(bench, [DECODES])
    expected = [(job.case, job.row["block_n"]) for job in bench.expected]
    assert expected == [(case, n) for case in CASES for n in (64, 32, 128)]


def test_rows_are_signed_by_what_measured_them_last() -> None:
    first = signed(BASE, str(DECODE), "1.1x", FACTS)
    assert first.made_by == ({"how": "by hand"}, {**FACTS, "rows": {str(DECODE): "1.1x"}})
    later = FACTS | {"date": "2026-02-02"}
    second = signed(first, str(DECODE), "kept", later)
    assert second.made_by == ({"how": "by hand"}, {**later, "rows": {str(DECODE): "kept"}})
    # Once all rows are, there is nothing that was made by hand.
    third = signed(second, str(PREFILL), "1.2x", later)
    assert third.made_by == ({**later, "rows": {str(DECODE): "kept", str(PREFILL): "1.2x"}},)
    fourth = signed(third, str(PREFILL), "crossover 1 -> 2", later)
    assert fourth.made_by[0]["rows"][str(PREFILL)] == "1.2x; crossover 1 -> 2"


# What can be tuned.


def test_every_target_can_be_measured_and_every_change_may_stand_in_a_file() -> None:
    names = [target.name for target in tune_targets.targets()]
    assert len(names) == len(set(names))
    base = replace(BASE, rows={})
    for target in tune_targets.targets():
        for case in target.cases:
            parsed = parse(case.format(rows=64))
            assert parsed.head_dim == target.row.dim
            assert (parsed.window is not None) == (target.row.kind == "window")
            assert (parsed.page_size is None) == (target.row.kind == "slices")
            decode = target.row.kind in ("decode", "verify")
            assert parsed.num_decodes == (len(parsed.q_lens) if decode else 0)
            groups = parsed.num_q_heads // parsed.num_kv_heads
            assert (parsed.q_lens[0] * groups > 16) == (target.row.kind != "decode")
        row = tuning.lookup(
            target.row.kernel, target.kinds, bits=16, dim=target.row.dim, arch=90, gpu="NVIDIA H200"
        )
        assert row is not None
        if target.row.kind == "verify":
            base = base.with_row(target.row._replace(kind="decode"), row)
        for changes in target.rounds:
            for change in changes:
                base.with_row(target.row, {**row, **change})


def test_quick_tunes_the_most_important_rows_first_round_on_two_cases() -> None:
    everything, quick = tune_targets.select([]), tune_targets.select([], quick=True)
    assert 0 < len(quick) < len(everything)
    assert all(len(t.cases) <= 2 and len(t.rounds) == 1 for t in quick)
    assert [t.name for t in quick][:2] == ["hopper-decode/128", "hopper-decode/64"]
    (one,) = tune_targets.select(["triton-verify/64"], quick=True)
    assert len(one.cases) == 2


def test_targets_are_selected_by_patterns_in_their_own_order() -> None:
    chosen = tune_targets.select(["*/crossover", "hopper-decode/*"])
    assert [t.name for t in chosen][:2] == ["hopper-decode/128", "hopper-decode/64"]
    assert chosen[3].name.endswith("/crossover")
    with pytest.raises(ArgumentError, match=r"--case 'decode' is unknown; accepted: hopper-dec"):
        tune_targets.select(["decode"])


# A candidate on the bench, with real kernels.


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tune_bench, "Replay", lambda run, calls: lambda: float(run(0).out.mean()))
    monkeypatch.setattr(tune_bench, "spills", lambda kernels: None)


def place(case: str) -> tune_bench.GpuPlace:
    return tune_bench.GpuPlace(make_inputs(parse(case), buffers=2, device="cpu"), lambda job: None)


def job(case: str, kernel: str = "cpu", **changes: int) -> Job:
    return Job(case, kernel, BASE, DECODE, PRESENT | changes)


@pytest.mark.parametrize("case", ["3x1@40/4:2:64s/page16", "band-160/4:2:64/contiguous"])
def test_a_contender_is_held_against_the_reference(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    assert abs(place(case).contender(job(case))()) < 1
    for name in ("paged_attention", "ffa_attention"):
        real = getattr(measure, name)

        def off(*args: Any, real: Any = real, **options: Any) -> Any:
            result = real(*args, **options)
            result.out[-1, 0] += 1.0
            return result

        monkeypatch.setattr(measure, name, off)
    with pytest.raises(Unfit, match=r"wrong: sequence \d: out of group 0 errs by"):
        place(case).contender(job(case))


def test_a_contender_runs_under_its_own_row(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, found = "3x1@40/4:2:64s/page16", []
    real = measure.prepare_ours

    def block_n() -> int | float:
        row = tuning.lookup("triton", ["decode"], bits=16, dim=128, arch=90, gpu=None)
        assert row is not None
        return row["block_n"]

    def prepare(*args: Any) -> Any:
        found.append(block_n())
        return real(*args)

    monkeypatch.setattr(tune_bench, "prepare_ours", prepare)
    place(case).contender(job(case, block_n=256))
    assert found == [256] and block_n() != 256


def test_why_a_contender_cannot_be_timed_is_said(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = "3x1@40/4:2:64s/page16"
    with pytest.raises(NoKernelError):
        place(case).contender(job(case, "hopper"))
    with pytest.raises(Unfit, match="num_warps = 3 is not accepted"):
        place(case).contender(job(case, num_warps=3))
    monkeypatch.setattr(tune_bench, "spills", lambda kernels: "it spills")
    with pytest.raises(Unfit, match="it spills"):
        place(case).contender(job(case))
    place(case).contender(job(case), present=True)  # it is what is served, and may

    def breaks(*args: Any) -> Any:
        raise RuntimeError("out of\n shared memory")

    monkeypatch.setattr(tune_bench, "prepare_ours", breaks)
    with pytest.raises(Unfit, match="RuntimeError: out of shared memory"):
        place(case).contender(job(case))
    monkeypatch.setattr(torch.cuda, "synchronize", breaks)
    with pytest.raises(Lost, match="the GPU failed"):
        place(case).contender(job(case))


def test_a_kernel_may_use_no_more_local_memory_than_is_known_to_be_harmless() -> None:
    def kernel(name: str, words: int) -> SimpleNamespace:
        return SimpleNamespace(name=name, n_spills=words)

    fine = [kernel("_hopper_prefill_kernel", 48), kernel("_attention_kernel", 2)]
    assert tune_bench.spills(fine) is None
    assert tune_bench.spills([*fine, kernel("_attention_kernel", 3)]) == (
        "_attention_kernel spills 12 bytes per thread"
    )
    assert tune_bench.spills([kernel("_hopper_prefill_kernel", 49)]) is not None


def test_kernels_are_compiled_by_processes_that_need_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler = Compiler(H200, workers=1)
    one = Job("2x1@64/8:8:64/page16", "triton", BASE, DECODE._replace(dim=64), PRESENT)
    wrong = replace(one, row=PRESENT | {"num_warps": 3})
    compiler.expect([wrong, one, one])
    assert len(compiler._jobs) == 2
    compiler.wait(one, 300)
    compiler.wait(wrong, 300)  # what is wrong is said when it takes its turn
    compiler.close()
    assert list(tmp_path.rglob("_attention_kernel.cubin"))


def test_without_workers_everything_is_compiled_at_its_turn() -> None:
    compiler = Compiler(H200, workers=0)
    compiler.expect([job("2x1@64/8:8:64/page16")])
    compiler.wait(job("2x1@64/8:8:64/page16"), 0)
    compiler.close()


# The command.


def test_a_kernel_that_does_not_end_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(tune, "GpuBench", lambda left_s: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(tune, "GRACE_S", 0.01)
    monkeypatch.setattr(tune.os, "_exit", lambda code: ended.set())
    with tune._bench(Clock(0.01)):
        assert ended.wait(10)
    assert "a kernel does not end; what was decided is kept" in capsys.readouterr().err


def test_without_a_gpu_it_says_so_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["tune"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("magi-serve tune: kernels are measured on an NVIDIA GPU, and PyTorch")
    assert cli.main(["tune", "--list", "--quick"]) == 0
    assert "| hopper-decode/128 | 3 rows | 1x1@8k/32:8:128/page16, 64x1@8k/" in (
        capsys.readouterr().out
    )


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for option in ("--case", "--out", "--json", "--budget", "--pairs", "--quick", "--list"):
        assert option in said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--case", "decode"], "--case 'decode' is unknown; accepted: hopper-decode/128"),
        (["--budget", "0"], "--budget 0.0 is not accepted; expected 1 or more"),
        (["--budget", "nan"], "--budget nan is not accepted"),
        (["--pairs", "0"], "--pairs 0 is not accepted"),
    ],
)
def test_arguments_that_are_not_accepted_are_told_what_is(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert cli.main(["tune", *argv]) == 1
    assert said in capsys.readouterr().err


@pytest.fixture
def on_bench(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    """The command on a fake GPU, where wide blocks are fast."""
    bench = FakeBench(lambda case, row: 1.0 / row["block_n"])

    @contextlib.contextmanager
    def opened(clock: Clock) -> Iterator[FakeBench]:
        yield bench

    monkeypatch.setattr(tune, "_bench", opened)
    monkeypatch.setattr(report, "_commit", lambda: "1234567")
    return bench


def test_a_run_writes_a_file_that_can_be_read_a_log_and_a_table(
    on_bench: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, log = tmp_path / "h200.json", tmp_path / "log.jsonl"
    argv = ["tune", "--case", "triton-decode/128", "--quick", "--out", str(out)]
    assert cli.main([*argv, "--json", str(log)]) == 0
    tuned = read(out)
    assert tuned.gpus == ("NVIDIA H200",) and tuned.arch == 90 and tuned.for_all_of_arch
    assert tuned.rows[DECODE]["block_n"] == 128
    shipped = next(t for t in tuning.shipped() if t.gpus == ("NVIDIA H200",))
    assert all(tuned.rows[n] == row for n, row in shipped.rows.items() if n != DECODE)
    made_by = tuned.made_by[-1]
    assert made_by["how"].startswith("magi-serve tune --case triton-decode/128 --quick")
    assert made_by["commit"] == "1234567" and made_by["torch"] and made_by["date"][:2] == "20"
    assert list(made_by["rows"]) == [str(DECODE)]
    first, *_ = map(json.loads, log.read_text().splitlines())
    assert first["target"] == "triton-decode/128" and first["commit"] == "1234567"
    assert first["ratio"]["median"] == 0.5 and first["status"] == "slower"
    said = capsys.readouterr()
    assert f"wrote {out}" in said.out and "| triton-decode/128 | changed | 2.000" in said.out
    assert "block_n=128" in said.out and "[1/1] triton-decode/128" in said.err
    assert stat.S_IMODE(out.stat().st_mode) & 0o444 == 0o444
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_second_run_goes_on_from_the_file_of_the_first(
    on_bench: FakeBench, tmp_path: Path
) -> None:
    out = tmp_path / "h200.json"
    for name in ("triton-decode/128", "triton-decode/64"):
        assert cli.main(["tune", "--case", name, "--quick", "--out", str(out)]) == 0
    tuned = read(out)
    assert tuned.rows[DECODE]["block_n"] == tuned.rows[DECODE._replace(dim=64)]["block_n"] == 128
    shipped = read(tune._own_file(H200))
    assert tuned.made_by[: len(shipped.made_by)] == shipped.made_by
    assert len(tuned.made_by) == len(shipped.made_by) + 2  # two commands


def test_a_gpu_without_a_file_gets_one_that_names_it(on_bench: FakeBench, tmp_path: Path) -> None:
    on_bench.gpu = Gpu("NVIDIA A10", 86, 72)
    out = tmp_path / "a10.json"
    assert cli.main(["tune", "--case", "triton-decode/128", "--out", str(out)]) == 0
    tuned = read(out)
    assert (tuned.gpus, tuned.arch, list(tuned.rows)) == (("NVIDIA A10",), 86, [DECODE])
    assert tune._own_file(on_bench.gpu).name == "a10.json"
    assert tune._own_file(H200).read_text() == tune.start_from(tune._own_file(H200), H200).dumps()


def test_what_is_decided_is_on_disk_though_the_run_is_cut_short(
    on_bench: FakeBench, tmp_path: Path
) -> None:
    out = tmp_path / "h200.json"

    def ms(case: str, row: Row) -> float:
        if ":64s/" in case:
            raise KeyboardInterrupt
        return 1.0 / row["block_n"]

    on_bench.ms = ms
    with pytest.raises(KeyboardInterrupt):
        cli.main(["tune", "--case", "triton-decode/*", "--quick", "--out", str(out)])
    assert read(out).rows[DECODE]["block_n"] == 128


def test_a_budget_that_decides_nothing_writes_nothing(
    on_bench: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class Spent(Clock):
        def left_s(self) -> float:
            return 0.0

        def spent_s(self) -> float:
            return self.budget_s

    monkeypatch.setattr(tune, "Clock", Spent)
    out = tmp_path / "h200.json"
    assert cli.main(["tune", "--quick", "--out", str(out)]) == 0
    assert not out.exists() and f"{out} was not written" in capsys.readouterr().out


def test_a_present_row_that_fails_makes_the_command_fail(
    on_bench: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(case: str, row: Row) -> float:
        raise Unfit("wrong: out | errs")

    on_bench.ms = wrong
    argv = ["tune", "--case", "triton-decode/128", "--out", str(tmp_path / "x.json")]
    assert cli.main(argv) == 1
    assert "not measured: wrong: out \\| errs" in capsys.readouterr().out


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "h200.json"
    tune.write(out, BASE)
    before = out.read_text()

    def full(self: Path, text: str) -> int:
        self.touch()
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        tune.write(out, signed(BASE, str(DECODE), "1.1x", FACTS))
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="made_by"):
        tune.write(out, replace(BASE, made_by=()))
    assert out.read_text() == before and list(tmp_path.iterdir()) == [out]


def test_files_that_a_run_cannot_start_from_or_write_are_refused_before_it(
    on_bench: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "b200.json"
    other.write_text(replace(BASE, gpus=("NVIDIA B200",), arch=100).dumps())
    assert cli.main(["tune", "--out", str(other)]) == 1
    assert "is for NVIDIA B200, and this GPU is NVIDIA H200 (sm_90)" in capsys.readouterr().err
    other.write_text("{}")
    assert cli.main(["tune", "--out", str(other)]) == 1
    assert "b200.json: made_by = None is not accepted" in capsys.readouterr().err
    assert cli.main(["tune", "--out", str(tmp_path / "none" / "x.json")]) == 1
    assert "its folder is missing or not ours; name another by --out" in capsys.readouterr().err
    assert not on_bench.seen


def test_the_table_shows_what_changed_what_was_kept_and_why() -> None:
    kept = Outcome(DECODES, "kept", PRESENT, PRESENT, None, "2 others tried")
    changed = Outcome(
        replace(DECODES, row=VERIFY), "changed", PRESENT, PRESENT | {"num_warps": 8}, near(1.1), "x"
    )
    said = tune.report([kept, changed])
    assert "| triton-decode/128 | kept | - | block_n=64 num_warps=4" in said
    assert "| triton-verify/128 | changed | 1.100 (1.099-1.101)x | block_n=64 num_warps=8" in said
    assert tune_choice.closest([]) is None
