"""The Ray actor of a worker: an agent of ``holdfast run`` that has one worker process.

So a worker that crashes or hangs is replaced where it is, from a zygote, and Ray hears nothing of it. The actor's end
is the end of all that it has started: an agent's workers end with it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import logs
from holdfast.cluster.agent import Agent
from holdfast.cluster.agent_settings import AgentSettings
from holdfast.integrations.ray.worker import FOLDER, LOGS, PATHS, PROGRAM

MODULE = "holdfast.integrations.ray"  # its __main__
ANY = 100_000  # hosts: the crew alone decides how many there are
NODE_DIGITS = 12  # of a node's id, in the name of its host


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all agents of a run have in common."""

    name: str
    folder: str  # of the run, which all nodes share
    endpoint: str  # the coordinator's host:port
    token: str = field(repr=False)
    minimum: int  # agents without which the run does not begin
    heartbeat_timeout: float
    step_timeout: str
    patience: float

    def settings(self, *, host: str = "") -> AgentSettings:
        """Return the settings of an agent on this host. Its workers find modules where this process does."""
        folder = Path(self.folder) / LOGS
        return AgentSettings(
            command=[MODULE, str(folder / PROGRAM)],
            module=True,
            hosts=(host,) if host else (),
            minimum_hosts=self.minimum,
            maximum_hosts=ANY,
            endpoint=self.endpoint,
            job=self.name,
            token=self.token,
            heartbeat_timeout=self.heartbeat_timeout,
            step_timeout=self.step_timeout,
            patience=self.patience,
            log_dir=folder,
            environment={FOLDER: self.folder, PATHS: json.dumps(sys.path)},
        )


@dataclass(frozen=True, kw_only=True)
class AgentEnd:
    """How an agent has ended: its exit code, and the error that has ended the run."""

    code: int
    text: str


class AgentActor:
    """An agent on the node where Ray has placed it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._agent: Agent | None = None
        self._running: asyncio.Task[AgentEnd] | None = None

    async def place(self) -> tuple[str, int]:
        """Return the node's id, and the process's."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def run(self) -> AgentEnd:
        """Run the agent until its worker is done. Whoever has lost the answer may ask again."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._running)

    async def _run(self) -> AgentEnd:
        logs.show()
        node, _ = await self.place()
        complaints: list[str] = []
        self._agent = Agent(
            self._job.settings(host=f"node-{node[:NODE_DIGITS]}"),
            say=functools.partial(print, flush=True),
            complain=complaints.append,
            heeds_signals=False,
        )
        code = await self._agent.run()
        return AgentEnd(code=code, text="\n".join(complaints))

    async def leave(self, seconds: float) -> None:
        """Let the worker leave: the node is taken away in so many seconds."""
        if self._agent is not None:
            self._agent.leave(seconds)
