"""K2's results on the device, which are norms and factors as device arrays, and the status.

Reading an array waits for the device. `StatusReadback.newest` never waits. The status is copied to pinned memory after
the step's work, and the host reads it after it has arrived.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.decision import ClipPlan, Decision, Scalar
from gradengine.kernels.streams import StreamOrder


class StepStatus(NamedTuple):
    """The result of one step on the host (struct StepStatus of finalise.cu). Some fields are about `bad_step`."""

    norm: float  # norm of the averaged gradient, before clipping
    step: int  # number of the step, counted by the device from 1 on
    bad_step: int = 0  # last step whose gradient was not finite, or 0
    bad_steps: int = 0  # number of such steps
    bad_component: int = 0  # position of the first component that was not finite
    bad_index: int = 0  # index of its first non-finite element, -1 if it was not searched for
    non_finite: int = 0  # number of non-finite elements in all components
    bad_weight_step: int = 0  # last step without a valid divisor, whose result was zeros, or 0
    bad_weights: int = 0  # number of such steps
    bad_weight: float = 0.0  # divisor of that step without a dynamic loss scale
    bad_value: float = 0.0
    scale: float = 1.0  # clip scale, or the smallest one of several groups
    factor: float = 1.0  # number that the sum was multiplied by
    inverse: float = 1.0  # 1 / factor
    skipped: bool = False  # whether the result was zeros
    loss_scale: float = 0.0  # dynamic loss scale of the step, or 0
    spiked: bool = False  # whether the norm was a spike
    spike_bound: float = math.inf  # bound above which a norm is a spike

    @property
    def is_bad(self) -> bool:
        """Whether the gradient of this step was not finite."""
        return self.bad_step == self.step


_TYPES = ["<f8", *["<u8"] * 3, *["<i8"] * 2, *["<u8"] * 3, "<f8", *["<f4"] * 8]
RECORD = np.dtype(list(zip(StepStatus._fields, _TYPES, strict=True)))


@dataclass(frozen=True)
class DeviceDecision(Decision):
    """A decision in device memory, allocated once for a plan. Each step overwrites its arrays."""

    order: StreamOrder  # order of work on this memory
    segments: tuple[Any, ...]  # K2's arguments for the components that share a norm
    written: tuple[Any, ...]  # K2's arguments that it writes
    all_factors: Any  # factors of the groups in one array
    record: Any  # the status

    @property
    def scale(self) -> Scalar:
        """The smallest clip scale, as a 0-d array."""
        return self.field("scale")

    @property
    def factor(self) -> Scalar:
        """The first group's factor, as a 0-d array."""
        return self.field("factor")

    def kept_norm(self) -> Scalar:
        """Return a copy of the norm on the device, which the streams that are current now may read."""
        with self.order.use():
            copy = self.order.runtime.copied(self.norm)
        self.order.follow()
        return copy

    def field(self, name: str) -> Any:
        """Return one field of the status as a 0-d array on the device."""
        return _field(self.record, name)

    def read(self) -> StepStatus:
        """Return the status after all queued work, for any current stream. Waits for the device."""
        return _status(self.order.read(self.record).view(RECORD)[0])


def device_decision(
    upload: Callable[[npt.NDArray[Any]], Any], plan: ClipPlan, components: int, order: StreamOrder
) -> DeviceDecision:
    """Return the decision that K2 writes for a plan. Before the first step nothing is clipped."""
    members, groups = [range(components), *plan.members, *plan.block_members], len(plan.max_norms)
    starts = np.cumsum([0, *map(len, members)], dtype=np.uint32)
    totals, component_norms = (upload(np.zeros(components)) for _ in range(2))
    counts, norms = upload(np.zeros(components, np.uint64)), upload(np.zeros(len(members)))
    scales, factors = upload(np.ones(groups)), upload(np.ones(groups, np.float32))
    record = upload(np.zeros(RECORD.itemsize, np.uint8))
    return DeviceDecision(
        norm=_field(record, "norm"),
        group_norms=_scalars(norms[1 : 1 + groups]),
        block_norms=norms[1 + groups :],
        component_norms=component_norms,
        scales=_scalars(scales),
        factors=_scalars(factors),
        inverse=_field(record, "inverse"),
        skipped=_field(record, "skipped"),
        bad=None,
        loss_scale=_field(record, "loss_scale"),
        spiked=_field(record, "spiked"),
        spike_bound=_field(record, "spike_bound"),
        order=order,
        segments=(
            upload(starts),
            upload(np.array([*itertools.chain(*members)] or [0], np.uint32)),
            np.uint32(len(members)),
            np.uint32(groups),
        ),
        written=(totals, counts, component_norms, norms, scales, factors, record),
        all_factors=factors,
        record=record,
    )


class StatusReadback:
    """The status of recent steps in pinned memory, copied after the work of a step and read after it has arrived."""

    # If the host is more steps ahead, a status is not sent. A later status still reports a bad step.
    SLOTS = 4

    def __init__(self, runtime: CudaRuntime, decision: DeviceDecision) -> None:
        self._runtime, self._decision = runtime, decision
        self._host = runtime.pinned(self.SLOTS, RECORD)
        self._events = [runtime.event() for _ in range(self.SLOTS)]
        self._under_way: list[int] = []
        self._newest: StepStatus | None = None
        # The memory returns to CuPy's pool after the copies in flight have written to it.
        weakref.finalize(self, runtime.kept.until, self._events, (decision, self._host)).atexit = False

    def send(self) -> None:
        """Queue the copy after all work queued on the current stream. Does nothing if no slot is free."""
        free = [slot for slot in range(self.SLOTS) if slot not in self._under_way]
        if not free:
            return
        with self._decision.order.use(), self._runtime.active():
            self._runtime.copy_from(self._decision.record, self._host[free[0] : free[0] + 1])
            self._runtime.current_stream().record(self._events[free[0]])
        self._under_way.append(free[0])

    def count_from(self, steps: int) -> None:
        """Set the device's count of steps, from which the next replay of a graph continues."""
        with self._decision.order.use():
            self._runtime.copied_into(self._decision.field("step"), np.array(steps, np.uint64))

    def restart(self) -> None:
        """Clear the status of every step so far, since later steps may have the same numbers. Waits for the device."""
        with self._decision.order.use():
            self._runtime.clear(self._decision.record.data.ptr, RECORD.itemsize)
        self.read()  # This waits for all copies in flight.
        self._under_way, self._newest = [], None

    def read(self) -> StepStatus:
        """Return the status on the device now. Waits for the device."""
        return self._decision.read()

    def newest(self) -> StepStatus | None:
        """Return the newest status that has arrived, or None, without waiting. Raises `DeviceFailed` if none can."""
        while self._under_way and self._runtime.events.is_done(self._events[self._under_way[0]]):
            self._newest = _status(self._host[self._under_way[0]])  # It is stored before its slot is free.
            del self._under_way[0]
        return self._newest


def _scalars(array: Any) -> tuple[Any, ...]:
    return tuple(array[index : index + 1].reshape(()) for index in range(array.size))


def _field(record: Any, name: str) -> Any:
    dtype, offset = RECORD.fields[name][:2]  # type: ignore[index]
    return record[offset : offset + dtype.itemsize].view(dtype).reshape(())


def _status(record: Any) -> StepStatus:
    found = StepStatus(*record.item())
    return found._replace(skipped=bool(found.skipped), spiked=bool(found.spiked))
