"""Tuning one target after the other, within a budget of time; what is decided is kept at once."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from magi_serve.bench import tune_choice
from magi_serve.bench.cases import parse
from magi_serve.bench.timing import Spread, Timer, race
from magi_serve.bench.tune_bench import Bench, Lost, Place, Unfit
from magi_serve.bench.tune_choice import Trial
from magi_serve.bench.tune_compile import Job
from magi_serve.bench.tune_targets import Target
from magi_serve.errors import ArgumentError, NoKernelError
from magi_serve.kernels.ffa import tuning
from magi_serve.kernels.ffa.tuned_files import Row, Tuned


class Clock:
    """A budget of seconds, spent from the start on.

    A step is not begun when the longest one so far would no longer fit.
    """

    def __init__(self, budget_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._start = now()
        self.budget_s = budget_s
        self._longest = 0.0

    def spent_s(self) -> float:
        return self._now() - self._start

    def left_s(self) -> float:
        return max(0.0, self.budget_s - self.spent_s())

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step.

        Raises:
            OutOfTime: it would not fit.
        """
        begin = self.spent_s()
        if begin + self._longest >= self.budget_s:
            raise OutOfTime
        try:
            yield
        finally:
            self._longest = max(self._longest, self.spent_s() - begin)


class OutOfTime(Exception):
    """The budget is spent."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a target.

    Attributes:
        status: ``changed``, ``kept``; or ``left out``, ``failed``, ``not decided``: no choice made.
        before, after: the numbers in force; equal unless changed.
        gain: of the new row over the former one.
        said: why, in a few words.
    """

    target: Target
    status: str
    before: Row
    after: Row
    gain: Spread | None
    said: str


class Tuning:
    """Chooses rows on a bench.

    Args:
        bench: where candidates are measured.
        base: the file to improve.
        facts: what measures: GPU, versions, date; written beside the rows.
        pairs: turns that count in each race.
        clock: the budget.
        say: tells people of a step.
        log: takes one record per race or refusal.
        save: takes `base` after every decision.
    """

    def __init__(
        self,
        bench: Bench,
        base: Tuned,
        *,
        facts: Mapping[str, str],
        pairs: int,
        clock: Clock,
        say: Callable[[str], None],
        log: Callable[[dict[str, Any]], None],
        save: Callable[[Tuned], None],
    ) -> None:
        self.bench = bench
        self.base = base
        self.facts = facts
        self.pairs = pairs
        self.clock = clock
        self.say = say
        self.log = log
        self.save = save

    def run(self, targets: Sequence[Target]) -> list[Outcome]:
        """Tune `targets` in their order; those that time does not suffice for are not decided."""
        for target in targets:
            row = self.present(target)
            if row is not None:
                self.bench.expect(self._expected(target, row))
        outcomes: list[Outcome] = []
        ended = ""
        for i, target in enumerate(targets, 1):
            row = self.present(target)
            if ended or row is None:
                status, said = ("not decided", ended) if ended else ("left out", "no row to start")
                outcomes.append(Outcome(target, status, row or {}, row or {}, None, said))
                continue
            self.say(f"[{i}/{len(targets)}] {target.name}: {shown(row)}")
            try:
                outcome = self._crossover(target, row) if target.sizes else self._rows(target, row)
            except OutOfTime:
                ended = f"the budget of {self.clock.budget_s:.0f} s is spent"
                outcome = Outcome(target, "not decided", row, row, None, ended)
            except Lost as error:
                ended = str(error)
                outcome = Outcome(target, "failed", row, row, None, ended)
            except NoKernelError as error:
                said = "; ".join(f"{k}: {', '.join(why)}" for k, why in error.reasons.items())
                outcome = Outcome(target, "left out", row, row, None, said)
            except Unfit as error:
                outcome = Outcome(target, "failed", row, row, None, f"not measured: {error}")
            self.say(f"{target.name}: {outcome.status}, {outcome.said}")
            outcomes.append(outcome)
        return outcomes

    def present(self, target: Target) -> Row | None:
        """The row that is in force for `target`."""
        row, gpu = target.row, self.bench.gpu
        with tuning.used(self.base):
            return tuning.lookup(
                row.kernel, target.kinds, bits=row.bits, dim=row.dim, arch=gpu.arch, gpu=gpu.name
            )

    def _job(self, target: Target, case: str, row: Row) -> Job:
        base = self.base
        decode = target.row._replace(kind="decode")
        if target.row.kind == "verify" and decode not in base.rows:
            # A file with rows for verifying has those for decode, see `tuned_files`.
            general = self.present(replace(target, row=decode))
            if general is not None:
                base = base.with_row(decode, general)
        return Job(case, target.row.kernel, base, target.row, row)

    def _expected(self, target: Target, row: Row) -> Iterator[Job]:
        """What the target's first round will compile."""
        if target.sizes:
            for rows in target.sizes:
                for least in (1000, 0):
                    for case in target.sized(rows):
                        yield self._job(target, case, {**row, "min_tiles_per_sm": least})
            return
        for case in target.cases:
            for candidate in [row, *_changed(row, target.rounds[0])]:
                yield self._job(target, case, candidate)

    def _rows(self, target: Target, before: Row) -> Outcome:
        row, gain, tried, closest = before, None, 0, None
        for changes in target.rounds:
            trials = [Trial(candidate) for candidate in _changed(row, changes)]
            for case in target.cases:
                if alive := [trial for trial in trials if trial.reason is None]:
                    self._race(target, case, row, alive)
            tried += len(trials)
            if winner := tune_choice.best(trials, len(target.cases)):
                won = tune_choice.mean(winner.ratios)
                gain = won if gain is None else _times(gain, won)
                row = winner.row
            elif best := tune_choice.closest(trials):
                closest = f"the best other {tune_choice.mean(best.ratios)} over {_of(best, target)}"
        cases = f"{len(target.cases)} cases"
        if gain is not None:
            said = f"{gain} of the former row's speed over {cases}, {tried} others tried"
            self._decide(target, row, said)
            return Outcome(target, "changed", before, row, gain, said)
        said = f"{tried} others tried over {cases}; {closest or 'none could be timed'}"
        self._decide(target, None, f"kept: {said}")
        return Outcome(target, "kept", before, before, None, said)

    def _race(self, target: Target, case: str, row: Row, trials: Sequence[Trial]) -> None:
        """Let each of `trials` take turns with `row` on one case."""
        with ExitStack() as stack:
            with self.clock.step():
                place = stack.enter_context(self.bench.open(case))
            with self.clock.step():
                present = place.contender(self._job(target, case, row), present=True)
            for trial in trials:
                with self.clock.step():
                    self._turns(target, case, place, present, trial)

    def _turns(self, target: Target, case: str, place: Place, present: Timer, trial: Trial) -> None:
        record: dict[str, Any] = {"target": target.name, "case": case, "row": dict(trial.row)}
        try:
            raced = race(present, place.contender(self._job(target, case, trial.row)), self.pairs)
        except (Unfit, ArgumentError) as error:
            trial.reason = str(error)
            self.log(record | {"status": "skipped", "reason": trial.reason})
            self.say(f"  {case} {shown(trial.row)}: skipped, {trial.reason}")
            return
        trial.ratios.append(raced.ratio)
        if tune_choice.lost(raced.ratio):
            trial.reason = f"slower on {case}"
        self.log(
            record
            | {
                "status": "slower" if trial.reason else "ok",
                "pairs": raced.pairs,
                "ratio": asdict(raced.ratio),
                "present_ms": asdict(raced.baseline_ms),
                "ms": asdict(raced.ours_ms),
            }
        )
        self.say(f"  {case} {shown(trial.row)}: {raced.ratio}")

    def _crossover(self, target: Target, before: Row) -> Outcome:
        """Gluon against Triton at every size, and from there the size to change over at."""
        gpu = self.bench.gpu
        by_size: dict[float, list[Spread]] = {}
        for rows in target.sizes:
            for case in target.sized(rows):
                trial = Trial({**before, "min_tiles_per_sm": 0})
                self._race(target, case, {**before, "min_tiles_per_sm": 1000}, [trial])
                if not trial.ratios:
                    raise Unfit(trial.reason or "not timed")
                tiles = -(-rows // (64 * int(before["consumers"])))
                size = tiles * parse(case).num_q_heads / gpu.multiprocessors
                by_size.setdefault(size, []).append(trial.ratios[0])
        sized = [(size, tune_choice.mean(ratios)) for size, ratios in sorted(by_size.items())]
        present = before["min_tiles_per_sm"]
        chosen = tune_choice.crossover(present, sized)
        measured = ", ".join(f"{size:.2f}: {ratio.median:.2f}" for size, ratio in sized)
        said = f"crossover {present:g} -> {chosen:g}; Triton's time over Gluon's at {measured}"
        if chosen == present:
            said = said.replace(f" -> {chosen:g}", "")
            self._decide(target, None, f"kept: {said}")
            return Outcome(target, "kept", before, before, None, said)
        row = {**before, "min_tiles_per_sm": chosen}
        self._decide(target, row, said)
        return Outcome(target, "changed", before, row, None, said)

    def _decide(self, target: Target, row: Row | None, said: str) -> None:
        """Write a new row, or why the present one stays, and who measured it."""
        if row is not None:
            self.base = self._job(target, "", row).tuned
        if target.row in self.base.rows:
            self.base = signed(self.base, str(target.row), said, self.facts)
        self.save(self.base)


def signed(tuned: Tuned, row: str, said: str, facts: Mapping[str, str]) -> Tuned:
    """`tuned` with `said` about `row` under what measures now, and no longer under what did."""
    entries: list[dict[str, Any]] = []
    own: dict[str, str] = {}
    for entry in tuned.made_by:
        rows = dict(entry.get("rows", {}))
        if {k: v for k, v in entry.items() if k != "rows"} == facts:
            own = rows
            continue
        if rows.pop(row, None) is None or rows:
            entries.append({**entry, **({"rows": rows} if "rows" in entry else {})})
    if row in own and "crossover" in said:
        said = f"{own[row]}; {said}"
    own[row] = said
    named = set(own).union(*(entry.get("rows", {}) for entry in entries))
    if named.issuperset(map(str, tuned.rows)):  # nothing is left that the others could mean
        entries = [entry for entry in entries if "rows" in entry]
    return replace(tuned, made_by=(*entries, {**facts, "rows": own}))


def _changed(row: Row, changes: Iterable[Mapping[str, int | float]]) -> list[Row]:
    """`row` with each of `changes`, without those that change nothing."""
    return [{**row, **change} for change in changes if {**row, **change} != row]


def _times(first: Spread, second: Spread) -> Spread:
    return Spread(first.median * second.median, first.low * second.low, first.high * second.high)


def _of(trial: Trial, target: Target) -> str:
    return f"{len(trial.ratios)} of {len(target.cases)}"


def shown(row: Row) -> str:
    """A row's numbers in a few words."""
    return " ".join(f"{key}={value:g}" for key, value in row.items())
