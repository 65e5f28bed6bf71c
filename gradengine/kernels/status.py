"""K2's results on the device: norms and factors as device arrays, and the status, which the host may read late.

Reading an array waits for the device. `StatusReadback` never waits: the status is copied to pinned memory after the
step's own work, and read once it has arrived.
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
    """The result of one step, on the host, as struct StepStatus of finalise.cu; some fields are about `bad_step`."""

    norm: float  # of the averaged gradient, before clipping
    step: int  # of this engine, counted by the device from 1 on
    bad_step: int = 0  # the last step whose gradient was not finite, or 0
    bad_steps: int = 0  # how many there were
    bad_component: int = 0  # position of the first component that was not finite
    bad_index: int = 0  # its first such element; -1 if it was not searched for
    non_finite: int = 0  # elements of the whole set
    bad_weight_step: int = 0  # the last step that had no divisor, so that zeros were handed back; or 0
    bad_weights: int = 0  # how many there were
    bad_weight: float = 0.0  # what the sum was to be divided by in that step, but for a dynamic loss scale
    bad_value: float = 0.0
    scale: float = 1.0  # with several groups the smallest
    factor: float = 1.0  # the sum was multiplied by it
    inverse: float = 1.0  # 1 / factor
    skipped: bool = False  # whether zeros were handed back
    loss_scale: float = 0.0  # of the step, where it is a dynamic one; else 0
    spiked: bool = False  # whether the norm was a spike
    spike_bound: float = math.inf  # above which it would have been one

    @property
    def is_bad(self) -> bool:
        """Whether this very step's gradient was not finite."""
        return self.bad_step == self.step


_TYPES = ["<f8", *["<u8"] * 3, *["<i8"] * 2, *["<u8"] * 3, "<f8", *["<f4"] * 8]
RECORD = np.dtype(list(zip(StepStatus._fields, _TYPES, strict=True)))


@dataclass(frozen=True)
class DeviceDecision(Decision):
    """A decision in device memory, allocated once for a plan; each step overwrites its arrays."""

    order: StreamOrder  # of work on this memory
    segments: tuple[Any, ...]  # K2's arguments that say which components share a norm
    written: tuple[Any, ...]  # those that it writes
    all_factors: Any  # of the groups, in one array
    record: Any  # the status

    @property
    def scale(self) -> Scalar:
        """The smallest clip scale, a 0-d array."""
        return self.field("scale")

    @property
    def factor(self) -> Scalar:
        """The first group's factor, a 0-d array."""
        return self.field("factor")

    def kept_norm(self) -> Scalar:
        """A copy on the device, to be read on the streams that are current now."""
        with self.order.use():
            copy = self.order.runtime.copied(self.norm)
        self.order.follow()
        return copy

    def field(self, name: str) -> Any:
        """One field of the status as a 0-d array on the device."""
        return _field(self.record, name)

    def read(self) -> StepStatus:
        """The status after all queued work, whatever stream is current: waits for the device."""
        return _status(self.order.read(self.record).view(RECORD)[0])


def device_decision(
    upload: Callable[[npt.NDArray[Any]], Any], plan: ClipPlan, components: int, order: StreamOrder
) -> DeviceDecision:
    """The decision that K2 writes for a plan: before the first step nothing is clipped."""
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
    """The status of recent steps in pinned memory: copied after the work of a step, read once it has arrived."""

    SLOTS = 4  # steps that the host may run ahead before a status is not sent (a bad step is never lost)

    def __init__(self, runtime: CudaRuntime, decision: DeviceDecision) -> None:
        self._runtime, self._decision = runtime, decision
        self._host = runtime.pinned(self.SLOTS, RECORD)
        self._events = [runtime.event() for _ in range(self.SLOTS)]
        self._under_way: list[int] = []
        self._newest: StepStatus | None = None
        # The memory returns to CuPy's pool after the copies that are under way have written to it.
        weakref.finalize(self, runtime.kept.until, self._events, (decision, self._host)).atexit = False

    def send(self) -> None:
        """Queue the copy after all work queued on the current stream."""
        free = [slot for slot in range(self.SLOTS) if slot not in self._under_way]
        if not free:
            return
        with self._decision.order.use(), self._runtime.active():
            self._runtime.copy_from(self._decision.record, self._host[free[0] : free[0] + 1])
            self._runtime.current_stream().record(self._events[free[0]])
        self._under_way.append(free[0])

    def count_from(self, steps: int) -> None:
        """Set the device's count of steps, after which the next step of a graph, which counts itself, follows."""
        with self._decision.order.use():
            self._runtime.copied_into(self._decision.field("step"), np.array(steps, np.uint64))

    def restart(self) -> None:
        """Forget every step so far, and which of them were bad: the next ones may have their numbers; waits."""
        with self._decision.order.use():
            self._runtime.clear(self._decision.record.data.ptr, RECORD.itemsize)
        self.read()  # after every copy that is under way
        self._under_way, self._newest = [], None

    def read(self) -> StepStatus:
        """The status on the device now: waits for it."""
        return self._decision.read()

    def newest(self) -> StepStatus | None:
        """The newest status that has arrived, or None. Never waits; raises `DeviceFailed` if none will ever arrive."""
        while self._under_way and self._runtime.events.is_done(self._events[self._under_way[0]]):
            self._newest = _status(self._host[self._under_way[0]])  # kept before its slot is free
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
