"""Schedule of ``bench sync``: what it runs, in which order, and about how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.replicas.methods import Method
from bench.replicas.tasks import TASKS, LearningTask

WORKERS = 4  # replicas, two on each core of the machine that this was written for
SEED = 10  # the first seed; settings were chosen with smaller ones, learning rates with 1000
CAP_SECONDS = 40.0  # for SSP, which sends more than BSP: it gets as many steps as fit
COMPUTE_SECONDS = {"gpt": 0.06, "digits": 0.01}  # of a step, four workers on two cores; for estimates only
BETWEEN_SECONDS = 2.5  # from run to run: connecting, evaluating

OVERLAP = 16  # steps: about as long as an exchange takes at 20 Mbit
HOOK = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
# One bucket: with DDP's own, PowerSGD's hook hung on Gloo. Perhaps as it starts new sums from callbacks, in any order.
ONE_BUCKET = {"bucket_cap_mb": 100}
POWER = Method(name="BSP + PowerSGD", kind="PowerSGD", tuned_as="power", settings={"ddp": ONE_BUCKET, "hook": HOOK})
BSP = Method(name="BSP (DDP)", kind="BSP", tuned_as="bsp")
LOCAL = {
    every: Method(name=f"Local SGD, every {every}", kind="LocalSGD", tuned_as=name, settings={"every": every})
    for every, name in ((5, "local 10"), (10, "local 10"), (25, "local 25"), (50, "local 50"), (100, "local 50"))
}
LATE = Method(
    name="Local SGD, every 50, overlapped",
    kind="LocalSGD",
    tuned_as="local overlapped",
    settings={"every": 50 - OVERLAP, "overlap": OVERLAP},
)
FEDAVG = Method(
    name="FedAvg, half, every 25", kind="FedAvg", tuned_as="local 25", settings={"fraction": 0.5, "every": 25}
)
SSP = Method(name="SSP, staleness 3", kind="SSP", tuned_as="ssp", settings={"staleness": 3})
DILOCO = Method(name="DiLoCo, every 25", kind="DiLoCo", tuned_as="diloco", settings={"every": 25})
PUBLISHED = {
    delta: Method(name=f"SelSync, delta {delta:g}", kind="SelSync", tuned_as="delta", settings={"delta": delta})
    for delta in (0.2, 0.25, 0.3, 0.5)
}
OURS = Method(name="SelSync, target 0.04", kind="SelSync", tuned_as="target", settings={"target": 0.04})
VARIANCE = Method(
    name="SelSync, variance, target 0.04",
    kind="SelSync",
    tuned_as="variance",
    settings={"target": 0.04, "signal": "replica-variance"},
)
DENSE = Method(  # for data that pull replicas apart
    name="SelSync, variance, target 0.2",
    kind="SelSync",
    tuned_as="variance",
    settings={"target": 0.2, "signal": "replica-variance"},
)
SPARSE = Method(
    name="SelSync, variance, target 0.02, gap 15",
    kind="SelSync",
    tuned_as="variance",
    settings={"target": 0.02, "min_gap": 15, "signal": "replica-variance"},
)
OVERLAPPED = Method(
    name="SelSync, variance, target 0.015, overlapped",
    kind="SelSync",
    tuned_as="variance overlapped",
    settings={"target": 0.015, "min_gap": 50, "signal": "replica-variance", "overlap": OVERLAP},
)
# A fixed bound on how far replicas may be apart (FDA), of the weights' length: 5% for the GPT, half for digits.
BOUNDED = {
    task: Method(
        name=f"SelSync, variance {delta:g}, overlapped",
        kind="SelSync",
        tuned_as="variance overlapped",
        settings={"delta": delta, "wait": False, "min_gap": 50, "signal": "replica-variance", "overlap": OVERLAP},
    )
    for task, delta in (("gpt", 0.003), ("digits", 0.25))
}
MATCHED = (
    Method(name="Local SGD, matched", kind="LocalSGD", tuned_as="local 25", matched=OURS.name),
    Method(name="random, matched", kind="RandomSync", tuned_as="local 25", matched=OURS.name),
)
SELECTIVE = (PUBLISHED[0.2], PUBLISHED[0.3], OURS, VARIANCE, SPARSE, OVERLAPPED)
MOST = (BSP, POWER, LOCAL[10], LOCAL[25], LOCAL[50], LOCAL[100], LATE, DILOCO, *SELECTIVE, *MATCHED)
ONCE = (LOCAL[5], FEDAVG, SSP, PUBLISHED[0.25], PUBLISHED[0.5])
SOME = (BSP, POWER, LOCAL[5], LOCAL[10], LOCAL[25], DILOCO, PUBLISHED[0.2], OURS, VARIANCE, DENSE)
FEW = (BSP, POWER, LOCAL[10], LOCAL[25], DILOCO, OURS, OVERLAPPED)


@dataclass(frozen=True, kw_only=True)
class SyncContest:
    """Methods that are compared with each other."""

    task: str
    split: str
    rate: int
    seeds: int
    methods: tuple[Method, ...]
    once: tuple[Method, ...] = ()  # with the first seed only
    steps: int | None = None  # None: the task's


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One scheduled run."""

    contest: SyncContest
    method: Method
    seed: int
    steps: int

    @property
    def is_capped(self) -> bool:
        """Whether it gets fewer steps than others, to save time."""
        return self.steps < steps_of(self.contest, self.method)

    @property
    def seconds(self) -> float:
        """Estimated seconds of the run."""
        task = TASKS[self.contest.task]
        return BETWEEN_SECONDS + self.steps * seconds_of_step(task, self.method, self.contest.rate)


FULL = (
    SyncContest(task="gpt", split="iid", rate=20, seeds=2, methods=(*MOST, BOUNDED["gpt"]), once=ONCE),
    SyncContest(task="digits", split="iid", rate=20, seeds=3, methods=(*MOST, BOUNDED["digits"]), once=ONCE),
    SyncContest(task="digits", split="labels", rate=20, seeds=2, methods=SOME),
    SyncContest(task="digits", split="labels, injected", rate=20, seeds=1, methods=(BSP, LOCAL[5], VARIANCE, DENSE)),
    SyncContest(task="digits", split="own chunks", rate=20, seeds=1, methods=(BSP, LOCAL[10], OURS, OVERLAPPED)),
    SyncContest(task="gpt", split="iid", rate=100, seeds=1, methods=FEW),
    SyncContest(task="digits", split="iid", rate=100, seeds=1, methods=FEW),
    SyncContest(task="gpt", split="iid", rate=1000, seeds=1, methods=FEW),
    SyncContest(task="digits", split="iid", rate=1000, seeds=1, methods=FEW),
)
QUICK = (
    SyncContest(task="digits", split="iid", rate=20, seeds=1, methods=(*MOST, BOUNDED["digits"]), once=ONCE, steps=144),
    SyncContest(task="digits", split="labels", rate=20, seeds=1, methods=(BSP, LOCAL[10], OURS), steps=80),
    SyncContest(task="gpt", split="iid", rate=100, seeds=1, methods=(BSP, LOCAL[10], OURS, MATCHED[0]), steps=24),
)


def order(contests: Sequence[SyncContest]) -> list[Turn]:
    """Return all turns: rate by rate, as workers have to move, then seed by seed, then method by method.

    Each seed begins with another method, so that none always has the machine as another one left it. Methods matched
    to others come after them. What is looked at first comes first, should the bench be broken off.
    """
    turns: list[Turn] = []
    for rate in dict.fromkeys(contest.rate for contest in contests):
        there = [contest for contest in contests if contest.rate == rate]
        for seed in range(max(contest.seeds for contest in there)):
            for contest in there:
                if seed < contest.seeds:
                    methods = (*contest.methods, *(contest.once if seed == 0 else ()))
                    turns += [_turn(contest, method, SEED + seed) for method in rotated(methods, seed)]
    return turns


def rotated(methods: Sequence[Method], seed: int) -> list[Method]:
    """Return the methods beginning with another for each seed, and the matched ones last.

    >>> [method.name for method in rotated([*MATCHED, BSP, POWER, OURS], 1)]
    ['BSP + PowerSGD', 'SelSync, target 0.04', 'BSP (DDP)', 'Local SGD, matched', 'random, matched']
    """
    free = [method for method in methods if method.matched is None]
    shift = seed % len(free)
    return [*free[shift:], *free[:shift], *(method for method in methods if method.matched is not None)]


def _turn(contest: SyncContest, method: Method, seed: int) -> Turn:
    task = TASKS[contest.task]
    steps = steps_of(contest, method)
    if method.kind == "SSP":
        steps = min(steps, max(task.every, int(CAP_SECONDS / seconds_of_step(task, method, contest.rate))))
    return Turn(contest=contest, method=method, seed=seed, steps=steps)


def steps_of(contest: SyncContest, method: Method) -> int:
    """Return a method's steps. Methods with cheap steps may take more of them, still in less time than BSP."""
    task = TASKS[contest.task]
    return contest.steps or (task.steps if method.kind == "BSP" else task.cheap_steps)


def exchange_bytes(task: LearningTask) -> float:
    """Return the bytes that a worker sends when all average their weights (reduce-scatter and all-gather)."""
    return 4.0 * task.parameters * 2 * (WORKERS - 1) / WORKERS


def seconds_of_step(task: LearningTask, method: Method, rate: int) -> float:
    """Return the estimated seconds of a step."""
    exchange = exchange_bytes(task) * 8 / (rate * 1e6) * 1.05
    compute = COMPUTE_SECONDS[task.name]
    share: float = {"BSP": 1.0, "PowerSGD": 0.15, "SSP": 2.0}.get(method.kind, 0.05)
    settings = method.settings
    if "every" in settings:
        share = 1 / settings["every"]
    elif "target" in settings:
        share = settings["target"]
    return compute + share * exchange
