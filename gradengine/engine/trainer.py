"""A data-parallel training loop around a local trainer, which keeps the weights of all ranks equal."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Protocol, TypeVar, final

from gradengine.accumulate.gradients import Gradients
from gradengine.accumulate.window import checked_weight, ordered_sum, weight_as_float
from gradengine.arguments import as_number, checked_rank, iterated, refuse_lacking, said, whole_number
from gradengine.arrays.frameworks import is_torch
from gradengine.arrays.host import host_buffer
from gradengine.engine import GradientEngine
from gradengine.engine.result import StepResult
from gradengine.errors import CallerError, ExchangeError, GradientError, ProtocolError, WindowError
from gradengine.exchange.exchange import Exchange
from gradengine.layout import GradientLayout

MicroBatchT_contra = TypeVar("MicroBatchT_contra", contravariant=True)


class Batch(Enum):
    """The states of a batch."""

    READY = "there is none"
    ADDING = "its micro-batches are added"
    ADDED = "all micro-batches are added, and the step is to be made"
    APPLYING = "the step or apply_gradients runs, or was interrupted, so that the weights may have changed"
    FINISHED = "the weights are updated"


#: State -> reason why it forbids `finish_step`, and an action.
_REFUSED = {
    Batch.READY: ("there is no batch to finish", "call train_batch() first"),
    Batch.ADDING: ("a batch stopped before all its micro-batches were added", "discard() it on every rank"),
    Batch.APPLYING: (
        "a batch was interrupted or apply_gradients raised, and the weights may have changed",
        "discard() it and load one checkpoint, on every rank",
    ),
}


class LocalTrainer(Protocol[MicroBatchT_contra]):
    """The methods that your own training loop must have.

    It may also have

    - `weight(micro_batch) -> float` returns the weight of a micro-batch, such as its number of tokens. The default is
      1. A micro-batch of weight 0 is left out.
    - `weights() -> mapping or iterable of arrays` returns the model's weights for the digests of `check_every`.
    - `stream_backward(micro_batch) -> (loss, stream)` replaces `forward_backward` for a window's last micro-batch, if
      `micro_batches` is known. The stream yields pairs (block index, its gradients) and (component name, gradient)
      while backward runs, so that blocks are sent before it ends.
    """

    def forward_backward(self, micro_batch: MicroBatchT_contra, /) -> tuple[float, Gradients]:
        """Return a micro-batch's loss and its gradients, in a form that `GradientEngine.add` accepts."""
        ...

    def apply_gradients(self, gradients: Mapping[str, Any], /) -> object:
        """Update the weights with the averaged, clipped gradients (name -> fp32 array, valid until this returns).

        A component that no micro-batch used has zeros. `DistributedTrainer.last_result.unused` names such components.
        """
        ...


@final
class DistributedTrainer:
    """A training loop over a local trainer on every rank. All ranks keep the same weights, bit for bit.

    Args:
        trainer: The local trainer, which must start with the same weights on every rank.
        exchange: Exchange over the ranks; None for one rank.
        layout: The gradients' layout.
        max_steps: Number of steps after which `reached_max_steps` is True and `train_batch` raises; None for no limit.
        check_every: Number of steps between comparisons of all ranks' weights by digest; 0 (default) never compares.
            Needs `trainer.weights()`.
        options: Keyword arguments of `GradientEngine`. `micro_batches` is the number of this rank's in each step. The
            exchange starts with the last one. A `tp_exchange` is over ranks that train on the same micro-batches.

    Raises:
        CallerError: An argument is out of range.
        HandshakeRefused, PeerLost: The ranks could not form a group.

    Example:
        >>> class Descent:
        ...     w = np.array([4.0], np.float32)
        ...     def forward_backward(self, target):
        ...         return float((self.w[0] - target) ** 2), {"w": 2 * (self.w - target)}
        ...     def apply_gradients(self, gradients):
        ...         self.w -= 0.5 * gradients["w"]
        >>> trainer = DistributedTrainer(Descent(), None, GradientLayout.of({"w": (1,)}), max_norm=None)
        >>> trainer.train_batch([np.float32(1), np.float32(3)]), Descent.w
        (5.0, array([2.], dtype=float32))
    """

    def __init__(
        self,
        trainer: LocalTrainer[Any],
        exchange: Exchange | None,
        layout: GradientLayout,
        *,
        max_steps: int | None = None,
        check_every: int = 0,
        **options: Any,
    ) -> None:
        refuse_lacking("trainer", trainer, ("forward_backward", "apply_gradients"))
        self.trainer = trainer
        self.max_steps = None if max_steps is None else whole_number("max_steps", max_steps, 0)
        self.check_every = whole_number("check_every", check_every, 0)
        if check_every:
            refuse_lacking("trainer", trainer, ("weights",))
        self._losses: list[tuple[float, float]] = []
        self._loss = 0.0
        self._batch = Batch.READY
        self._last_result: StepResult | None = None
        self.engine = GradientEngine(layout, exchange=exchange, **options)

    @property
    def step(self) -> int:
        """The number of steps that ended, which is the engine's `current_step`. `engine.load_state_dict()` sets it.

        A step that was skipped, or discarded after `NonFiniteGradient`, counts.
        """
        return self.engine.current_step

    @property
    def last_result(self) -> StepResult | None:
        """The result of the last step; None before the first step."""
        return self._last_result

    @property
    def rank(self) -> int:
        """The number of this rank in its group."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self.engine.world_size

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def reached_max_steps(self) -> bool:
        """Whether `max_steps` steps have been made."""
        return self.max_steps is not None and self.step >= self.max_steps

    def train_batch(self, micro_batches: Iterable[Any]) -> float:
        """Make one optimizer step on this rank's micro-batches.

        Args:
            micro_batches: This rank's micro-batches. There may be none if a different rank has some. This rank then
                takes part with weight 0.

        Returns:
            The mean of `forward_backward`'s losses over all ranks' micro-batches, by weight, for every `average`. It
            is the same on every rank. If a micro-batch's loss is NaN, the mean is NaN, but the step is made if the
            gradients are finite.

        Raises:
            WindowError: No rank has a micro-batch, an earlier batch is not finished, or all steps are done.
            CallerError: The trainer did not return (loss, gradients), or the loss is not a number. These gradients were
                not added.
            NonFiniteGradient, PeerLost, ProtocolError, DeadlineExceeded: As `GradientEngine.step`. Call `finish_step()`
                to run the step again.
            ExchangeError: The ranks' weights differ. The batch is finished, also if they could not be compared.
        """
        batches = iterated("micro_batches", micro_batches)
        if self.reached_max_steps:
            raise WindowError("all steps are done", got=f"step {self.step + 1}", expected=f"max_steps={self.max_steps}")
        if self._batch is Batch.APPLYING:
            raise _refusal(self._batch)
        # The engine's discard() may have dropped the window of an earlier batch.
        if self.engine.has_open_window:
            do = "run finish_step() again, or discard() the batch on every rank"
            raise WindowError("an earlier batch is not finished", do=do)
        self._batch, self._losses = Batch.ADDING, []
        for micro_batch in batches:
            weight = self._weight(micro_batch)
            # The loss of a micro-batch without weight is a mean over 0 tokens, which may be NaN.
            if weight == 0:
                continue
            last = len(self._losses) + 1 == self.engine.micro_batches
            streams = last and hasattr(self.trainer, "stream_backward")
            loss = self._stream(micro_batch, weight) if streams else self._add(micro_batch, weight)
            self._losses.append((loss, weight))
        if not self._losses:
            self.engine.add(None, weight=0)
        self._batch = Batch.ADDED
        return self.finish_step()

    def finish_step(self) -> float:
        """Make the step and apply its gradients, as the end of `train_batch` does. If that failed, call this again.

        If the batch is already finished, this returns its loss again.

        Returns:
            The loss, as `train_batch`.

        Raises:
            WindowError: There is no batch to finish, it was interrupted, or a part of it was not added.
            NonFiniteGradient, PeerLost, ProtocolError, DeadlineExceeded, ExchangeError: As `train_batch`.
        """
        if self._batch in _REFUSED:
            raise _refusal(self._batch)
        if self._batch is Batch.ADDED:
            self._loss = self._global_loss()  # A failure here leaves the batch ADDED.
            self._batch = Batch.APPLYING
            try:
                result = self._last_result = self.engine.step(partial=True)
            except GradientError:
                self._batch = Batch.ADDED
                raise
            if not result.skipped:
                self.trainer.apply_gradients(result.gradients)
            self._batch = Batch.FINISHED
            if self.check_every and self.step % self.check_every == 0:
                self._refuse_other_weights()
        return self._loss

    def discard(self) -> None:
        """Drop an unfinished batch, as `GradientEngine.discard`. Call it on every rank, or the weights will differ."""
        self.engine.discard()
        self._batch = Batch.READY

    def _add(self, micro_batch: object, weight: float) -> float:
        answer = self.trainer.forward_backward(micro_batch)
        loss, gradients = _loss_and_rest("forward_backward", answer, "(loss, gradients)")
        self.engine.add(gradients, weight)
        return loss

    def _stream(self, micro_batch: object, weight: float) -> float:
        """Add the window's last micro-batch part by part, so that each part is sent as soon as it is added."""
        answer = self.trainer.stream_backward(micro_batch)  # type: ignore[attr-defined]
        loss, parts = _loss_and_rest("stream_backward", answer, "(loss, stream)")
        for part in iterated("stream_backward's stream", parts):
            key, gradients = _pair("stream_backward's stream", part, "(block index or component name, gradients)")
            if isinstance(key, str):
                self.engine.add_non_block(key, gradients, weight, last=True)
            else:
                self.engine.add_block(key, gradients, weight, last=True)
        return loss

    def _weight(self, micro_batch: object) -> float:
        weight = getattr(self.trainer, "weight", None)
        if weight is None:
            return 1.0
        counts = weight(micro_batch)
        return 0.0 if weight_as_float(counts) == 0 else float(checked_weight(counts))

    def _global_loss(self) -> float:
        mine = (ordered_sum(loss * weight for loss, weight in self._losses), ordered_sum(w for _, w in self._losses))
        told = self.engine.all_gather_object(f"loss of step {self.step}", list(mine))
        sums = [_loss_and_weight(rank, facts) for rank, facts in enumerate(told)]
        total = ordered_sum(weight for _, weight in sums)
        return ordered_sum(loss for loss, weight in sums if weight) / total if total else math.nan

    def _refuse_other_weights(self) -> None:
        if self.engine.exchange is None:
            return
        mine = weights_digest(self.trainer.weights())  # type: ignore[attr-defined]
        told = self.engine.all_gather_object(f"digest of weights after step {self.step}", mine)
        for rank, digest in enumerate(told):
            if digest != told[0]:
                what = f"weights of rank {rank} differ from rank 0's after step {self.step}"
                do = "start all ranks from the same weights, and apply only the step's gradients"
                raise ExchangeError(what, got=digest, expected=told[0], do=do)


def _refusal(batch: Batch) -> WindowError:
    what, do = _REFUSED[batch]
    return WindowError(what, do=do)


def _pair(giver: str, answer: Any, expected: str) -> tuple[Any, Any]:
    """Return the two items that a trainer returned. Refuse others, such as a mapping of two gradients."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        raise CallerError(f"{giver} gave no pair", got=said(answer), expected=expected)
    return answer[0], answer[1]


def _loss_and_rest(giver: str, answer: Any, expected: str) -> tuple[float, Any]:
    loss, rest = _pair(giver, answer, expected)
    number = as_number(loss)  # accepts NaN
    if number is None:
        what, is_number = "a micro-batch's loss is not a number", "a number, or an array of no dimension"
        raise CallerError(what, got=said(loss), expected=is_number, do=f"return {expected}")
    return number, rest


def _loss_and_weight(rank: int, facts: Any) -> tuple[float, float]:
    are_numbers = isinstance(facts, list) and list(map(type, facts)) == [float, float]
    if not are_numbers or not 0 <= facts[1] < math.inf:
        raise ProtocolError(f"rank {rank} sent an invalid loss", got=said(facts), expected="[loss, weight]")
    return facts[0], facts[1]


def shard_batches(num_batches: int, rank: int, world_size: int) -> range:
    """Return the indices of one rank's batches, which are rank, rank + world_size, ...

    Args:
        num_batches: Number of batches of all ranks.
        rank: Number of the rank.
        world_size: Number of ranks. If it is greater than `num_batches`, some ranks get none.

    Raises:
        CallerError: A number is out of range.

    Example:
        >>> [list(shard_batches(7, rank, 3)) for rank in range(3)]
        [[0, 3, 6], [1, 4], [2, 5]]
    """
    rank, world_size = checked_rank(rank, world_size)
    return range(rank, whole_number("num_batches", num_batches, 0), world_size)


def weights_digest(weights: Mapping[str, object] | Iterable[object]) -> str:
    """Return the sha256 of the bytes of contiguous CPU arrays, in order, as hex digits.

    Example:
        >>> weights_digest([np.zeros(2, np.float32)]) == weights_digest({"w": np.zeros(2, np.float32)})
        True
    """
    digest = hashlib.sha256()
    arrays = weights.values() if isinstance(weights, Mapping) else iterated("weights", weights)
    for i, array in enumerate(arrays):
        values = array.detach() if is_torch(array) else array  # host_buffer() refuses parameters
        digest.update(host_buffer(values, f"weights[{i}]").data.data)
    return digest.hexdigest()
