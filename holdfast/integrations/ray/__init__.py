"""Training on a Ray cluster: ``HoldfastTrainer``, in the shape of Ray Train v2 (docs/ray.md).

Ray places workers, finds machines for them and says which machines it will take away. Everything else is holdfast's:
each worker that Ray places is an agent with one worker process, and they meet at a coordinator beside the driver.
"""

from holdfast.integrations.ray.trainer import HoldfastTrainer
from holdfast.integrations.ray.worker import checkpoint_folder

__all__ = ["HoldfastTrainer", "checkpoint_folder"]
