"""The ``holdfast`` command: one small module per subcommand."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast import __version__
from holdfast.cli import ckpt, data, demo, plan, profile, run, simulate, study, top, torchrun, watch
from holdfast.errors import HoldfastError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(
    "run",
    cls=torchrun.RunCommand,
    context_settings={"allow_interspersed_args": False, "token_normalize_func": torchrun.with_hyphens},
)(run.run)
app.command("demo")(demo.demo)
app.command("top")(top.top)
app.command("watch")(watch.watch)
app.command("profile", context_settings={"allow_interspersed_args": False})(profile.profile)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("study")(study.study)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(data.app, name="data")


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version.")
    ] = False,
) -> None:
    """Keeps PyTorch training going while the machines under it come and go."""


def main() -> None:
    """Errors end in one sentence and an exit code: 2 usage, 3 too few workers, 4 a bad checkpoint, 1 anything else."""
    try:
        app()
    except HoldfastError as e:
        from holdfast.screen import visible

        print(f"holdfast: {visible(str(e))}", file=sys.stderr)
        sys.exit(e.exit_code)


if __name__ == "__main__":
    main()
