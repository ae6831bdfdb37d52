"""Tables and pictures of a plan on a terminal, within its width, and short for any number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console

from holdfast.pictures.plan_words import gap_text, hits_text, names_text, pipelines_text, runs
from holdfast.pictures.step_chart import PANELS, chart, idle_shares, some
from holdfast.pictures.step_text import STAGES, drawing, legend
from holdfast.plan.outlook import LossCase, LossesAtOnce, Outlook
from holdfast.plan.planner import Pipeline, PipelinePlan, Shortage
from holdfast.plan.template import PER_DEVICE, Template, Templates
from holdfast.screen import Screen
from holdfast.words import count, ranges_text, seconds_text, size_text

ROWS = 8  # of a table at most: all tables of a plan fit on two screens
WIDE = 120  # columns of the output when it goes into a pipe


def show(console: Console, templates: Templates, plan: PipelinePlan, outlook: Outlook) -> None:
    """Print everything about a plan: templates, pipelines, their steps, and the plans after losses and joins."""
    screen = Screen(console)
    screen.say(planned_for(templates, plan), style="bold")
    _templates(screen, templates, plan)
    _pipelines(screen, templates, plan)
    _drawings(screen, plan)
    for losses in outlook.losses:
        _losses(screen, losses)
    _fewer(screen, outlook)
    sizes, step, moved = _outcome(outlook.join)
    screen.say()
    screen.say(f"one node joins: {sizes}" + (f", step {step}, {moved} moved" if step else ""))


def planned_for(templates: Templates, plan: PipelinePlan) -> str:
    """Return the title: model, nodes, and the losses that are tolerated."""
    nodes = sum(len(pipeline.nodes) for pipeline in plan.pipelines) + len(plan.spares)
    each = f" with {count(templates.devices, 'device')} each" if templates.devices > 1 else ""
    may = {0: "no loss is tolerated", 1: "any one may be lost"}.get(
        templates.tolerate, f"any {templates.tolerate} may be lost at once"
    )
    if templates.tolerate and nodes - templates.tolerate < templates.needed:
        may += f" without losing a layer, but then training waits until there are {templates.needed} again"
    return f"{templates.profile.model} on {count(nodes, 'node')}{each}, {may}"


def headings(plan: PipelinePlan) -> list[tuple[str, Pipeline]]:
    """Return a heading for each kind of pipeline, and one pipeline of that kind."""
    return [(_heading(group), group[0]) for group in alike(plan)]


def alike(plan: PipelinePlan) -> list[list[Pipeline]]:
    """Return the pipelines grouped by their numbers of nodes and micro-batches."""
    groups: dict[tuple[int, int], list[Pipeline]] = {}
    for pipeline in plan.pipelines:
        groups.setdefault((len(pipeline.nodes), pipeline.micro_batches), []).append(pipeline)
    return list(groups.values())


def _heading(group: Sequence[Pipeline]) -> str:
    one, idle = group[0], idle_shares(group[0])
    lanes = f", one of {one.template.lanes} lanes" if one.template.lanes > 1 else ""
    each = " each" if len(group) > 1 else ""
    return (
        f"{count(len(group), 'pipeline')} of {count(len(one.nodes), 'node')}{lanes}, "
        f"{count(one.micro_batches, 'micro-batch')}{each}: {seconds_text(one.seconds)}, "
        f"{sum(idle) / len(idle):.0%} idle"
    )


# --- the plan -------------------------------------------------------------------------------------


def _templates(screen: Screen, templates: Templates, plan: PipelinePlan) -> None:
    used = {len(pipeline.nodes) for pipeline in plan.pipelines}
    sizes = sorted(templates.by_nodes)
    shown = sorted(used | {sizes[at] for at in some(len(sizes), ROWS)})
    columns = [">nodes", "", ">lanes", ">stages", "layers of each~", ">memory", ">step", "optimal"]
    rows = [_template(templates.by_nodes[size], used=size in used) for size in shown]
    _table(screen, columns, rows, title=f"templates: {templates.reason}")
    note = f"memory: the fullest device; step: with {PER_DEVICE} micro-batches per device"
    screen.say(note + _more(len(sizes) - len(shown), "template"), style="dim")


def _template(one: Template, *, used: bool) -> list[str]:
    return [
        str(one.nodes),
        "used" if used else "",
        str(one.lanes),
        str(len(one.stages)),
        runs([len(stage.layers) for stage in one.stages]),
        size_text(max(stage.bytes for stage in one.stages)),
        seconds_text(one.seconds(PER_DEVICE * one.nodes * one.devices)),
        gap_text(one.gap),
    ]


def _pipelines(screen: Screen, templates: Templates, plan: PipelinePlan) -> None:
    groups = alike(plan)
    rows = []
    for group in groups[:ROWS]:
        one, idle = group[0], idle_shares(group[0])
        work = [str(one.micro_batches), seconds_text(one.seconds), f"{sum(idle) / len(idle):.0%}"]
        rows.append([str(len(group)), str(len(one.nodes)), *work, names_text([one.nodes for one in group])])
    columns = [">pipelines", ">of nodes", ">micro-batches", ">step", ">idle", "which~"]
    _table(screen, columns, rows, title=f"pipelines: {len(plan.pipelines)}")
    _note(screen, _more(len(groups) - ROWS, "kind"))
    speed = plan.micro_batches * templates.profile.micro_batch / plan.seconds
    step = f"{count(plan.micro_batches, 'micro-batch')} in {seconds_text(plan.seconds)}: {speed:,.4g} samples/s"
    screen.say(f"a step: {step}", style="bold green")
    screen.say(plan.reason, style="dim")


def _drawings(screen: Screen, plan: PipelinePlan) -> None:
    panels = headings(plan)
    for heading, pipeline in panels[:PANELS]:
        one = chart(pipeline)
        screen.say()
        screen.say(heading, style="bold")
        for line in drawing(one, screen.console.width):
            screen.console.print(line, no_wrap=True, overflow="crop")
        hidden = len(one.bars) - STAGES
        _note(screen, _more(hidden, "stage"))
    screen.console.print(legend())
    _note(screen, _more(len(panels) - PANELS, "kind"))


# --- what comes after -----------------------------------------------------------------------------


def _losses(screen: Screen, losses: LossesAtOnce) -> None:
    groups = same_outcome(losses.cases)
    rows = [
        [hits_text([case.hits for case in group]), f"{sum(case.alike for case in group):,}", *_outcome(group[0].after)]
        for group in groups[:ROWS]
    ]
    title = f"{count(losses.count, 'node')} lost{' at once' if losses.count > 1 else ''}, the worst first"
    _table(screen, ["lost~", ">ways", "pipelines then~", ">step", ">moved"], rows, title=title)
    unseen = "" if losses.complete else f"; {len(losses.cases)} kinds of loss were looked at, there are more"
    _note(screen, _more(len(groups) - ROWS, "outcome") + unseen)


def same_outcome(cases: Sequence[LossCase]) -> list[list[LossCase]]:
    """Return neighbouring cases with the same outcome as groups; the worst stays first."""

    def outcome(case: LossCase) -> tuple[object, ...]:
        return case.badness, *_outcome(case.after)

    return [list(same) for _, same in groupby(cases, key=outcome)]


def _fewer(screen: Screen, outlook: Outlook) -> None:
    if outlook.fewer:
        rows = [[str(one.nodes), *_outcome(one.after)] for one in outlook.fewer]
        seen = "" if all(one.complete for one in outlook.fewer) else " of a few"
        title = f"with fewer nodes: after the worst single loss{seen} from a plan for one node more"
        _table(screen, [">nodes left", "pipelines then~", ">step", ">moved"], rows, title=title)


def _outcome(after: PipelinePlan | Shortage) -> list[str]:
    if isinstance(after, Shortage):
        return [f"training stops: {after.reason}", "", ""]
    lost = f"; layers {ranges_text(after.lost)} are lost" if after.lost else ""
    idle = f"; {count(len(after.spares), 'node')} idle" if after.spares else ""
    sizes = pipelines_text([len(pipeline.nodes) for pipeline in after.pipelines])
    return [sizes + idle + lost, seconds_text(after.seconds), size_text(after.moved_bytes)]


# --- on the terminal ------------------------------------------------------------------------------


def _table(screen: Screen, columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str) -> None:
    screen.say()
    screen.table(columns, rows, title=title)


def _more(number: int, noun: str) -> str:
    return f"; {count(number, f'more {noun}')}" if number > 0 else ""


def _note(screen: Screen, text: str) -> None:
    if text:
        screen.say(text.removeprefix("; "), style="dim")
