"""``holdfast plan``: templates, pipelines and what comes after each loss, as tables and as a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.plan.outlook import Outlook
    from holdfast.plan.planner import PipelinePlan, Shortage
    from holdfast.plan.profile import Profile
    from holdfast.plan.template import Template, Templates

MOST_NODES = 4_000  # a typing mistake beyond that would keep the planner busy for long
GB = 1e9  # bytes


def plan(
    nodes: Annotated[int, typer.Option(min=1, max=MOST_NODES, help="Nodes there are.")],
    profile: Annotated[Path | None, typer.Option(help="What holdfast profile has written.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of a made-up model, instead of a profile.")] = None,
    uniform: Annotated[bool, typer.Option("--uniform", help="The made-up model's layers are all equal.")] = False,
    tolerate: Annotated[int, typer.Option(min=0, help="Nodes that may be lost at once without a checkpoint.")] = 1,
    devices_per_node: Annotated[int, typer.Option(min=1, max=1024, help="Workers of a node.")] = 1,
    memory: Annotated[float | None, typer.Option(help="GB of one device. Default: the profile's.")] = None,
    min_nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Of a pipeline. Default: the fewest that have the memory."),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches of a step, of all pipelines. Default: 4 per device.")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(help="The same in samples.")] = None,
    slack: Annotated[
        float, typer.Option(min=0, max=100, help="Percent by which a step may be longer after a change, to move less.")
    ] = 0.0,
    picture: Annotated[Path | None, typer.Option(help="Also draw the pipelines into this .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Plan pipelines that survive losses: who holds which layers, how fast, and what happens when nodes are lost.

    With --profile it is your model's plan, with --layers 96 --uniform that of a made-up one.
    """
    # Imported here, so that the other commands do not wait for numpy and rich.
    from holdfast.pictures.picture_file import check_path
    from holdfast.pictures.plan_tables import WIDE, headings, planned_for, show
    from holdfast.pictures.step_chart import save
    from holdfast.plan.outlook import look_ahead
    from holdfast.plan.pipeline_sizes import PER_DEVICE
    from holdfast.plan.planner import Shortage, make_plan
    from holdfast.plan.template import make_templates
    from holdfast.screen import make_console

    if picture is not None:
        check_path(picture)
    model = with_memory(the_model(profile, layers, uniform), memory)
    asked = batches(model, micro_batches, global_batch, default=PER_DEVICE * nodes * devices_per_node)
    with make_console(aside=True).status("templates for every number of nodes ..."):
        templates = make_templates(model, nodes=nodes, tolerate=tolerate, devices=devices_per_node, minimum=min_nodes)
    made = make_plan(templates, [f"n{number}" for number in range(nodes)], micro_batches=asked)
    if isinstance(made, Shortage):
        raise UsageError(made.reason, hint=made.hint)
    with make_console(aside=True).status("every kind of loss ..."):
        outlook = look_ahead(templates, made, slack=slack / 100)
    console = make_console(aside=as_json, pipe=WIDE)
    show(console, templates, made, outlook)
    if picture is not None:
        save(picture, title=planned_for(templates, made), panels=headings(made))
        console.print(f"picture: {picture}", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(to_json(templates, made, outlook)))


# --- what is asked for ----------------------------------------------------------------------------


def the_model(path: Path | None, layers: int | None, equal: bool) -> Profile:
    """Return the profile in a file, or that of a made-up model. Raises UsageError unless exactly one is asked for."""
    from holdfast.plan.profile import Profile, uniform

    if (path is None) == (layers is None):
        both = "--profile and --layers are two models" if layers is not None else "there is no model to plan"
        raise UsageError(both, hint="give either --profile FILE or --layers 96 --uniform")
    if path is None:
        assert layers is not None
        if not equal:
            raise UsageError(f"what do the {layers} layers cost?", hint="--uniform makes them equal")
        return uniform(layers)
    if equal:
        raise UsageError("--uniform is for a made-up model", hint="the profile knows what its layers cost")
    return Profile.read(path)


def with_memory(profile: Profile, memory: float | None) -> Profile:
    """Return the profile for devices with so many GB; without a number, unchanged. Raises UsageError for none."""
    if memory is None:
        return profile
    if not 0 < memory < 1e9:
        raise UsageError(f"{memory:g} GB is no memory to plan with", hint="--memory is in GB of one device")
    return replace(profile, memory=int(memory * GB))


def batches(profile: Profile, micro_batches: int | None, global_batch: int | None, *, default: int) -> int:
    """Return the micro-batches of a step, from one of the two options or the default. Raises UsageError.

    >>> from holdfast.plan.profile import uniform
    >>> batches(replace(uniform(2), micro_batch=4), None, 66, default=1)
    Traceback (most recent call last):
    holdfast.errors.UsageError: 66 samples are not whole micro-batches of 4 (the nearest that are: 64 and 68)
    """
    if micro_batches is not None and global_batch is not None:
        raise UsageError("--micro-batches and --global-batch say the same twice", hint="give one of them")
    if global_batch is None:
        number = default if micro_batches is None else micro_batches
    else:
        number, rest = divmod(global_batch, profile.micro_batch)
        if rest and global_batch > 0:
            near = [size * profile.micro_batch for size in (number, number + 1) if size]
            raise UsageError(
                f"{global_batch} samples are not whole micro-batches of {profile.micro_batch}",
                hint=f"the nearest that are: {' and '.join(map(str, near))}",
            )
    if number < 1:
        raise UsageError(f"a step of {number} micro-batches does nothing", hint="at least one per pipeline")
    return number


# --- for machines ---------------------------------------------------------------------------------


def to_json(templates: Templates, made: PipelinePlan, outlook: Outlook) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    from holdfast.plan.outlook import names

    samples = templates.profile.micro_batch
    return {
        "model": templates.profile.model,
        "layers": len(templates.profile.layers),
        "nodes": len(names(made)),
        "devices_per_node": templates.devices,
        "tolerate": templates.tolerate,
        "minimum_nodes": templates.minimum * (templates.tolerate + 1),
        "minimum_nodes_of_a_pipeline": templates.minimum,
        "micro_batch": samples,
        "micro_batches": made.micro_batches,
        "templates": [_template(one) for _, one in sorted(templates.by_nodes.items())],
        "pipelines": [
            {
                "nodes": list(pipeline.nodes),
                "template": pipeline.template.nodes,
                "micro_batches": pipeline.micro_batches,
                "seconds": pipeline.seconds,
            }
            for pipeline in made.pipelines
        ],
        "spares": list(made.spares),
        "step_seconds": made.seconds,
        "samples_per_s": made.micro_batches * samples / made.seconds,
        "losses": [
            {
                "lost": losses.count,
                "hit": [{"pipeline_of": hit.nodes, "positions": list(hit.positions)} for hit in case.hits],
                "ways": case.alike,
                "worst": case is losses.worst,
                **_after(case.after, samples),
            }
            for losses in outlook.losses
            for case in losses.cases
        ],
        "every_loss_listed": all(losses.complete for losses in outlook.losses),
        "fewer": [{"nodes": one.nodes, **_after(one.after, samples)} for one in outlook.fewer],
        "join": _after(outlook.join, samples),
        "reason": made.reason,
    }


def _template(one: Template) -> dict[str, Any]:
    from holdfast.plan.pipeline_sizes import PER_DEVICE

    stages = [
        {"layers": [stage.first, stage.stop], "node": stage.node, "bytes": stage.bytes, **vars(stage.times)}
        for stage in one.stages
    ]
    seconds = one.seconds(PER_DEVICE * one.nodes * one.devices)
    return {"nodes": one.nodes, "lanes": one.lanes, "stages": stages, "seconds": seconds, "gap": one.gap}


def _after(after: PipelinePlan | Shortage, samples: int) -> dict[str, Any]:
    from holdfast.plan.planner import Shortage

    if isinstance(after, Shortage):
        return {"stops": True, "needed": after.needed, "reason": after.reason, "hint": after.hint}
    return {
        "stops": False,
        "pipelines": [len(pipeline.nodes) for pipeline in after.pipelines],
        "step_seconds": after.seconds,
        "samples_per_s": after.micro_batches * samples / after.seconds,
        "spares": list(after.spares),
        "moved_bytes": after.moved_bytes,
        "lost_layers": list(after.lost),
    }
