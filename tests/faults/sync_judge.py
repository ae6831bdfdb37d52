"""What runs of ``sync_train.py`` are judged by: no survivor's step is lost or done twice, and averages are averages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.faults import sync_train
from tests.harness import Result, assert_every_worker_commits_each_step_once, launch

SCRIPT = Path(sync_train.__file__)
CLOSE = 1e-9
STEPS = 12
AHEAD = 4  # steps that a lost replica may have pushed before others made them, with the staleness below
Weights = npt.NDArray[np.float64]

# What the sweeps try. DiLoCo's outer step is the mean here, so that it can be judged as the others are.
POLICIES = {
    "delta": "SelSync(delta=0.3)",
    "target": "SelSync(target=0.3, max_local_steps=4)",
    "variance": "SelSync(delta=0.02, signal='replica-variance')",
    "local": "LocalSGD(every=3)",
    "overlap": "LocalSGD(every=4, overlap=2)",
    "fedavg": "FedAvg(fraction=0.5, every=3)",
    "diloco": "DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0)",
    "gradients": "SelSync(delta=0.3, aggregate='gradients')",
    "ssp": "SSP(staleness=2)",
}


@dataclass(kw_only=True)
class Rules:
    """What a policy allows beside plain averages."""

    overlap: int = 0  # what was found is added so many steps later
    some: bool = False  # an average may leave replicas out, as FedAvg's does

    @staticmethod
    def of(name: str) -> Rules:
        return Rules(overlap=2 if name == "overlap" else 0, some=name == "fedavg")


@dataclass(kw_only=True)
class Life:
    """One worker's: its weights before the step after t steps, and after the update that made it t steps."""

    before: dict[int, Weights] = field(default_factory=dict)
    after: dict[int, Weights] = field(default_factory=dict)

    def moved(self, step: int) -> bool:
        """Whether something else than its own updates has changed its weights when it had so many steps."""
        return step in self.before and step in self.after and bool((self.before[step] != self.after[step]).any())


@dataclass(kw_only=True)
class Trial:
    """A run with the journals of its workers."""

    result: Result
    journals: dict[str, list[dict[str, Any]]]

    def of(self, kind: str) -> dict[str, list[dict[str, Any]]]:
        return {worker: [e for e in lines if e["kind"] == kind] for worker, lines in self.journals.items()}

    @property
    def lives(self) -> dict[str, Life]:
        lives = {worker: life_of(worker, updates) for worker, updates in self.of("update").items()}
        for line in self.result.results:
            life = lives.setdefault(line["worker"], Life())  # who comes in at the very end has no update to tell of
            life.before[steps_in(line["worker"], np.array(line["count"]))] = np.array(line["count"])
        return lives


def train(folder: Path, policy: str, *, model: str = "count", steps: int = STEPS, **settings: Any) -> Trial:
    """One run; names in capitals are the script's settings, the others the harness's or the agent's."""
    environment = {name: str(settings.pop(name)) for name in list(settings) if name.isupper()}
    environment |= {"POLICY": POLICIES.get(policy, policy), "MODEL": model, "STEPS": str(steps)}
    folder.mkdir(exist_ok=True)
    result = launch(folder, script=SCRIPT, environment=environment, **settings)
    return read(folder, result)


def read(folder: Path, result: Result) -> Trial:
    found = {}
    for path in sorted(folder.glob("journal-*.jsonl")):
        lines = path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # a kill may cut the last
        found[path.stem.removeprefix("journal-")] = [json.loads(line) for line in whole]
    return Trial(result=result, journals=found)


# --- the end ---------------------------------------------------------------------------------------------


def assert_good_end(trial: Trial, *, steps: int = STEPS, finish: Iterable[str] = ()) -> None:
    """All that finish are equal, have all steps, and were told the same."""
    result = trial.result
    assert result.code == 0, result.said
    assert result.sha256
    for name in ("weights", "value", "steps"):
        assert len({line[name] for line in result.results}) == 1, f"{name}: {result.results}"
    assert result.results[0]["steps"] == steps
    assert set(finish) <= {line["worker"] for line in result.results}, "survivors never restart"
    assert_every_worker_commits_each_step_once(result)
    told: dict[int, set[float]] = {}
    for lines in trial.of("value").values():
        for line in lines:
            told.setdefault(line["number"], set()).add(line["value"])
    assert all(len(values) == 1 for values in told.values()), f"evaluations differ: {told}"


def assert_went_on(trial: Trial, lost: set[str], *, workers: int) -> None:
    """Those who were not struck are those who were there from the begin, and nothing came from a checkpoint."""
    assert {e["worker"] for e in trial.result.of("failure") if e["member"]} == lost
    assert not trial.result.of("resumed")
    survivors = {f"0.{n}" for n in range(workers)} - lost
    assert survivors <= {line["worker"] for line in trial.result.results}, "survivors never restart"


# --- the way there ---------------------------------------------------------------------------------------


def steps_in(worker: str, weights: Weights) -> int:
    total = float(weights.sum())
    assert abs(total - round(total)) < CLOSE, f"{worker} has part of a step: {total}"
    return round(total)


def life_of(worker: str, updates: list[dict[str, Any]]) -> Life:
    life = Life()
    for update in updates:
        before, after = np.array(update["before"]), np.array(update["after"])
        step = steps_in(worker, before)
        assert step not in life.before, f"{worker} has done step {step} twice: a survivor went back"
        life.before[step], life.after[step + 1] = before, after
    return life


def assert_nothing_lost(lives: dict[str, Life], rules: Rules, *, steps: int = STEPS) -> None:
    """Every worker has each step once from its first to its last, and changes otherwise only by a right average."""
    for worker, life in lives.items():
        have = sorted(life.before)
        assert have == list(range(have[0], have[-1] + 1)) if have else True, f"{worker} has skipped steps: {have}"
    stayed = {worker for worker, life in lives.items() if steps in life.before}
    assert stayed, "nobody came to the end"
    for step in range(1, steps + 1):
        _judge(lives, rules, step, stayed)


def _judge(lives: dict[str, Life], rules: Rules, step: int, stayed: set[str]) -> None:
    """What became of the weights between the update that made it so many steps and the next one."""
    # Who is lost later may have been ahead of the others, or alone with an average that nobody else has heard of.
    came = {worker: life for worker, life in lives.items() if step in life.before and worker in stayed}
    old = [worker for worker, life in came.items() if step in life.after]
    moved = [worker for worker in old if lives[worker].moved(step)]
    for worker in set(came) - set(old):
        others = [life.before[step] for name, life in lives.items() if name != worker and step in life.before]
        equal = [other for other in others if (other == came[worker].before[step]).all()]
        assert equal or not others, f"{worker} came in after {step} steps with weights that nobody has"
    if not moved or (rules.overlap and _is_late_average(lives, moved, step, rules.overlap)):
        return
    first = next(iter(came.values())).before[step]
    for worker, life in came.items():
        assert (life.before[step] == first).all(), f"after {step} steps {worker} differs from {next(iter(came))}"
    made = {worker: life.after[step] for worker, life in lives.items() if step in life.after}
    sure = [] if rules.some else old
    assert is_mean(first, made, sure), f"after {step} steps weights are no average that has all of {old}"


def _is_late_average(lives: dict[str, Life], moved: list[str], step: int, lag: int) -> bool:
    """Whether what was added now makes replicas equal as they were some steps ago, at their average then."""
    then = step - lag
    if any(then not in lives[worker].after for worker in moved):
        return False
    changed = [lives[w].after[then] + lives[w].before[step] - lives[w].after[step] for w in moved]
    made = {worker: life.after[then] for worker, life in lives.items() if then in life.after}
    return all(np.abs(c - changed[0]).max() < CLOSE for c in changed) and is_mean(changed[0], made, moved)


def is_mean(value: Weights, made: dict[str, Weights], sure: list[str]) -> bool:
    """Whether it is the mean of some of these: of the sure ones at least, perhaps of others that are lost by now."""
    others = [worker for worker in made if worker not in sure]
    for number in range(len(others) + 1):
        for more in itertools.combinations(others, number):
            members = [*sure, *more]
            if members and np.abs(np.mean([made[w] for w in members], axis=0) - value).max() < CLOSE:
                return True
    return False


def assert_nothing_lost_by_a_server(trial: Trial) -> None:
    """Where updates are pushed one by one: finds how much each of all updates counts in the final weights.

    Those of a replica that stayed count all; of one that was lost, the first so many, as far as they were heard.
    """
    updates = {w: [np.array(u["after"]) - np.array(u["before"]) for u in us] for w, us in trial.of("update").items()}
    stayed = {line["worker"] for line in trial.result.results}
    columns = np.array([update for own in updates.values() for update in own]).T
    final = np.array(trial.result.results[0]["count"])
    weights, *_ = np.linalg.lstsq(columns, final, rcond=None)
    assert np.abs(columns @ weights - final).max() < 1e-6, "the final weights are no sum of updates"
    _assert_in_all(trial, final.sum(), sum(len(updates.get(worker, ())) for worker in stayed))
    if np.linalg.matrix_rank(columns) < columns.shape[1]:  # four workers share three micro-batches, or it was long
        return  # which of the updates count cannot be told
    for worker, own in updates.items():
        mine, weights = weights[: len(own)], weights[len(own) :]
        counts = [any(abs(w - 1 / n) < 1e-6 for n in range(1, 7)) for w in mine]
        nothing = [abs(w) < 1e-6 for w in mine]
        heard = sum(counts) if worker not in stayed else len(own)
        assert all(counts[:heard]), f"{worker}: updates count {mine.round(3)}"
        assert all(nothing[heard:]), f"{worker}, which is lost: updates count {mine.round(3)}"


def _assert_in_all(trial: Trial, total: float, kept: int) -> None:
    """Each update adds one in all, and counts 1/N: those of who stayed do, and a lost one was few steps ahead."""
    steps, losses = trial.result.results[0]["steps"], len(trial.result.of("failure"))
    workers = max(line["workers"] for lines in trial.of("step").values() for line in lines)
    least = steps if not losses else kept / workers
    assert least - 1e-6 < total < steps + AHEAD * losses + 1e-6, f"{total} steps are in the weights, of {steps}"


def times_apart(lives: dict[str, Life], *, steps: int = STEPS) -> int:
    """After how many steps replicas differed: none would mean that nothing was tried."""
    found = 0
    for step in range(1, steps + 1):
        here = [life.before[step] for life in lives.values() if step in life.before]
        found += any((weights != here[0]).any() for weights in here)
    return found
