"""The two runs of the demo: train undisturbed, train again while workers are killed, compare the weights."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cluster.agent import Agent
from holdfast.cluster.agent_settings import AgentSettings
from holdfast.cluster.events import Events
from holdfast.cluster.zygote_keeper import start_zygote
from holdfast.demo.display import Show
from holdfast.demo.killer import POLL_SECONDS, Kill, check_kills, choose_kills, kill_workers
from holdfast.demo.story import Story, Tail
from holdfast.errors import HoldfastError, UsageError
from holdfast.words import size_text

SCRIPT = Path(__file__).parent / "train_gpt.py"
MEMORY = "30MB"  # of a worker with --pipeline: too little for the model, its gradients and a micro-batch
UNDISTURBED, DISTURBED = "undisturbed", "disturbed"
BY_HAND = 1000  # workers that somebody may kill: more than anybody has the patience for
PIPELINE = 2  # least workers of a pipeline, with that much memory each


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The settings of ``holdfast demo``.

    Args:
        workers: of each run.
        steps: of each run.
        kills: workers to kill in the second run.
        seed: decides the training, and which worker is killed when.
        pipeline: each worker of the second run holds some of the layers; the first run is one worker with all layers.
        sync: replicas of the second run synchronise only when their updates matter (SelSync).
        by_hand: somebody else kills workers of the second run, as often as they like; none is killed at random.
        out: folder for the picture, logs and events.

    Raises:
        UsageError: the settings contradict each other, or leave no room for the kills.

    >>> DemoSettings(workers=1, kills=0).steps
    80
    """

    workers: int = 4
    steps: int = 80
    kills: int = 6
    seed: int = 0
    pipeline: bool = False
    sync: bool = False
    by_hand: bool = False
    out: Path = Path("holdfast-demo")

    def __post_init__(self) -> None:
        if self.pipeline and self.sync:
            raise UsageError("replicas that train apart hold the whole model", hint="--pipeline or --sync, not both")
        minimum = PIPELINE if self.pipeline else 1
        check_kills(steps=self.steps, workers=self.workers, kills=self.kills, minimum=minimum)


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """A run that is over: its story, and the results of each worker that finished."""

    story: Story
    results: list[dict[str, Any]]

    def hash_of(self, what: str) -> str:
        """Return the hash of all workers; several, joined, if they differ."""
        return " and ".join(sorted({result[what] for result in self.results}))


@dataclass(frozen=True, kw_only=True)
class DemoVerdict:
    """The comparison of both runs."""

    settings: DemoSettings
    undisturbed: DemoRun
    disturbed: DemoRun
    picture: Path

    @property
    def identical(self) -> bool:
        """Whether weights, optimizer state and losses of all workers are the same in both runs, bit for bit."""
        one, other = self.undisturbed, self.disturbed
        same = all(one.hash_of(what) == other.hash_of(what) for what in ("weights", "state"))
        return same and self.agreed and one.story.losses == other.story.losses

    @property
    def agreed(self) -> bool:
        """Whether the workers of each run agree with each other, bit for bit."""
        return all(len({r["state"] for r in outcome.results}) == 1 for outcome in (self.undisturbed, self.disturbed))

    @property
    def good(self) -> bool:
        """Whether the demo succeeded. With ``sync`` a killed replica's own steps are lost: agreeing is enough then."""
        return self.agreed if self.settings.sync else self.identical

    @property
    def recovery_ms_median(self) -> float | None:
        """Median milliseconds from a kill to the next committed step; None without kills."""
        recoveries = self.disturbed.story.recoveries_ms
        return statistics.median(recoveries) if recoveries else None

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``holdfast demo --json`` prints."""
        cut = [arrangement.to_json() for arrangement in self.disturbed.story.arrangements]
        return {
            "steps": self.settings.steps,
            "workers": self.settings.workers,
            "kills": len(self.disturbed.story.deaths),
            "recoveries_ms": [round(ms, 1) for ms in self.disturbed.story.recoveries_ms],
            "recovery_ms_median": None if (ms := self.recovery_ms_median) is None else round(ms, 1),
            "weights_sha256": self.disturbed.hash_of("weights"),
            "undisturbed_sha256": self.undisturbed.hash_of("weights"),
            "identical": self.identical,
            **({"sync": self._talk()} if self.settings.sync else {}),
            **({"layouts": cut} if self.settings.pipeline else {}),
        }

    def lines(self) -> Iterator[str]:
        """Yield the comparison in lines for people."""
        one, other = self.undisturbed, self.disturbed
        for what, name in (("weights", "weights"), ("state", "weights and optimizer state")):
            yield f"sha256 of {name}"
            yield f"  undisturbed  {one.hash_of(what)}"
            yield f"  disturbed    {other.hash_of(what)}"
        if self.settings.sync:
            yield from self._words_about_talk()
        else:
            yield f"losses: {'all' if one.story.losses == other.story.losses else 'NOT all'} the same in both runs"
        if (ms := self.recovery_ms_median) is not None:
            step_ms = 1000 * other.story.step_seconds  # of the same run: the machine may have been busier
            yield f"from a kill to the survivors' next step: {ms:.0f} ms (median); a step alone: {step_ms:.0f} ms"
        if (kills := len(other.story.deaths)) < self.settings.kills and not self.settings.by_hand:
            yield f"the run was over after {kills} of {self.settings.kills} kills: there were too few workers to kill"
        yield f"loss curves{', and who held which layers' if self.settings.pipeline else ''}: {self.picture}"

    def _talk(self) -> dict[str, Any]:
        """Return the bytes that a worker of each run has sent, and each run's loss."""
        found: dict[str, Any] = {}
        for name, outcome in ((UNDISTURBED, self.undisturbed), (DISTURBED, self.disturbed)):
            sent = [result["sent"] for result in outcome.results]
            found[name] = {"sent": statistics.median(sent), "loss": outcome.results[0]["loss"]}
        syncs = self.disturbed.story.syncs
        return {**found, "synchronised": 0 if syncs is None else syncs.number, "replicas_equal": self.agreed}

    def _words_about_talk(self) -> Iterator[str]:
        talk = self._talk()
        for name, way in ((UNDISTURBED, "at every step"), (DISTURBED, f"{talk['synchronised']} times")):
            sent, loss = size_text(talk[name]["sent"]), talk[name]["loss"]
            yield f"{name}: synchronised {way}, a worker sent {sent}; loss on text that it has not seen: {loss:.3f}"

    def headline(self) -> str:
        """Return the verdict in one line."""
        kills = len(self.disturbed.story.deaths)
        happened = f"{kills} {'worker' if kills == 1 else 'workers'} killed"
        if self.settings.sync:
            return f"{happened}: {'all replicas end with the same weights' if self.agreed else 'replicas NOT equal'}"
        return f"{happened}: {'weights identical, bit for bit' if self.identical else 'NOT identical'}"


def run_demo(settings: DemoSettings, show: Show) -> DemoVerdict:
    """Train twice, draw the loss curves, and return the comparison.

    Args:
        settings: of the demo.
        show: is told what happens.

    Raises:
        UsageError: the folder cannot be written.
        HoldfastError: a run failed or was stopped.
    """
    plan = choose_kills(steps=settings.steps, workers=settings.workers, kills=settings.kills, seed=settings.seed)
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write to {settings.out}: {e.strerror}", hint="--out another folder") from e
    try:
        with start_zygote() as zygote:  # torch is imported once for both runs
            undisturbed = _train(UNDISTURBED, [], settings, show, zygote)
            disturbed = _train(DISTURBED, plan, settings, show, zygote)
    finally:
        show.close()
    picture = settings.out / "loss.png"
    verdict = DemoVerdict(settings=settings, undisturbed=undisturbed, disturbed=disturbed, picture=picture)
    from holdfast.demo.loss_picture import plot_losses  # matplotlib takes a second to import

    Events(settings.out / DISTURBED / "events.jsonl").write(
        "verdict", text=verdict.headline(), good=verdict.good, sha256=disturbed.hash_of("weights")
    )
    plot_losses(picture, undisturbed=undisturbed.story, disturbed=disturbed.story, title=verdict.headline())
    return verdict


def _train(name: str, plan: Sequence[Kill], settings: DemoSettings, show: Show, zygote: socket.socket) -> DemoRun:
    folder = settings.out / name
    for old in (*folder.glob("*.jsonl"), *folder.glob("worker-*.log")):
        old.unlink()  # of an earlier demo: events and results are appended to
    results = folder / "results.jsonl"
    options = ["--steps", str(settings.steps), "--seed", str(settings.seed), "--results", str(results.absolute())]
    cut, apart = settings.pipeline and name == DISTURBED, settings.sync and name == DISTURBED
    agent_settings = AgentSettings(
        command=[str(SCRIPT), *options, *(["--memory", MEMORY] if cut else []), *(["--sync"] if apart else [])],
        workers=1 if settings.pipeline and not cut else settings.workers,
        max_restarts=BY_HAND if settings.by_hand else settings.kills + settings.workers,
        log_dir=folder,
        environment={"OMP_NUM_THREADS": "1"},  # exactness needs the same number of threads everywhere
        quiet=True,
    )
    story = Story(steps=settings.steps, by_hand=settings.by_hand)
    show.begin(name, story)
    code = asyncio.run(_perform(agent_settings, zygote, plan, story, show))
    if code or not results.exists():
        raise _failure(name, code, story.over, folder)
    lines = results.read_text().splitlines()
    return DemoRun(story=story, results=[json.loads(line) for line in lines])


def _failure(name: str, code: int, reason: str, folder: Path) -> HoldfastError:
    if code >= 128:  # a signal: Ctrl-C, most likely
        error = HoldfastError(f"the {name} run was stopped, so there is nothing to compare")
    else:
        error = HoldfastError(f"the {name} run failed: {reason or f'exit code {code}'}", hint=f"see {folder}")
    error.exit_code = code or 1
    return error


async def _perform(
    settings: AgentSettings, zygote: socket.socket, plan: Sequence[Kill], story: Story, show: Show
) -> int:
    """Run an agent, the narrator and the killer in one event loop; return the agent's exit code."""
    complain = functools.partial(print, file=sys.stderr, flush=True)
    agent = Agent(settings, zygote=zygote, say=show.tell, complain=complain)
    news = Tail(settings.log_dir / "events.jsonl")

    def narrate() -> None:
        for event in news.read():
            if (sentence := story.hear(event)) is not None:
                show.tell(sentence)
        show.tick()

    async def keep_narrating() -> None:
        while True:
            narrate()
            await asyncio.sleep(POLL_SECONDS)

    async with asyncio.TaskGroup() as group:  # an error in one ends the others, and the agent its workers
        others = [
            group.create_task(keep_narrating()),
            group.create_task(kill_workers(plan, agent, story, show.tell)),
        ]
        code = await agent.run()
        for task in others:
            task.cancel()
    narrate()
    return code
