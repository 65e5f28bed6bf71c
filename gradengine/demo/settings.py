"""What a run of the demo is made of: chosen once, sent to every worker, the same on all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from gradengine.demo.model import LlamaConfig
from gradengine.demo.text import split
from gradengine.errors import CallerError
from gradengine.tensor_parallel import TensorParallelConfig

__all__ = ["Settings", "Texts", "Transport", "divide"]


class Transport(str, Enum):
    """How gradients travel: `TCP` and `UNIX` start one process for each rank, `LOCAL` one thread for each shard."""

    TCP = "tcp"
    UNIX = "unix"
    LOCAL = "local"


@dataclass(frozen=True)
class Settings:
    """The choices of a run.

    Attributes:
        workers: Ranks that train together.
        tensor_parallel: Shards that the model of each worker is cut into; each has a thread of its own.
        micro_batches: Micro-batches of each worker in each step.
        steps: Optimizer steps.
        batch_size: Sequences of a micro-batch.
        learning_rate: The rate after warm-up; a half cosine takes it down to a tenth.
        max_norm: Bound of the gradient's global norm.
        seed: Of the first weights and of the micro-batches.
        transport: How gradients travel.
        port: Where rank 0 listens on loopback; 0 for any free port.
        compared_steps: After so many steps the weights are kept, to be compared with those of one process.
        evaluations: How often the held-out loss is taken, spread evenly over the run.
        model: The sizes of the model.
    """

    workers: int = 2
    tensor_parallel: int = 1
    micro_batches: int = 2
    steps: int = 400
    batch_size: int = 8
    learning_rate: float = 6e-3
    max_norm: float = 1.0
    seed: int = 0
    transport: Transport = Transport.TCP
    port: int = 0
    compared_steps: int = 20
    evaluations: int = 10
    model: LlamaConfig = field(default_factory=LlamaConfig)

    @property
    def micro_batches_in_all(self) -> int:
        """Micro-batches of all workers in each step."""
        return self.workers * self.micro_batches

    @property
    def activation_size(self) -> int:
        """Elements of what an all-reduce inside the model adds up: (B*T, H)."""
        return self.batch_size * self.model.sequence_length * self.model.hidden_size

    def shard(self, tp_rank: int) -> TensorParallelConfig:
        """How a shard of the model is cut.

        Raises:
            CallerError: The model cannot be cut into so many.
        """
        model = self.model
        return TensorParallelConfig(
            tp_rank,
            self.tensor_parallel,
            model.hidden_size,
            model.intermediate_size,
            model.num_heads,
            model.num_kv_heads,
        )

    def is_evaluated(self, step: int) -> bool:
        """Whether the held-out loss is taken after `step` steps; always after the last.

        Example:
            >>> [step for step in range(1, 11) if Settings(steps=10, evaluations=3).is_evaluated(step)]
            [4, 7, 10]
        """
        done, before = (step * self.evaluations // self.steps, (step - 1) * self.evaluations // self.steps)
        return done > before


@dataclass(frozen=True)
class Texts:
    """What is learned and what is held out, and where they come from."""

    train: bytes
    held_out: bytes
    source: str


def divide(text: bytes, source: str, sequence_length: int) -> Texts:
    """Hold out a tenth of the text.

    Raises:
        CallerError: A sequence does not fit into what is held out.
    """
    train, held_out = split(text)
    if len(held_out) <= sequence_length:
        raise CallerError(
            f"too little text in {source}",
            got=f"{len(held_out)} bytes held out",
            expected=f"more than --sequence-length={sequence_length}",
            do="pass a longer text or a shorter sequence length",
        )
    return Texts(train, held_out, source)
