"""Comparison of a module's weights over the ranks before the first step, and their broadcast from rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradengine.errors import CallerError, LayoutMismatch
from gradengine.exchange.exchange import Bytes, Exchange
from gradengine.exchange.gather import gathered, packed
from gradengine.torch.gradients import Parameters


def parameters_of(module: Parameters) -> dict[str, torch.Tensor]:
    """Return all parameters by name, or by position for a list, with frozen ones and with tied ones once."""
    if isinstance(module, torch.nn.Module):
        return dict(module.named_parameters())
    return {str(i): parameter for i, parameter in enumerate(module)}


def buffers_of(module: Parameters) -> dict[str, torch.Tensor]:
    """Return all buffers by name, with non-persistent ones and with tied ones once; none for a list of parameters."""
    return dict(module.named_buffers()) if isinstance(module, torch.nn.Module) else {}


def refuse_other_weights(workers: Exchange, parts: Exchange | None, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare a digest of each parameter over the ranks. All ranks call this together.

    A parameter whose bytes cannot be read (on "meta", sparse, a DTensor) is compared only by name, shape, torch layout
    and device.

    Args:
        workers: The exchange over the ranks that have the same part of the model.
        parts: The exchange over the ranks that have the other parts, whose weights differ.
        tensors: The parameters by name.

    Raises:
        CallerError: A rank's parameters are not rank 0's. All ranks of both exchanges raise it.
    """
    rows = [(f"'{name}'", _digest_of(_row_of(name, tensor), tensor)) for name, tensor in tensors.items()]
    found = _first_difference(workers, parts, "digests of the weights", rows)
    if found is not None:
        what = f"parameter {found[1]} of rank {found[0]} is not that of rank 0"
        do = "discard() an open window and call attached.broadcast(), or load one checkpoint, on all ranks"
        raise CallerError(what, do=do)


def send_from_rank_0(workers: Exchange, parts: Exchange | None, tensors: Mapping[str, torch.Tensor], step: int) -> None:
    """Copy rank 0's tensors to all ranks, in place. All ranks call this together.

    Args:
        workers: The exchange over the ranks that have the same part of the model.
        parts: The exchange over the ranks that have the other parts.
        tensors: The tensors by name, of any dtype, device and strides.
        step: The step's number, which must be the same on all ranks.

    Raises:
        LayoutMismatch: A rank's tensors differ from rank 0's in name, dtype or shape. No rank has written.
        CallerError: A tensor's bytes cannot be read or written on all ranks. No rank has written.
        ExchangeError: A rank is in a different step, and no rank has written. Or the exchange failed, and this rank has
            written none, some or all of the tensors.
    """
    rows = {name: _row_of(name, tensor) for name, tensor in tensors.items()}
    digests = [(row, xxhash.xxh3_64_intdigest(row.encode())) for row in rows.values()]
    found = _first_difference(workers, parts, f"tensors of the module in step {step}", digests)
    if found is not None:
        what, do = f"the module of rank {found[0]} is not that of rank 0", "make the same module on all ranks"
        raise LayoutMismatch(what, got=found[1], expected=found[2], do=do)
    for name, tensor in tensors.items():
        if not _has_memory(tensor):
            what = f"tensor {rows[name]} cannot be sent, because its bytes cannot be read"
            raise CallerError(what, do="load it from one checkpoint on all ranks")
        if tensor.is_inference():  # torch forbids writes to it
            do = "make the module outside of inference_mode()"
            raise CallerError(f"tensor {rows[name]} cannot be written", do=do)
    workers.broadcast(_bytes_in_turn(tensors, writes=workers.rank > 0))


def _first_difference(
    workers: Exchange, parts: Exchange | None, what: str, rows: list[tuple[str, int]]
) -> list[Any] | None:
    """Return the first rank with a digest that is not rank 0's, with its text and rank 0's; the same on all ranks.

    All parts of the model receive the result. If only one part raised, the others would wait for it in the step.
    """
    found = None
    told = _told(workers, what, [digest for _, digest in rows])
    for rank, theirs in enumerate(told):
        pairs = enumerate(zip_longest(theirs, told[0]))
        place = next((place for place, (one, first) in pairs if one != first), None)
        if place is not None:
            texts = _told(workers, f"{what}: one that differs", rows[place][0] if place < len(rows) else "none")
            found = [rank, texts[rank], texts[0]]
            break
    if parts is not None:
        found = next((theirs for theirs in _told(parts, what, found) if theirs), None)
    return found


def _told(exchange: Exchange, what: str, facts: object) -> list[Any]:
    """Return every rank's facts; `Exchange.tell` would return earlier facts if called again after a broadcast."""
    return gathered(exchange.all_gather(packed(what, facts)))


def _row_of(name: str, tensor: torch.Tensor) -> str:
    if not _has_memory(tensor):
        return f"'{name}' {tuple(tensor.shape)}, {tensor.layout} on {tensor.device.type}"
    return f"'{name}' {tuple(_single(tensor).shape)}, {tensor.dtype}{', inference' * tensor.is_inference()}"


def _digest_of(row: str, tensor: torch.Tensor) -> int:
    data = _bytes_of(_single(tensor)).data if _has_memory(tensor) else b""
    return xxhash.xxh3_64_intdigest(data, xxhash.xxh3_64_intdigest(row.encode()))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes can be read, unlike a "meta", sparse or quantized tensor or a DTensor."""
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and not tensor.is_meta and not is_traceable_wrapper_subclass(tensor)


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with each element once, for a tensor that may be expanded."""
    return tensor.detach()[tuple(slice(None if stride else 1) for stride in tensor.stride())]


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bytes in row-major order, as a copy unless it is contiguous on the host."""
    values = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    flat = values.as_strided((values.numel(),), (1,))  # a contiguous tensor of one element or none may have stride 0
    array: Bytes = flat.view(torch.uint8).numpy()
    return array


def _bytes_in_turn(tensors: Mapping[str, torch.Tensor], *, writes: bool) -> Iterator[Bytes]:
    """Yield each tensor's bytes, or with `writes` memory to fill, which is then copied to the tensor."""
    for tensor in map(_single, tensors.values()):
        if not writes:
            yield _bytes_of(tensor)
            continue
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        yield _bytes_of(values)
        with torch.no_grad():
            tensor.copy_(values)
