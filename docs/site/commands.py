"""The reference of commands, made from what the ``holdfast`` command knows of itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from holdfast.cli.main import app


def commands(of: typer.Typer = app, program: str = "holdfast") -> dict[str, Any]:
    """Return each command by its words, such as ``holdfast ckpt ls``; groups of commands are not in it."""
    return dict(_inside(program, typer.main.get_command(of)))


def place_of(words: str) -> str:
    """Return where the page of a command is in the site.

    >>> place_of("holdfast ckpt ls")
    'reference/commands/ckpt-ls.md'
    """
    return f"reference/commands/{words.removeprefix('holdfast ').replace(' ', '-')}.md"


def page_of(words: str, command: Any) -> str:
    """Return the page of a command: usage, what it does, arguments and options."""
    usage = " ".join([words, *_usage(command)])
    lines = [f"# `{words}`", "", f"```text\n{usage}\n```", "", _text(inspect.cleandoc(command.help or "")), ""]
    for heading, kind in (("Arguments", "argument"), ("Options", "option")):
        rows = [_row(each) for each in command.params if each.param_type_name == kind and not each.hidden]
        if rows:
            lines += [f"## {heading}", "", "| name | what it says | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def overview() -> str:
    """Return the page that lists all commands with their first sentences."""
    lines = ["# Commands", "", "Made from what `holdfast --help` says.", "", "| command | what it does |", "|---|---|"]
    for words, command in commands().items():
        first = _text((command.help or "").partition("\n\n")[0])
        lines.append(f"| [`{words}`]({place_of(words).removeprefix('reference/commands/')}) | {_cell(first)} |")
    return "\n".join([*lines, ""])


def _inside(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from _inside(f"{words} {name}", inner)


def _usage(command: Any) -> list[str]:
    return ["[OPTIONS]", *[_named(each) for each in command.params if _is_argument(each)]]


def _named(argument: Any) -> str:
    """The name of an argument, in brackets if it may be left out."""
    name = argument.metavar or argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _row(parameter: Any) -> str:
    names = [parameter.metavar or parameter.name.upper()] if _is_argument(parameter) else [*parameter.opts]
    names += [*parameter.secondary_opts]
    default = parameter.default
    says = parameter.help or ""
    if variable := getattr(parameter, "envvar", None):
        says += f" (or the variable {variable})"
    shown = "needed" if parameter.required else "" if default is False or default in (None, "", ()) else f"`{default}`"
    return f"| {', '.join(f'`{name}`' for name in names)} | {_cell(_text(says))} | {shown} |"


def _text(says: str) -> str:
    return says.replace("``", "`").replace("<", "&lt;").replace("*", "\\*")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
