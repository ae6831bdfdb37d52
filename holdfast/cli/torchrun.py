"""torchrun's flags and variables, so that ``holdfast run`` takes what a script, or Kubeflow, gives to torchrun.

A flag of torchrun is one of three: an option of ``holdfast run`` with the same meaning; one that asks for what is done
anyway; or one that is refused by its name. ``PET_`` variables stand for flags, and underscores for hyphens, as there.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from holdfast.cluster.signals import NOTICES
from holdfast.errors import UsageError

# Flags of torchrun that are options of `holdfast run`.
SHARED = (
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--standalone",
    "--max-restarts",
    "--role",
    "--module",
    "--log-dir",
    "--redirects",
    "--local-ranks-filter",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--shutdown-timeout",
)
MASTER_PORT = 29500  # torchrun's, if --master-port is not given
PATIENCES = ("join_timeout", "timeout")  # keys of --rdzv-conf: seconds to wait for missing machines


def _nothing(text: str) -> bool:
    return False


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d*\.?\d+", text) is not None


def _are_notices(text: str) -> bool:
    return {name.strip() for name in text.split(",")} <= {number.name for number in NOTICES}


def _is_stream_choice(text: str) -> bool:
    return re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text) is not None


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A flag of torchrun that is no option of ``holdfast run``.

    >>> Foreign(name="--start-method", accepts=lambda text: text == "fork", hint="fork is what is done").check("fork")
    """

    name: str
    hint: str  # what to do instead of a value that is not accepted
    short: str = ""
    takes_value: bool = True
    accepts: Callable[[str], bool] = _nothing  # values that ask for what is done anyway

    def check(self, text: str) -> None:
        """Raise ``UsageError`` for a value that is not accepted."""
        if not self.accepts(text):
            what = f"{self.name} {text}" if self.takes_value else self.name
            raise UsageError(f"{what} is not possible with holdfast run", hint=self.hint)

    def parameter(self) -> inspect.Parameter:
        """Return it as a parameter of a typer command: a hidden option, which is checked and then forgotten."""

        def check(value: Any) -> None:
            if value is not None and value is not False:
                self.check(str(value))

        names = [self.name, *([self.short] if self.short else [])]
        option = typer.Option(*names, hidden=True, expose_value=False, callback=check)
        kind = Annotated[str | None, option] if self.takes_value else Annotated[bool, option]
        name, default = self.name[2:].replace("-", "_"), None if self.takes_value else False
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


FOREIGN = (
    Foreign(name="--monitor-interval", accepts=_is_number, hint="a number; a worker's end is noticed at once"),
    Foreign(
        name="--start-method",
        accepts=lambda text: text in ("fork", "forkserver"),
        hint="leave it out: workers are forks of a process that has imported torch",
    ),
    Foreign(name="--run-path", takes_value=False, accepts=lambda text: True, hint=""),
    Foreign(name="--tee", short="-t", accepts=_is_stream_choice, hint="3, or as in 0:1,1:2; output is always in both"),
    Foreign(name="--node-rank", accepts=str.isdigit, hint="a number; 0 is the machine of the --rdzv-endpoint"),
    Foreign(
        name="--event-log-handler",
        accepts=lambda text: text == "null",
        hint="leave it out: all events are in events.jsonl, in the --log-dir",
    ),
    Foreign(
        name="--signals-to-handle",
        accepts=_are_notices,
        hint=f"of {', '.join(number.name for number in NOTICES)}, which are always handled; SIGQUIT shows stacks",
    ),
    Foreign(
        name="--no-python",
        takes_value=False,
        hint="workers are Python: start another program by subprocess, from a script",
    ),
    Foreign(name="--duplicate-stdout-filters", hint="grep the workers' logs, in the --log-dir"),
    Foreign(name="--duplicate-stderr-filters", hint="grep the workers' logs, in the --log-dir"),
    Foreign(name="--logs-specs", hint="leave it out: --log-dir, --redirects and --local-ranks-filter say what is kept"),
    Foreign(name="--log-line-prefix-template", hint="leave it out: a line begins with its worker's name, as in [0.1]"),
    Foreign(name="--numa-binding", hint="os.sched_setaffinity in the script, with LOCAL_RANK"),
    Foreign(name="--virtual-local-rank", takes_value=False, hint="a worker's device is the one of its LOCAL_RANK"),
    Foreign(name="--print-completion", hint="holdfast run --help lists the options"),
)


@dataclass(frozen=True, kw_only=True)
class AgentVariable:
    """A variable that torchrun's agent reads for itself, and that is no option of ``holdfast run``."""

    name: str
    hint: str
    accepts: Callable[[str], bool] = _nothing  # values that ask for what is done anyway

    def check(self, text: str) -> None:
        """Raise ``UsageError`` for a value that is not accepted."""
        if text and not self.accepts(text):
            raise UsageError(f"{self.name}={text} is not possible with holdfast run", hint=f"unset it: {self.hint}")


def _is_off(text: str) -> bool:
    return text == "0"


VARIABLES = (
    AgentVariable(
        name="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", hint="a line begins with its worker's name, as in [0.1]"
    ),
    AgentVariable(
        name="TORCHELASTIC_ENABLE_FILE_TIMER",
        accepts=_is_off,
        hint="hung workers are found by --step-timeout; torch's timers in the script have nobody to ask",
    ),
    AgentVariable(
        name="TORCH_ELASTIC_WORKER_IDENTICAL", accepts=lambda text: True, hint="ranks are always numbered like that"
    ),
    AgentVariable(
        name="TORCH_DISABLE_SHARE_RDZV_TCP_STORE", accepts=lambda text: True, hint="rank 0 always has the store"
    ),
    AgentVariable(
        name="TORCHELASTIC_HEALTH_CHECK_PORT",
        accepts=lambda text: True,  # torch itself serves nothing there: it logs "No health check server started"
        hint="--health answers probes",
    ),
    AgentVariable(
        name="TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
        accepts=_is_number,
        hint="a worker that does not end when it is killed is replaced after 10 s",
    ),
)


class RunCommand(TyperCommand):
    """``holdfast run`` as a command that also knows torchrun's other flags, and its ``PET_`` variables."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.params += foreign_options()
        known = {*SHARED, *(foreign.name for foreign in FOREIGN)}
        for parameter in self.params:
            for name in known.intersection(parameter.opts):
                given = parameter.envvar or []
                parameter.envvar = [*([given] if isinstance(given, str) else given), variable(name)]


def foreign_options() -> list[Any]:
    """Return the options of a command that takes torchrun's other flags. Typer makes them, as it makes all others."""

    def flags(**others: Any) -> None:
        pass

    parameters = [foreign.parameter() for foreign in FOREIGN]
    flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(flags)
    return [option for option in typer.main.get_command(app).params if option.name != "help"]


def variable(flag: str) -> str:
    """Return the variable that torchrun reads for a flag.

    >>> variable("--rdzv-endpoint")
    'PET_RDZV_ENDPOINT'
    """
    return "PET_" + flag.removeprefix("--").replace("-", "_").upper()


def with_hyphens(name: str) -> str:
    """Return an option's name with hyphens: torchrun takes both.

    >>> with_hyphens("nproc_per_node")
    'nproc-per-node'
    """
    return name.replace("_", "-")


def parse_workers(text: str) -> int:
    """Return the number of workers: of a number, or of the devices or cores that this machine has.

    >>> parse_workers("4")
    4
    """
    if text.isdigit() and int(text):
        return int(text)
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text not in ("auto", "gpu", "xpu"):
        raise UsageError(f"-n {text} is not a number of workers", hint="1 or more; or auto, cpu, gpu, xpu")
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if text == "auto" and kind is None:
        return len(os.sched_getaffinity(0))
    if kind is None or (text, kind.type) not in (("auto", kind.type), ("gpu", "cuda"), ("xpu", "xpu")):
        raise UsageError(f"-n {text}: torch sees no {text} on this machine", hint="auto, cpu, or a number")
    return torch.accelerator.device_count()


def parse_patience(conf: str, patience: float) -> float:
    """Return the seconds to wait for missing machines, as ``--rdzv-conf`` has them.

    >>> parse_patience("join_timeout=600", 30.0), parse_patience("", 30.0)
    (600.0, 30.0)
    """
    for part in filter(None, conf.split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in PATIENCES:
            hint = f"{' or '.join(PATIENCES)}, which is --patience; see --heartbeat-timeout, too"
            raise UsageError(f"--rdzv-conf {name} is not known", hint=hint)
        if not _is_number(value):
            raise UsageError(f"--rdzv-conf {name}={value} is not a number of seconds", hint="as in join_timeout=600")
        patience = float(value)
    return patience


def parse_hidden(redirects: str, only: str, slots: int) -> frozenset[int]:
    """Return the workers, by local rank, whose output is in their logs alone.

    ``redirects`` and ``only``: as in ``--redirects`` and ``--local-ranks-filter``. ``slots``: workers of this machine.

    >>> sorted(parse_hidden("0:3", "", 2)), sorted(parse_hidden("0", "0,1", 4))
    ([0], [2, 3])
    """
    if not _is_stream_choice(redirects):
        raise UsageError(f"--redirects {redirects} is not understood", hint="0, 3, or as in 0:3,1:0")
    chosen = {
        int(slot): stream for slot, _, stream in (part.rpartition(":") for part in redirects.split(",")) if slot
    } or dict.fromkeys(range(slots), redirects)
    if {"1", "2"} & set(chosen.values()):
        hint = "3 (only into the log) or 0: a worker's log has both streams"
        raise UsageError(f"--redirects {redirects} divides a worker's streams", hint=hint)
    if only and not re.fullmatch(r"\d+(,\d+)*", only):
        raise UsageError(f"--local-ranks-filter {only} is not a list of numbers", hint="as in 0,1")
    shown = {int(slot) for slot in only.split(",")} if only else range(slots)
    return frozenset(slot for slot in range(slots) if chosen.get(slot) == "3" or slot not in shown)


def master_endpoint(address: str, port: int) -> str:
    """Return the endpoint that ``--master-addr`` and ``--master-port`` stand for; "" if they are not given.

    >>> master_endpoint("train-0.train", 0)
    'train-0.train:29500'
    """
    return f"{address}:{port or MASTER_PORT}" if address else ""


def check_variables(environment: Mapping[str, str]) -> None:
    """Refuse what torchrun's own variables ask for and is not done here.

    >>> check_variables({"TORCH_ELASTIC_WORKER_IDENTICAL": "1"})
    """
    for known in VARIABLES:
        known.check(environment.get(known.name, ""))
    check_python(environment)


def check_python(environment: Mapping[str, str]) -> None:
    """Refuse another Python for the workers: torchrun starts that of ``PYTHON_EXEC``, and ours are forks."""
    wanted = environment.get("PYTHON_EXEC", "")
    found = shutil.which(wanted) if wanted else None
    if wanted and (found is None or not os.path.samefile(found, sys.executable)):
        hint = f"unset it, or start this with {wanted} -m holdfast.cli"
        raise UsageError(f"PYTHON_EXEC is {wanted}, but workers are forks of {sys.executable}", hint=hint)
