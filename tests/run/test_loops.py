"""The loops over steps of a script: which are over, and how many steps are committed where the script is."""

from __future__ import annotations

from holdfast.engine.progress import Progress
from holdfast.engine.script_state import ScriptState
from holdfast.run.loops import Loops
from holdfast.run.script import Script


def test_a_joiner_has_the_steps_of_the_loops_that_it_has_passed() -> None:
    progress = Progress(step=9, left={"0 to 100": 4})
    loops = Loops(Script(), progress, ScriptState())
    first = loops.come_to(100)
    assert loops.step == 9, "in a loop it is where all are"
    loops.end(first)
    assert loops.step == 4
    second = loops.come_to(loops.step + 3)
    loops.end(second)
    assert loops.step == 7
    loops.come_to(12)
    assert loops.step == 9
