"""What a run of the demo is made of: chosen once, sent to every worker, the same on all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from gradengine.demo.model import LlamaConfig
from gradengine.demo.text import split
from gradengine.errors import CallerError
from gradengine.layout.tensor_parallel import TensorParallelConfig

__all__ = ["Settings", "Texts", "Transport", "counted", "divide"]


class Transport(str, Enum):
    """How gradients travel: `TCP` and `UNIX` start one process for each rank, `LOCAL` one thread for each shard."""

    TCP = "tcp"
    UNIX = "unix"
    LOCAL = "local"


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
    port: int = 0
    compared_steps: int = 20
    evaluations: int = 10  # how often the held-out loss is taken, spread evenly over the run
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
        """How a shard of the model is cut; CallerError if it cannot be."""
        model, tp_size = self.model, self.tensor_parallel
        sizes = (model.hidden_size, model.intermediate_size, model.num_heads, model.num_kv_heads)
        return TensorParallelConfig(tp_rank, tp_size, *sizes)

    def is_evaluated(self, step: int) -> bool:
        """Whether the held-out loss is taken after `step` steps; always after the last.

        Example:
            >>> [step for step in range(1, 11) if Settings(steps=10, evaluations=3).is_evaluated(step)]
            [4, 7, 10]
        """
        return step * self.evaluations // self.steps > (step - 1) * self.evaluations // self.steps


@dataclass(frozen=True)
class Texts:
    """What is learned and what is held out, and where they come from."""

    train: bytes
    held_out: bytes
    source: str


def divide(text: bytes, source: str, sequence_length: int) -> Texts:
    """Hold out a tenth of the text; CallerError if a sequence does not fit into that."""
    train, held_out = split(text)
    if len(held_out) <= sequence_length:
        raise CallerError(
            f"too little text in {source}",
            got=f"{len(held_out)} bytes held out",
            expected=f"more than --sequence-length={sequence_length}",
            do="pass a longer text or a shorter sequence length",
        )
    return Texts(train, held_out, source)


def counted(number: int, noun: str) -> str:
    """The number and its noun, which gets an s unless there is one.

    Example:
        >>> counted(1, "step"), counted(2, "micro-batch"), counted(60, "step")
        ('1 step', '2 micro-batches', '60 steps')
    """
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
