"""``bench sync``, small: what is measured is what happened, and what is said of it can be false."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.race_report import Bar
from bench.races import sync
from bench.replicas import findings, methods, network, sync_pictures, tasks
from bench.replicas.processes import SyncOutcome, SyncRun, WorkerFailed, Workers, gather, workers
from bench.replicas.schedule import BSP, FULL, LOCAL, MATCHED, OURS, QUICK, SEED, Turn, order

RUN = SyncRun(
    task="digits", split="iid", rate=None, seed=0, method="BSP (DDP)", kind="BSP", settings={}, lr=8e-3, steps=12
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Two workers, in namespaces where that is possible: only there bytes are theirs alone."""
    place = network.namespaces(2, None) if network.why_not() is None else network.loopback(2)
    with place as made_network, workers(made_network, tmp_path_factory.mktemp("log") / "log") as made:
        yield made


def train(running: Workers, run: SyncRun) -> SyncOutcome:
    said = running.run(run, patience=60)
    return gather(run, said, every=8, counts_all=running.network.counts_all, capped=False)


def test_bsp_keeps_replicas_equal(running: Workers) -> None:
    outcome = train(running, RUN)
    assert outcome.at == [8, 12]
    assert outcome.local == [outcome.scores[-1]] * 2
    assert outcome.synchronised == list(range(12))
    assert 0 < outcome.seconds[0] < outcome.seconds[1] <= outcome.ended_s
    if not running.network.counts_all:
        gradients = 4 * sum(p.numel() for p in tasks.TASKS["digits"].build().parameters())
        assert 2 * 12 * gradients < outcome.sent[-1] < 3 * 12 * gradients  # two workers, each sends all once; headers


def test_apart_they_differ_and_send_less(running: Workers) -> None:
    local = replace(RUN, method="local", kind="LocalSGD", settings={"every": 5})
    outcome = train(running, local)
    assert outcome.synchronised == [4, 9]
    assert len(set(outcome.local)) == 2
    if not running.network.counts_all:
        assert outcome.sent[-1] < train(running, RUN).sent[-1] / 3
    assert outcome.sent_end > outcome.sent[-1]  # the forced average at the end


def test_the_same_run_gives_the_same_weights(running: Workers) -> None:
    local = replace(RUN, method="local", kind="LocalSGD", settings={"every": 5})
    assert train(running, local).scores == train(running, local).scores
    assert train(running, local).scores != train(running, replace(local, seed=1)).scores


@pytest.mark.thorough("starts its workers anew; a run that ends well is tested above")
def test_a_worker_that_breaks_is_said(running: Workers) -> None:
    """The next run has new workers."""
    with pytest.raises(WorkerFailed, match="broke off: worker"):
        running.run(replace(RUN, kind="LocalSGD", settings={"every": -1}), patience=60)
    assert running.processes == []
    assert train(running, RUN).synchronised == list(range(12))


# --- the plan --------------------------------------------------------------------------------------


def test_the_plan_fits_into_its_time() -> None:
    assert 10 < sum(turn.seconds for turn in order(FULL)) / 60 < 50
    assert sum(turn.seconds for turn in order(QUICK)) / 60 < 5


def test_every_method_has_a_tuned_rate() -> None:
    for turn in order(FULL):
        assert 1e-4 < turn.method.lr(turn.contest.task) < 0.1, turn.method.name


def test_matched_methods_come_after_what_they_are_matched_to() -> None:
    turns = order(FULL)
    for place, turn in enumerate(turns):
        if turn.method.matched is not None:
            before = [t.method.name for t in turns[:place] if (t.contest, t.seed) == (turn.contest, turn.seed)]
            assert turn.method.matched in before
    contest = FULL[1]
    assert contest.seeds > 1
    seeds = range(SEED, SEED + contest.seeds)
    firsts = {next(t.method.name for t in turns if t.contest == contest and t.seed == seed) for seed in seeds}
    assert len(firsts) == contest.seeds, "each seed begins with another"


@given(steps=st.integers(10, 500), share=st.floats(0.01, 0.5))
def test_a_matched_period_synchronises_as_often(steps: int, share: float) -> None:
    count = max(1, int(steps * share))
    every = MATCHED[0].settled(steps, count)["every"]
    assert count <= steps // every <= 2 * count  # whole periods: never fewer
    assert MATCHED[1].settled(steps, count)["share"] == count / steps


def test_parameters_are_as_many_as_the_estimates_say() -> None:
    for task in tasks.TASKS.values():
        assert sum(p.numel() for p in task.build().parameters()) == pytest.approx(task.parameters, rel=0.02)


# --- data ------------------------------------------------------------------------------------------


def test_who_reads_what() -> None:
    task = tasks.TASKS["digits"]
    data, held_out = task.data()
    labels = {}
    for split in ("iid", "labels", "labels, injected"):
        partition = tasks.make_partition(task, split, 0)
        read = [set(partition.samples(0, rank, workers=4, batch=256)) for rank in range(4)]
        labels[split] = [len({int(data.targets[i]) for i in each}) for each in read]
    assert labels["iid"] == [10] * 4
    assert max(labels["labels"]) == 3
    assert min(labels["labels, injected"]) > max(labels["labels"])
    assert not (data.inputs[:, None] == held_out.inputs[:1]).flatten(2).all(2).any()


# --- the report ------------------------------------------------------------------------------------


def outcome_of(method: methods.Method, *, seconds: float, sent: int = 1_000_000, final: float = 0.98) -> SyncOutcome:
    """Half way between the two evaluations it is at the target, 0.96."""
    run = replace(RUN, method=method.name, kind=method.kind, rate=20, steps=16)
    return SyncOutcome(
        run=run,
        at=[8, 16],
        seconds=[0.0, 2 * seconds],
        sent=[0, 2 * sent],
        scores=[2 * 0.96 - final if final > 0.96 else 0.5, final],
        local=[0.9, 0.8],
        synchronised=[3],
        ended_s=3 * seconds,
        sent_end=3 * sent,
    )


def test_the_target_is_reached_between_evaluations() -> None:
    bsp = findings.reach(outcome_of(BSP, seconds=10.0))
    assert bsp is not None
    assert [bsp.seconds, bsp.sent, bsp.samples] == pytest.approx([10.0, 1e6, 12 * 64])
    local = findings.reach(outcome_of(LOCAL[10], seconds=10.0))
    assert local is not None
    assert local.seconds > bsp.seconds  # its average has to be made first
    assert local.sent > bsp.sent
    assert findings.reach(outcome_of(BSP, seconds=1.0, final=0.9)) is None


def verdicts(*outcomes: SyncOutcome) -> list[bool]:
    bars: dict[str, Bar] = findings.bars_of(outcomes)
    return [bar.ok for bar in bars.values()]


def test_bars_can_be_missed() -> None:
    bsp, local = outcome_of(BSP, seconds=50.0), outcome_of(LOCAL[10], seconds=5.0)
    ours = outcome_of(OURS, seconds=4.0, sent=500_000)
    assert verdicts(bsp, local, ours) == [True] * 4
    assert verdicts(bsp, local, outcome_of(OURS, seconds=12.0, sent=500_000)) == [False, True, False, True]
    assert verdicts(bsp, local, outcome_of(OURS, seconds=4.0, sent=2_000_000)) == [True, True, True, False]
    assert verdicts(bsp, local, outcome_of(OURS, seconds=4.0, sent=1000, final=0.961)) == [True, False, True, True]
    assert verdicts(bsp, local, outcome_of(OURS, seconds=4.0, final=0.9)) == [False]


def test_rows_and_pictures(tmp_path: Path) -> None:
    outcomes = [
        outcome_of(BSP, seconds=50.0),
        outcome_of(OURS, seconds=5.0),
        outcome_of(LOCAL[5], seconds=1, final=0.9),
    ]
    table = findings.rows(outcomes)
    assert list(table) == [f"digits, iid, 20 Mbit: {name}" for name in (OURS.name, BSP.name, LOCAL[5].name)]
    assert table["digits, iid, 20 Mbit: " + OURS.name]["speed"]["median"] == pytest.approx(9.8, abs=0.4)
    assert table["digits, iid, 20 Mbit: " + LOCAL[5].name]["target_s"] == "reached with 0 of 1 seeds"
    said: list[str] = []
    sync_pictures.draw(tmp_path, outcomes, prefix="sync", say=said.append)
    assert {path.name for path in tmp_path.iterdir()} == {"sync-digits-iid-20.png", "sync-digits-iid-20-when.png"}


def test_outcomes_are_read_back(tmp_path: Path) -> None:
    kept = outcome_of(OURS, seconds=1.0)
    notes = tmp_path / "notes.jsonl"
    line = json.dumps(kept.to_json())
    notes.write_text(f"{line}\n{line[:30]}")
    assert sync.read(notes) == [kept]
    turn = Turn(contest=QUICK[0], method=MATCHED[0], seed=0, steps=16)
    assert sync.settle(turn, {}, 20) is None
    run = sync.settle(turn, {sync.key_of(kept.run): kept}, 20)
    assert run is not None
    assert run.settings == {"every": 16}


# --- the network -----------------------------------------------------------------------------------


@pytest.mark.skipif(network.why_not() is not None, reason=str(network.why_not()))
def test_a_limited_network_leaves_nothing_behind() -> None:
    def there() -> str:
        return subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout

    with network.namespaces(2, 20) as made:
        name = made.prefixes[1][-1]
        assert name.startswith(f"hfs-{os.getpid()}-")
        assert name in there()
        shown = subprocess.run([*made.prefixes[0], "tc", "qdisc"], check=True, capture_output=True, text=True).stdout
        assert "rate 20Mbit" in shown
    assert name not in there()
