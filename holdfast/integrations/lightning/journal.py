"""A logger of Lightning that writes into the run's journal, where each row is written once whatever is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger

if TYPE_CHECKING:
    from holdfast.integrations.lightning.strategy import HoldfastStrategy


class JournalLogger(Logger):
    """What ``self.log`` logs, in the rows of ``metrics.jsonl``: ``HoldfastStrategy(...).logger()`` makes one.

    Each row is written once, whoever is lost, joins or resumes. ``strategy.loop.log_to`` sends the rows to TensorBoard,
    Weights & Biases or MLflow as well.
    """

    def __init__(self, strategy: HoldfastStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    @property
    def name(self) -> str:
        """A name for folders of checkpoints."""
        return "holdfast"

    @property
    def version(self) -> str:
        """The same in every start of a run."""
        return "run"

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: they are not of a step."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log values for the step that is committed."""
        self._strategy.journal(metrics)
