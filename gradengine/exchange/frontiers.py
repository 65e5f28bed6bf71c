"""Frontiers: the progress of an all-reduce's step on each rank, as bytes that the ranks tell each other."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from gradengine.errors import HandshakeRefused, ProtocolError

_HEADER = struct.Struct("<q")  # the step


class State(IntEnum):
    """The content of a share in a rank's arena."""

    LOCAL = 0  # this rank's part
    SENT = 1  # this rank's part, which is being sent to the owner; at the owner: which counts in the sum
    RECEIVING = 2  # this rank's part, partly overwritten by the sum: lost if the links end; never at the owner
    SUMMED = 3  # the sum over all ranks
    DAMAGED = 4  # a damaged message, perhaps one that was not the sum; never at the owner


def frontier_of(step: int, states: bytes | bytearray, known: Iterable[bool]) -> bytes:
    """A rank's frontier: the step, a `State` for each share, and which owners' facts have been received."""
    return _HEADER.pack(step) + states + bytes(known)


def frontiers_of(
    frontiers: Sequence[bytes], rank: int, mine: bytes, owners: npt.NDArray[np.intp], world_size: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Every rank's states of the shares, and which owners' facts it has.

    Args:
        frontiers: One for each rank; b"" for a rank that has begun nothing.
        rank: This rank.
        mine: This rank's own frontier.
        owners: The owner of each share.
        world_size: Ranks in the group.

    Raises:
        HandshakeRefused: A rank has not contributed to a share that is summed, or has lost its part of one that is not.
        ProtocolError: The frontiers contradict each other; names rank and share.
    """
    size, (step,) = len(mine), _HEADER.unpack_from(mine)
    if len(frontiers) != world_size:
        raise ProtocolError("another number of frontiers", got=len(frontiers), expected=world_size)
    is_new = np.array([not frontier for frontier in frontiers])
    frontiers = [frontier or _HEADER.pack(step) + bytes(size - _HEADER.size) for frontier in frontiers]
    for other, frontier in enumerate(frontiers):
        if len(frontier) != size:
            got, expected = f"{len(frontier)} bytes", f"{size} bytes, as of the same shares"
            raise ProtocolError(f"rank {other} sent another frontier", got=got, expected=expected)
        (its_step,) = _HEADER.unpack_from(frontier)
        if its_step != step:
            raise ProtocolError(f"rank {other} is in another step", got=its_step, expected=step)
    if frontiers[rank] != mine:
        raise ProtocolError(f"the frontier of rank {rank} is not its own", do="pass them in rank order")
    table = np.frombuffer(b"".join(frontiers), np.uint8).reshape(world_size, size)[:, _HEADER.size :]
    states, known = table[:, : len(owners)], table[:, len(owners) :]
    _refuse_lost(states, step, owners, is_new)
    _refuse_impossible(states, known, owners)
    return states, known


def _refuse_lost(
    states: npt.NDArray[np.uint8], step: int, owners: npt.NDArray[np.intp], is_new: npt.NDArray[np.bool_]
) -> None:
    """Refuse a step that lacks a rank's part: the rank has begun anew, or its part was overwritten before the sum."""
    is_summed = states[owners, range(len(owners))] == State.SUMMED  # as each share's owner says
    is_summed_by_one = (states == State.SUMMED).any(axis=0)
    for rank in np.flatnonzero((is_summed_by_one & (states == State.LOCAL)).any(axis=1))[:1].tolist():
        raise HandshakeRefused(
            f"rank {rank} has not contributed to what step {step} has summed",
            do="a new process, or one that dropped its window: discard() it on every rank, and accumulate it again",
        )
    for rank, number in np.argwhere(~is_summed & (states == State.DAMAGED))[:1].tolist():
        raise HandshakeRefused(
            f"rank {rank} has lost its part of share {number} in step {step} to a message that was damaged on the way",
            do="discard() the window on every rank, and accumulate it again",
        )
    # The owner has begun anew: one that has no sum, and has not begun anew, has sent none.
    for rank, number in np.argwhere((states == State.RECEIVING) & is_new[owners])[:1].tolist():
        lost = f"its part of share {number} in step {step}"
        raise HandshakeRefused(
            f"rank {rank} has lost {lost} to a sum of rank {owners[number]} that is gone",
            do="discard() the window on every rank; load what all saved in it, or accumulate it again",
        )


def _refuse_impossible(
    states: npt.NDArray[np.uint8], known: npt.NDArray[np.uint8], owners: npt.NDArray[np.intp]
) -> None:
    ranks = np.arange(len(states))
    is_summed = states[owners, range(len(owners))] == State.SUMMED
    impossible = (
        (states > State.DAMAGED)
        | (~is_summed & (states == State.SUMMED))  # a sum that its owner does not have
        | ((owners == ranks[:, None]) & (states == State.RECEIVING))
    )
    for rank, number in np.argwhere(impossible)[:1].tolist():
        owner = owners[number]
        got = f"state {states[rank, number]}, and state {states[owner, number]} at its owner, rank {owner}"
        raise ProtocolError(f"rank {rank} sent an impossible state of share {number}", got=got)
    is_whole = np.array([owner in owners and is_summed[owners == owner].all() for owner in ranks])
    impossible = (known > is_whole) | (np.eye(len(ranks), dtype=np.bool_) & (known != is_whole))
    for rank, owner in np.argwhere(impossible)[:1].tolist():
        raise ProtocolError(f"rank {rank} sent an impossible state of rank {owner}'s facts", got=known[rank, owner])
