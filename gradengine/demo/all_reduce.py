"""The all-reduce of tensor parallelism: partial sums of activations, added up over the shards in rank order."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from gradengine.errors import BufferRefused, CallerError
from gradengine.exchange import Progress
from gradengine.layout import GradientLayout
from gradengine.telling import in_group

if TYPE_CHECKING:
    from gradengine.demo.model import Array
    from gradengine.exchange import Exchange
    from gradengine.layout import Span

__all__ = ["ActivationAllReduce"]


@final
class ActivationAllReduce:
    """Adds up the ranks' fp32 arrays through any `Exchange`; every rank gets the same bytes.

    The exchange is bound to a layout of one slot, and each call is a step of its own. All memory is allocated here; a
    smaller array travels with zeros behind it.

    Args:
        exchange: Of the tensor-parallel group, not bound yet; closed by whoever made it.
        max_size: Elements of the largest array, the same on all ranks.

    Raises:
        CallerError: `max_size` is less than 1.
        HandshakeRefused, PeerLost: The ranks do not come together.

    Example:
        >>> from gradengine.exchange import local_group
        >>> all_reduce = ActivationAllReduce(local_group(1)[0], max_size=4)
        >>> all_reduce(np.ones((1, 3), np.float32))
        array([[1., 1., 1.]], dtype=float32)
    """

    def __init__(self, exchange: Exchange, max_size: int) -> None:
        if max_size < 1:
            raise CallerError("max_size is out of range", got=max_size, expected="at least 1 element")
        layout = GradientLayout.of({"partial_sums": (max_size,)})
        self.max_size = max_size
        self._exchange, self._span, self._progress = exchange, layout.spans[0], Progress()
        self._arena = np.zeros(layout.arena_size, np.float32)
        with in_group("between the shards of a model"):
            exchange.bind(layout, self._arena, self._progress, _pass_over)

    def __call__(self, partial: Array) -> Array:
        """Replace a rank's partial sum by the sum over all ranks; what is not finite stays so.

        Args:
            partial: Writable NumPy array of float32, of the same shape on all ranks.

        Returns:
            `partial`, overwritten.

        Raises:
            BufferRefused: It is not such an array, or too large.
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed; `partial` is as it was.
        """
        self._refuse_bad(partial)
        shared = self._arena[: partial.size].reshape(partial.shape)
        np.copyto(shared, partial)
        self._arena[partial.size :] = 0.0  # sums of earlier calls would grow there without bound
        with in_group("between the shards of a model"):
            self._exchange.start(self._span)
            self._exchange.wait()
        self._progress.next_step()
        np.copyto(partial, shared)
        return partial

    def _refuse_bad(self, partial: Array) -> None:
        if not isinstance(partial, np.ndarray) or partial.dtype != np.float32:
            kind = getattr(partial, "dtype", None) or type(partial).__name__
            raise BufferRefused("a partial sum cannot be taken", got=kind, expected="a NumPy array of float32")
        if partial.size > self.max_size:
            raise BufferRefused(
                "a partial sum is too large", got=f"{partial.size} elements", expected=f"at most {self.max_size}"
            )


def _pass_over(span: Span, upto: int) -> None:
    """Sums are used when all have landed."""
