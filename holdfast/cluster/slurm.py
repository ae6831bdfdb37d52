"""What SLURM tells the agents of a job step: who they are, where they stand, and how long a notice is.

``srun holdfast run train.py`` starts one agent for each task. SLURM's variables say which step that is and on which
node the agent runs; ``scontrol`` knows the rest. Nothing here is needed where a user gives the flags.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

Ask = Callable[[Sequence[str]], str]  # runs a command of SLURM, and returns what it prints; "" if it fails
FIRST_SPECIAL_STEP = 0xFFFF0000  # numbers of SLURM's own steps, such as an interactive shell, are higher


@dataclass(frozen=True, kw_only=True)
class JobStep:
    """The step of a SLURM job that an agent is a task of.

    >>> JobStep.of({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4",
    ...             "SLURMD_NODENAME": "n3"})
    JobStep(job='7', step='0', starts=0, task=2, tasks=4, node='n3')
    >>> JobStep.of({"SLURM_JOB_ID": "7"}) is None  # a batch script, or a shell of salloc: nobody else was started
    True
    """

    job: str  # the number of the job; of an array's task as in 7_3, as squeue and scontrol call it
    step: str  # the number of the step in the job
    starts: int  # how often the job was requeued
    task: int  # this agent, from 0
    tasks: int  # agents of the step
    node: str  # on which this agent runs

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> JobStep | None:
        """Return the step that these variables describe; None outside of one."""
        get = environment.get
        number = get("SLURM_STEP_ID", "")
        if not (get("SLURM_JOB_ID") and number.isdigit() and get("SLURM_PROCID")) or int(number) > FIRST_SPECIAL_STEP:
            return None
        return cls(
            job=_job_of(environment),
            step=number,
            starts=int(get("SLURM_RESTART_COUNT") or 0),
            task=int(get("SLURM_PROCID", "0")),
            tasks=int(get("SLURM_STEP_NUM_TASKS") or 1),
            node=get("SLURMD_NODENAME", "") or socket.gethostname(),
        )

    @property
    def name(self) -> str:
        """The name of this start of the step, as in ``7.0.1``. A requeued job counts its steps from 0 again."""
        return f"{self.job}.{self.step}.{self.starts}"

    @property
    def host(self) -> str:
        """The node's name as a host of ``--hosts``, which begins with a letter."""
        return self.node if self.node[:1].isalpha() else f"node-{self.node}"


def _job_of(environment: Mapping[str, str]) -> str:
    """Return the job as SLURM's commands call it. A number alone may mean all tasks of an array.

    >>> _job_of({"SLURM_JOB_ID": "9"})
    '9'
    >>> _job_of({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"})
    '7_2'
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


def ask(command: Sequence[str]) -> str:
    """Return what a command of SLURM prints, and "" if there is none, it fails, or it takes more than 10 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def is_running(name: str, asker: str, ask: Ask = ask) -> bool:
    """Whether the step of that name (``JobStep.name``) has not ended, as another step, ``asker``, wants to know.

    SLURM lists at least the asker's step. If it does not, nothing is known: then the other one counts as running, so
    that two jobs never begin one run twice.

    >>> slurm = lambda command: "7.batch\\n7.0\\n8.0\\n" if "squeue" in command else "JobId=7 Restarts=1 x"
    >>> is_running("7.0.1", "8.0.0", slurm), is_running("7.0.0", "8.0.0", slurm)
    (True, False)
    """
    (job, step, starts), (own_job, own_step, own_starts) = name.rsplit(".", 2), asker.rsplit(".", 2)
    if job == own_job and starts != own_starts:
        return False  # this job was started again since
    listed = ask(["squeue", "--noheader", "--steps", "--format=%i"]).split()
    if f"{own_job}.{own_step}" not in listed:
        return shutil.which("squeue") is not None  # in a container there may be none: then it is a new run
    if f"{job}.{step}" not in listed:
        return False
    return _fields(ask(["scontrol", "--oneliner", "show", "job", job])).get("Restarts", starts) == starts


def address_of(node: str, ask: Ask = ask) -> str:
    """Return where others reach this node: its name, the address that SLURM uses, or that of the way to its controller.

    Debian lets the name of a machine stand for 127.0.1.1 on that machine, where nobody else reaches it.

    >>> address_of("no-such-node.invalid", lambda command: "NodeName=n1 NodeAddr=127.0.0.1 Port=17001")
    '127.0.0.1'
    """
    if _is_outward(node):
        return node
    address = _fields(ask(["scontrol", "--oneliner", "show", "node", node])).get("NodeAddr", node)
    if _is_outward(address):
        return address
    config = ask(["scontrol", "show", "config"])
    controller = re.search(r"^SlurmctldHost\[0\]\s*=\s*([^(\s]+)(?:\((.+)\))?", config, re.MULTILINE)
    return _toward(controller[2] or controller[1]) or address if controller else address


def _is_outward(name: str) -> bool:
    """Whether a name, or an address, is known here and leads to the network."""
    try:
        found = socket.getaddrinfo(name, None)
    except OSError:
        return False
    return not ipaddress.ip_address(str(found[0][4][0]).partition("%")[0]).is_loopback


def _toward(host: str) -> str:
    """Return this machine's address on the way to a host; "" if there is no way. Nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def notice_of(environment: Mapping[str, str], ask: Ask = ask) -> dict[str, str]:
    """Return, as variables, what SLURM 22 has none for: when a job ends, and how far SIGTERM is ahead of its end.

    SIGTERM comes ``GraceTime`` of the partition ahead if the job is preempted, and ``KillWait`` ahead of the end for
    every other reason. Nobody says which it is, so the shorter one counts. Outside of a job nobody is asked.

    >>> answers = {"config": "KillWait = 10 sec\\n", "partition": "GraceTime=8", "job": "EndTime=Unknown"}
    >>> job = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "low"}
    >>> notice_of(job, lambda command: answers[command[command.index("show") + 1]])
    {'HOLDFAST_SIGTERM_GRACE': '8'}
    """
    if not environment.get("SLURM_JOB_ID"):
        return {}
    found = {}
    partition, job = environment.get("SLURM_JOB_PARTITION", ""), _job_of(environment)
    config = re.search(r"^KillWait\s*=\s*(\d+)", ask(["scontrol", "show", "config"]), re.MULTILINE)
    grace = _fields(ask(["scontrol", "--oneliner", "show", "partition", partition])).get("GraceTime", "")
    seconds = [int(text) for text in ((config[1] if config else ""), grace) if text.isdigit() and int(text)]
    if seconds:
        found["HOLDFAST_SIGTERM_GRACE"] = str(min(seconds))
    end = _fields(ask(["scontrol", "--oneliner", "show", "job", job])).get("EndTime", "")
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", end):
        found["SLURM_JOB_END_TIME"] = str(int(datetime.fromisoformat(end).timestamp()))  # the node's own time zone
    return found


def _fields(line: str) -> dict[str, str]:
    """Return the fields of a line of scontrol. Values with spaces, which nobody asks for here, are cut."""
    return dict(re.findall(r"(\w+)=(\S*)", line))
