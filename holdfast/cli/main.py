"""The ``holdfast`` command: one small module per subcommand."""

from __future__ import annotations

import sys

import typer

from holdfast.cli import ckpt, demo, plan, profile, run, simulate, study
from holdfast.errors import HoldfastError

app = typer.Typer(
    help="Keeps PyTorch training going while the machines under it come and go.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)
app.command("demo")(demo.demo)
app.command("profile", context_settings={"allow_interspersed_args": False})(profile.profile)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("study")(study.study)
app.add_typer(ckpt.app, name="ckpt")


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
