"""The settings of a run of the demo: chosen once, sent to every worker, the same on all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gradengine.demo.model import LlamaConfig


class Transport(StrEnum):
    """How gradients are exchanged: `TCP` starts a process for each rank.

    With `LAUNCHER` and `MPI` this process is one of the ranks that torchrun, srun or mpiexec has started.
    """

    TCP = "tcp"
    LAUNCHER = "launcher"  # over sockets
    MPI = "mpi"


@dataclass(frozen=True)
class Settings:
    """The choices of a run; `gradengine demo --help` says what each is."""

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
    evaluations: int = 10  # how often the held-out loss is taken, spread evenly over the run
    model: LlamaConfig = field(default_factory=LlamaConfig)
    is_replay: bool = False  # only of the compared steps: whole micro-batches are added, and nothing is evaluated

    @property
    def micro_batches_in_all(self) -> int:
        """Micro-batches of all workers in each step."""
        return self.workers * self.micro_batches

    def share(self, step: int, rank: int) -> range:
        """The global indexes of the micro-batches that a rank takes of a step, counted from 1.

        All ranks together take each index once; what the step sees does not depend on how many they are.

        Example:
            >>> list(Settings(workers=2, micro_batches=2).share(step=2, rank=0))
            [4, 6]
        """
        return range((step - 1) * self.micro_batches_in_all + rank, step * self.micro_batches_in_all, self.workers)

    def is_evaluated(self, step: int) -> bool:
        """Whether the held-out loss is taken after `step` steps; always after the last.

        Example:
            >>> [step for step in range(1, 11) if Settings(steps=10, evaluations=3).is_evaluated(step)]
            [4, 7, 10]
        """
        due = step * self.evaluations // self.steps > (step - 1) * self.evaluations // self.steps
        return due and not self.is_replay


def counted(number: int, noun: str) -> str:
    """The number and its noun, which gets an s unless there is one.

    Example:
        >>> counted(1, "step"), counted(2, "micro-batch"), counted(60, "step")
        ('1 step', '2 micro-batches', '60 steps')
    """
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
