"""The settings of a run of the demo, which are the same on all workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gradengine.demo.model import LlamaConfig


class Transport(StrEnum):
    """The transport of gradients. `TCP` starts a process for each rank.

    With `LAUNCHER` and `MPI` this process is one of the ranks that torchrun, srun or mpiexec has started.
    """

    TCP = "tcp"
    LAUNCHER = "launcher"  # uses sockets
    MPI = "mpi"


@dataclass(frozen=True)
class Settings:
    """The settings of a run. `gradengine demo --help` describes them."""

    workers: int = 2
    tensor_parallel: int = 1
    micro_batches: int = 2
    steps: int = 400
    batch_size: int = 8
    learning_rate: float = 6e-3
    max_norm: float = 1.0  # bound of the gradient's global norm
    seed: int = 0
    transport: Transport = Transport.TCP
    compared_steps: int = 20
    evaluations: int = 10  # number of held-out losses, spread evenly over the run
    model: LlamaConfig = field(default_factory=LlamaConfig)
    is_replay: bool = False  # only the compared steps are made, by whole micro-batches, without held-out losses

    @property
    def micro_batches_in_all(self) -> int:
        """The number of micro-batches of all workers in each step."""
        return self.workers * self.micro_batches

    def share(self, step: int, rank: int) -> range:
        """Return the global indexes of a rank's micro-batches in a step. Steps count from 1.

        All ranks together take each index once. The micro-batches of a step depend only on their number.

        Example:
            >>> list(Settings(workers=2, micro_batches=2).share(step=2, rank=0))
            [4, 6]
        """
        return range((step - 1) * self.micro_batches_in_all + rank, step * self.micro_batches_in_all, self.workers)

    def is_evaluated(self, step: int) -> bool:
        """Return whether the held-out loss is taken after `step` steps. It is always taken after the last step.

        Example:
            >>> [step for step in range(1, 11) if Settings(steps=10, evaluations=3).is_evaluated(step)]
            [4, 7, 10]
        """
        due = step * self.evaluations // self.steps > (step - 1) * self.evaluations // self.steps
        return due and not self.is_replay


def counted(number: int, noun: str) -> str:
    """Return the number and its noun, in the plural unless the number is 1.

    Example:
        >>> counted(1, "step"), counted(2, "micro-batch"), counted(60, "step")
        ('1 step', '2 micro-batches', '60 steps')
    """
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
