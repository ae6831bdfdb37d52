"""``run.last``: the last committed step, whoever has made it; and runs that have nothing left to train."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import holdfast
from tests.harness import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
# Each worker shows the last step it knows of, before, in and after the loop.
SCRIPT = """
import json, os, sys, time, torch, holdfast
from torch.utils.data import TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
checkpoint = sys.argv[2] if len(sys.argv) > 2 else None
run = holdfast.Run(layers=torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss, data=data, checkpoint=checkpoint,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), global_batch=4, micro_batch=2)
assert run.last is None
for step in run.steps(int(sys.argv[1])):
    assert run.last == step
    while step.number == 4 and run.workers < int(os.environ["WANTED"]) and not any(run._cohort.membership.wishes()):
        time.sleep(0.01)
for step in run.steps(int(sys.argv[1])): raise AssertionError("nothing is left to do")
row = {name: getattr(run.last, name) for name in ("number", "loss", "epoch", "workers", "lr", "grad_norm", "tokens")}
with open(os.environ["RESULTS"], "a") as results: results.write(json.dumps(row) + "\\n")
"""


def make(**settings: Any) -> holdfast.Run:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    fixed = {"layers": torch.nn.Linear(2, 1), "loss": torch.nn.functional.mse_loss, "data": data}
    sizes = {"global_batch": 4, "micro_batch": 2}
    return holdfast.Run(**fixed, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **sizes, **settings)


def test_the_last_step_of_a_run_that_has_nothing_left_to_train(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make(checkpoint=tmp_path)
    assert run.last is None, "there is none before the first"
    *_, step = run.steps(3)
    assert run.last == step
    run.finish()
    again = make(checkpoint=tmp_path)
    with caplog.at_level(logging.WARNING, "holdfast"):  # what one process shows, too: a script may need the hint
        assert list(again.steps(3)) == []
    assert again.last == replace(step, seconds=0.0), "how long it took is not known here"
    assert again.last.lr == 0.1
    assert "all 3 steps were trained before" in caplog.text
    assert "run.last is the last step" in caplog.text
    caplog.clear()
    *_, more = again.steps(5)
    assert again.last == more
    assert more.number == 4
    assert "trained before" not in caplog.text


@pytest.mark.parametrize("sync", [holdfast.LocalSGD(every=2), holdfast.SSP(staleness=2)])
def test_replicas_that_train_apart_have_a_last_step_too(sync: Any) -> None:
    run = make(sync=sync)
    *_, step = run.steps(3)
    assert run.last == step
    assert run.last.lr == 0.1


def test_joiners_and_reruns_know_the_last_step(tmp_path: Path) -> None:
    """One worker joins after the last step, and another run finds that everything is done."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = ["6", str(tmp_path / "checkpoint")]
    environment = {"WANTED": "2"}
    (tmp_path / "first").mkdir()
    first = launch(
        tmp_path / "first", script=script, arguments=arguments, workers=2, environment=environment,
        faults="kill worker=0.1 step=3 phase=vote",
    )  # fmt: skip
    assert first.code == 0, first.said
    assert "0.2" not in {event["worker"] for event in first.of("commit")}, "it has joined when nothing was left"
    rows = first.results
    assert len(rows) == 2
    assert rows[0] == rows[1]
    assert (rows[0]["number"], rows[0]["epoch"], rows[0]["loss"]) == (5, 2, first.losses[-1])
    (tmp_path / "again").mkdir()
    again = launch(tmp_path / "again", script=script, arguments=arguments, workers=3, environment=environment)
    assert again.code == 0, again.said
    assert again.results == [{**rows[0], "workers": 3}] * 3
    assert sum("all 6 steps were trained before" in line for line in again.said) == 2, "one worker says it, per loop"
    assert not again.of("commit")


def inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module without those of the functions in it, whose variables are others."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from inside(node)


def loops_over_steps(scope: ast.AST) -> Iterator[ast.For]:
    for node in inside(scope):
        called = node.iter.func if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) else None
        if isinstance(node, ast.For) and isinstance(called, ast.Attribute) and called.attr == "steps":
            yield node


def used_after_its_loop(code: str) -> list[int]:
    """Lines where the variable of a loop over steps is read outside of that loop, where it may not exist.

    >>> used_after_its_loop("for step in run.steps(3): print(step)\\nprint(step.loss)")
    [2]
    >>> used_after_its_loop("def f():\\n    for step in run.steps(3): print(step)\\ndef g(step):\\n    print(step)")
    []
    """
    found = []
    scopes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.Module)]
    for scope in scopes:
        for loop in loops_over_steps(scope):
            name = loop.target.id if isinstance(loop.target, ast.Name) else ""
            reads = [n for n in inside(scope) if isinstance(n, ast.Name) and n.id == name and n.lineno > loop.lineno]
            found += [node.lineno for node in reads if node.lineno > (loop.end_lineno or 0)]
    return found


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_do_not_need_a_step_that_a_rerun_does_not_make(path: Path) -> None:
    assert used_after_its_loop(path.read_text()) == []


def test_a_step_used_after_its_loop_is_found() -> None:
    in_function = "def f():\n    for step in run.steps(3):\n        print(step)\n    return step.loss"
    assert used_after_its_loop("for step in run.steps(3): print(step)\nprint(step.loss)") == [2]
    assert used_after_its_loop(in_function) == [4]
    assert used_after_its_loop(in_function.replace("return", "def g(step): return")) == []


def test_a_rerun_of_an_example(tmp_path: Path) -> None:
    arguments = ["--steps", "2", "--checkpoint", str(tmp_path / "checkpoint")]
    for _ in range(2):
        result = launch(tmp_path, script=EXAMPLES / "distillation.py", arguments=arguments, workers=1)
        assert result.code == 0, result.said
    assert result.of("resumed")
