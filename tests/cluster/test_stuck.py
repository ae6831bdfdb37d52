"""The decision who is stuck, the pulse that it is made from, and the setting."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import threading
from pathlib import Path

import pytest

from holdfast.cluster import stacks
from holdfast.cluster.pulse import STEP_WINDOW, Observer, Pulse, Still
from holdfast.cluster.stuck import (
    ALL_FACTOR,
    DOUBLINGS,
    MULTIPLE,
    OTHER_FACTOR,
    STEP_SECONDS,
    StepTimeout,
    Stuck,
    StuckWatch,
)
from holdfast.data import fetch
from holdfast.errors import UsageError
from holdfast.processes import is_stopped

OTHER = OTHER_FACTOR * STEP_SECONDS


def look(
    watch: StuckWatch, stills: dict[str, Still], now: float = 0.0, starting: dict[str, float] | None = None
) -> Stuck | None:
    return watch.look(stills, members=list(stills), starting=starting or {}, now=now)


def still(where: str, seconds: float, **slowest: float) -> Still:
    return Still(where=where, seconds=seconds, **slowest)  # type: ignore[arg-type]


# --- the decision ---------------------------------------------------------------------------------------


def test_the_one_that_the_others_wait_for_is_stuck() -> None:
    watch = StuckWatch(StepTimeout())
    others = {"0.0": still("wait", 1000.0), "0.2": still("wait", 1000.0)}
    assert look(watch, {**others, "0.1": still("step", STEP_SECONDS)}) is None
    found = look(watch, {**others, "0.1": still("step", STEP_SECONDS + 1)})
    assert found == Stuck(worker="0.1", where="step", seconds=STEP_SECONDS + 1, limit=STEP_SECONDS)
    assert found.cause == "stuck: no sign of progress for 61 s in a step (limit 60 s)"


def test_who_waits_is_never_stuck() -> None:
    watch = StuckWatch(StepTimeout())
    assert look(watch, {name: still("wait", 1e9) for name in ("0.0", "0.1")}) is None


def test_the_limit_follows_the_slowest_recent_step_of_anybody() -> None:
    watch = StuckWatch(StepTimeout())
    slow = MULTIPLE * 50.0
    stills = {"0.0": still("wait", 0.0, slowest_step=50.0), "0.1": still("step", slow)}
    assert look(watch, stills) is None
    found = look(watch, {**stills, "0.1": still("step", slow + 1)})
    assert found is not None
    assert found.limit == slow


@pytest.mark.parametrize("where", ["operation", "script"])
def test_what_may_take_long_has_the_longer_limit(where: str) -> None:
    watch = StuckWatch(StepTimeout())
    assert look(watch, {"0.0": still("wait", 0.0), "0.1": still(where, OTHER)}) is None
    found = look(watch, {"0.0": still("wait", 0.0), "0.1": still(where, OTHER + 1)})
    assert found is not None
    assert found.limit == OTHER


def test_the_longer_limit_follows_the_slowest_evaluation_of_the_day() -> None:
    watch = StuckWatch(StepTimeout())
    stills = {"0.0": still("wait", 0.0, slowest_other=600.0), "0.1": still("script", 5999.0)}
    assert look(watch, stills) is None


def test_if_all_stand_still_nobody_stands_out() -> None:
    """Storage that is dead for all may come back; so the longer limit holds, and then one goes at a time."""
    watch = StuckWatch(StepTimeout.parse("60:600"))
    everybody = {"0.0": still("step", 599.0), "0.1": still("step", 598.0), "0.2": still("step", 597.0)}
    assert look(watch, everybody, now=0.0) is None
    later = {name: still("step", one.seconds + 10) for name, one in everybody.items()}
    found = look(watch, later, now=10.0)
    assert found is not None
    assert found.worker == "0.0"
    assert look(watch, {name: later[name] for name in ("0.1", "0.2")}, now=11.0) is None, "the others get time again"
    found = look(watch, {name: still("step", 1300.0) for name in ("0.1", "0.2")}, now=611.0)
    assert found is not None


def test_all_may_work_on_their_own_for_long() -> None:
    """As in an evaluation that the script makes on every worker. A limit that was set holds all the same."""
    watch = StuckWatch(StepTimeout())
    everybody = {name: still("script", ALL_FACTOR * OTHER) for name in ("0.0", "0.1")}
    assert look(watch, everybody) is None
    assert look(watch, {**everybody, "0.1": still("script", ALL_FACTOR * OTHER + 1)}) is not None
    assert look(StuckWatch(StepTimeout.parse("60:600")), {name: still("script", 601.0) for name in everybody})


def test_one_worker_alone_has_the_longer_limit_in_a_step() -> None:
    watch = StuckWatch(StepTimeout.parse("60:600"))
    assert look(watch, {"0.0": still("step", 600.0)}) is None
    assert look(watch, {"0.0": still("step", 601.0)}) is not None


def test_replicas_that_train_apart_stand_out_by_their_progress() -> None:
    watch = StuckWatch(StepTimeout.parse("60:600"))
    assert look(watch, {"0.0": still("step", 0.5), "0.1": still("step", 61.0)}) is not None


def test_a_spare_that_waits_to_join_is_no_sign_that_members_get_on() -> None:
    watch = StuckWatch(StepTimeout.parse("60:600"))
    stills = {"0.0": still("step", 100.0), "0.1": still("wait", 100.0)}
    assert watch.look(stills, members=["0.0"], starting={}, now=0.0) is None


def test_a_worker_that_never_connects() -> None:
    watch = StuckWatch(StepTimeout())
    assert look(watch, {}, starting={"0.1": OTHER}) is None
    found = look(watch, {}, starting={"0.1": OTHER + 1})
    assert found is not None
    assert found.cause == "stuck: not connected 1801 s after its start (limit 1800 s)"


def test_each_one_found_doubles_the_limit_unless_the_user_has_set_it() -> None:
    for setting, limits in (("auto", [60 * 2.0 ** min(n, DOUBLINGS) for n in range(6)]), ("60", [60.0] * 6)):
        watch = StuckWatch(StepTimeout.parse(setting))
        stills = {"0.0": still("wait", 0.0), "0.1": still("step", 1e6)}
        found = [look(watch, stills, now=1e6 * number) for number in range(6)]
        assert [one.limit for one in found if one is not None] == limits


def test_if_all_wait_for_each_other_a_message_was_lost() -> None:
    watch = StuckWatch(StepTimeout.parse("60:600"))
    everybody = [still("wait", 601.0), still("wait", 601.0)]
    assert not watch.stalled([], now=0.0)
    assert not watch.stalled([*everybody, still("step", 601.0)], now=0.0)
    assert not watch.stalled([*everybody, still("wait", 600.0)], now=0.0)
    assert watch.stalled(everybody, now=0.0)
    assert not watch.stalled(everybody, now=600.0), "the next generation gets its time"
    assert watch.stalled(everybody, now=601.0)


# --- the pulse ------------------------------------------------------------------------------------------


def test_the_observer_measures_the_time_without_a_sign() -> None:
    pulse = Pulse()
    t = pulse.born + 3.0
    observer = Observer(pulse, every=1.0, now=t)
    assert observer.look(t).slowest_other == pytest.approx(3.0), "the start counts as a slow stretch"
    with pulse.at("step"):
        assert observer.look(t + 1) == Still(where="step", seconds=0.0, slowest_other=pytest.approx(3.0))
        assert observer.look(t + 2).seconds == pytest.approx(1.0)
        assert observer.look(t + 3).seconds == pytest.approx(2.0)
        pulse.sign()
        found = observer.look(t + 4)
        assert (found.seconds, found.slowest_step) == (0.0, pytest.approx(2.0))
    assert observer.look(t + 5).where == "script"


def test_a_stretch_under_way_does_not_raise_its_own_limit() -> None:
    pulse = Pulse()
    observer = Observer(pulse, every=1.0, now=pulse.born)
    with pulse.at("step"):
        for second in range(1, 500):
            found = observer.look(pulse.born + second)
    assert found.seconds > 400
    assert found.slowest_step == 0.0


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    pulse = Pulse()
    observer = Observer(pulse, every=1.0, now=pulse.born)
    observer.look(pulse.born + 1)
    assert observer.look(pulse.born + 1000).seconds == pytest.approx(1.0)


def test_waiting_is_no_slow_step() -> None:
    pulse = Pulse()
    observer = Observer(pulse, every=1.0, now=pulse.born)
    with pulse.at("wait"):
        for second in range(1, 100):
            observer.look(pulse.born + second)
    assert observer.look(pulse.born + 100).slowest_other < 1.0


def test_a_slow_step_is_forgotten_after_a_while() -> None:
    pulse = Pulse()
    observer = Observer(pulse, every=STEP_WINDOW, now=pulse.born)
    found = []
    with pulse.at("step"):
        observer.look(pulse.born)
        observer.look(pulse.born + 30)
        for turn in range(1, 5):
            pulse.sign()
            found.append(observer.look(pulse.born + 31 + turn * (STEP_WINDOW + 1)).slowest_step)
    assert found == pytest.approx([30.0, 30.0, 0.0, 0.0])


def test_other_threads_have_no_say() -> None:
    pulse = Pulse()

    def elsewhere() -> None:
        with pulse.at("wait"):
            seen.append(pulse.where)

    seen: list[str] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == ["script"]


def test_a_wait_for_a_helper_is_a_wait_for_others_if_the_helper_waits() -> None:
    pulse = Pulse()
    observer = Observer(pulse, every=1.0, now=pulse.born)
    waits, computes, done = threading.Event(), threading.Event(), threading.Event()

    def help_out() -> None:
        with pulse.at("wait"):
            waits.set()
            computes.wait()
        waits.clear()
        done.wait()

    helper = threading.Thread(target=help_out)
    helper.start()
    waits.wait()
    with pulse.at("step"), pulse.at("helper"):
        assert observer.look(pulse.born + 1).where == "wait"
        before = pulse.signs
        computes.set()
        while waits.is_set():
            pass
        assert pulse.signs > before, "while it is waited for, a helper's progress counts"
        assert observer.look(pulse.born + 2).where == "step"
    done.set()
    helper.join()


def test_what_a_helper_does_beside_the_training_thread_is_no_sign() -> None:
    pulse = Pulse()
    before = pulse.signs

    def receive() -> None:
        with pulse.at("wait"):
            pulse.sign()

    helper = threading.Thread(target=receive)
    helper.start()
    helper.join()
    assert pulse.signs == before


def test_an_error_ends_a_stay() -> None:
    pulse = Pulse()
    with pytest.raises(ZeroDivisionError), pulse.at("wait"):
        1 / 0  # noqa: B018
    assert pulse.where == "script"


def test_reports_cross_the_wire() -> None:
    report = Still(where="step", seconds=1.0, slowest_step=2.0, slowest_other=3.0)
    assert Still.from_json(report.to_json()) == report
    with pytest.raises(ValueError, match="nowhere"):
        Still.from_json(report.to_json() | {"where": "nowhere"})


# --- the stacks -----------------------------------------------------------------------------------------


async def stacks_of(code: str, folder: Path, *, stopped: bool = False) -> str:
    """Of a process that runs this code in ``hang``, and has said that it does."""
    log = folder / "log"
    with log.open("a") as file:
        listen = "from holdfast.cluster import stacks; stacks.listen(1); print('here', flush=True)"
        text = f"{listen}\ndef hang():\n    {code}\nhang()"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", text, stdout=file)
    try:
        while "here" not in log.read_text():
            await asyncio.sleep(0.01)
        if stopped:
            process.send_signal(signal.SIGSTOP)
            while not is_stopped(process.pid):
                await asyncio.sleep(0.01)
        return await stacks.ask(process.pid, log, why="it hangs")
    finally:
        process.kill()
        await process.wait()
        assert process.returncode == -signal.SIGKILL, "asking for stacks ends nobody"


@pytest.mark.parametrize("code", ["import os; os.read(os.pipe()[0], 1)", "import re; re.match('(a*)*b', 'a' * 1000)"])
def test_a_hung_process_shows_its_stacks(tmp_path: Path, code: str) -> None:
    dump = asyncio.run(stacks_of(code, tmp_path))
    place = stacks.place_of(dump)
    assert place is not None
    assert place.endswith("<string>:3 in hang")
    assert "holdfast: it hangs; the stacks" in (tmp_path / "log").read_text()


def test_a_stopped_process_cannot_and_is_not_waited_for(tmp_path: Path) -> None:
    assert asyncio.run(stacks_of("import os; os.read(os.pipe()[0], 1)", tmp_path, stopped=True)) == ""
    assert stacks.place_of("") is None


def test_the_place_is_the_innermost_of_the_users_code_in_the_main_thread() -> None:
    def frame(path: str, line: int, name: str) -> str:
        return f'  File "{path}", line {line} in {name}\n'

    user, zygote = str(Path.cwd() / "train.py"), str(Path(stacks.__file__).with_name("zygote.py"))
    begin = "Thread 0x7 (most recent call first):\n"
    inner = frame(threading.__file__, 1, "wait") + frame(fetch.__file__, 2, "fetch")
    outer = frame(zygote, 4, "run_worker") + frame("/elsewhere/nursery.py", 5, "main")
    other = begin + frame("/data/thread.py", 9, "listen") + "\n"
    assert stacks.place_of(other + begin + inner + frame(user, 3, "load") + outer) == "train.py:3 in load"
    assert stacks.place_of(other + begin + inner + outer) == f"{threading.__file__}:1 in wait", "no code of the user's"


# --- the setting ----------------------------------------------------------------------------------------


def test_the_setting() -> None:
    assert StepTimeout.parse("auto") == StepTimeout(step=60.0, other=1800.0, learns=True)
    assert StepTimeout.parse("2.5:7") == StepTimeout(step=2.5, other=7.0, learns=False)
    for text in ("off", "0"):
        assert StepTimeout.parse(text).step == math.inf
        assert look(StuckWatch(StepTimeout.parse(text)), {"0.0": still("script", 1e12)}) is None


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "60:", "60:30", "1:2:3", "0:5", "5:inf"])
def test_a_bad_setting_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--step-timeout"):
        StepTimeout.parse(text)
