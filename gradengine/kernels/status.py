"""K2's results on the device: norms and factors as device arrays, and the status, which the host may read late.

Reading an array waits for the device. `StatusReadback` never waits: the status is copied to pinned memory after the
step's own work, and read once it has arrived.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.decision import ClipPlan, Decision, Scalar
from gradengine.kernels.streams import StreamOrder

_FIELDS = [
    ("norm", "<f8"),
    ("steps", "<u8"),
    ("bad_step", "<u8"),
    ("bad_steps", "<u8"),
    ("bad_component", "<i8"),
    ("bad_index", "<i8"),
    ("non_finite", "<u8"),
    ("bad_weight_step", "<u8"),
    ("bad_weights", "<u8"),
    ("bad_weight", "<f8"),
    ("bad_value", "<f4"),
    ("scale", "<f4"),
    ("factor", "<f4"),
    ("inverse", "<f4"),
    ("skipped", "<f4"),
    ("loss_scale", "<f4"),
]
RECORD = np.dtype(_FIELDS)  # struct StepStatus of finalise.cu


@dataclass(frozen=True)
class StepStatus:
    """The result of one step, on the host; the fields after `bad_step` are about that step."""

    step: int  # of this engine, counted by the device from 1 on
    norm: float  # of the averaged gradient, before clipping
    scale: float  # with several groups the smallest
    factor: float  # the sum was multiplied by it
    skipped: bool  # whether zeros were handed back
    bad_steps: int  # steps so far whose gradient was not finite
    bad_step: int  # the last of these steps, or 0
    bad_component: int  # position of the first component that was not finite
    bad_index: int  # its first such element; -1 if it was not searched for
    bad_value: float
    non_finite: int  # elements of the whole set
    bad_weight_step: int = 0  # the last step that had no divisor, so that zeros were handed back; or 0
    bad_weights: int = 0  # how many there were
    bad_weight: float = 0.0  # what the sum was to be divided by in that step, but for a dynamic loss scale
    loss_scale: float = 0.0  # of the step, where it is a dynamic one; else 0

    @property
    def is_bad(self) -> bool:
        """Whether this very step's gradient was not finite."""
        return self.bad_step == self.step


@dataclass(frozen=True)
class DeviceDecision(Decision):
    """A decision in device memory; each step overwrites its arrays."""

    memory: DecisionMemory

    @property
    def scale(self) -> Scalar:
        """The smallest clip scale, a 0-d array."""
        return self.memory.field("scale")

    @property
    def factor(self) -> Scalar:
        """The first group's factor, a 0-d array."""
        return self.memory.field("factor")

    def kept_norm(self) -> Scalar:
        """A copy on the device, to be read on the streams that are current now."""
        return self.memory.kept("norm")


class DecisionMemory:
    """The memory that K2 reads and writes besides the partial sums, allocated once for a plan."""

    def __init__(
        self, upload: Callable[[npt.NDArray[Any]], Any], plan: ClipPlan, components: int, order: StreamOrder
    ) -> None:
        self.order = order
        segments = [list(range(components)), *plan.members, *plan.block_members]
        self.groups, self.segments = len(plan.max_norms), len(segments)
        starts = np.cumsum([0, *(len(members) for members in segments)])
        self.segment_start = upload(starts.astype(np.uint32))
        self.segment_member = upload(np.array([m for members in segments for m in members] or [0], np.uint32))
        self.max_norms = upload(np.array(plan.max_norms, np.float64))
        self.totals = upload(np.zeros(components, np.float64))
        self.counts = upload(np.zeros(components, np.uint64))
        self.component_norms = upload(np.zeros(components, np.float64))
        self.norms = upload(np.zeros(self.segments, np.float64))
        self.scales = upload(np.ones(self.groups, np.float64))
        self.factors = upload(np.ones(self.groups, np.float32))
        self.record = upload(np.zeros(RECORD.itemsize, np.uint8))

    def field(self, name: str) -> Any:
        """One field of the status as a 0-d array on the device."""
        dtype, offset = RECORD.fields[name][:2]  # type: ignore[index]
        return self.record[offset : offset + dtype.itemsize].view(dtype).reshape(())

    def kept(self, name: str) -> Any:
        """One field in memory of its own, to be read on the streams that are current now."""
        with self.order.use():
            copy = self.order.runtime.copied(self.field(name))
        self.order.follow()
        return copy

    def decision(self) -> DeviceDecision:
        """The decision in this memory."""
        groups = range(self.groups)
        return DeviceDecision(
            norm=self.field("norm"),
            group_norms=tuple(_scalar(self.norms, 1 + g) for g in groups),
            block_norms=self.norms[1 + self.groups :],
            component_norms=self.component_norms,
            scales=tuple(_scalar(self.scales, g) for g in groups),
            factors=tuple(_scalar(self.factors, g) for g in groups),
            inverse=self.field("inverse"),
            skipped=self.field("skipped"),
            bad=None,
            loss_scale=self.field("loss_scale"),
            memory=self,
        )

    def read(self) -> StepStatus:
        """The status after all queued work, whatever stream is current: waits for the device."""
        return _status(self.order.read(self.record).view(RECORD)[0])


class StatusReadback:
    """The status of recent steps in pinned memory: copied after the work of a step, read once it has arrived."""

    SLOTS = 4  # steps that the host may run ahead before a status is not sent (a bad step is never lost)

    def __init__(self, runtime: CudaRuntime, memory: DecisionMemory) -> None:
        self._runtime, self._memory = runtime, memory
        self._host = runtime.pinned(self.SLOTS, RECORD)
        self._events = [runtime.event() for _ in range(self.SLOTS)]
        self._under_way: list[int] = []
        self._newest: StepStatus | None = None
        # The memory goes back to CuPy's pool, and to others, once the copies that are under way have written to it.
        weakref.finalize(self, runtime.kept.until, self._events, (memory, self._host)).atexit = False

    def send(self) -> None:
        """Queue the copy after all work queued on the current stream."""
        free = [slot for slot in range(self.SLOTS) if slot not in self._under_way]
        if not free:
            return
        with self._memory.order.use(), self._runtime.active():
            self._runtime.copy_from(self._memory.record, self._host[free[0] : free[0] + 1])
            self._runtime.current_stream().record(self._events[free[0]])
        self._under_way.append(free[0])

    def count_from(self, steps: int) -> None:
        """Set the device's count of steps, after which the next step of a graph, which counts itself, follows."""
        memory = self._memory
        with memory.order.use():
            self._runtime.copied_into(memory.field("steps"), np.array(steps, np.uint64))

    def restart(self) -> None:
        """Forget every step so far, and which of them were bad: the next ones may have their numbers; waits."""
        memory = self._memory
        with memory.order.use():
            self._runtime.clear(memory.record.data.ptr, RECORD.itemsize)
        memory.read()  # behind every copy that is under way
        self._under_way, self._newest = [], None

    def read(self) -> StepStatus:
        """The status on the device now: waits for it."""
        return self._memory.read()

    def newest(self) -> StepStatus | None:
        """The newest status that has arrived, or None. Never waits; raises `DeviceFailed` if none will ever arrive."""
        while self._under_way and self._runtime.events.is_done(self._events[self._under_way[0]]):
            self._newest = _status(self._host[self._under_way[0]])  # kept before its slot is free
            del self._under_way[0]
        return self._newest


def _scalar(array: Any, index: int) -> Any:
    return array[index : index + 1].reshape(())


def _status(record: Any) -> StepStatus:
    known = {field.name: record[field.name].item() for field in fields(StepStatus) if field.name != "step"}
    return StepStatus(step=int(record["steps"]), **{**known, "skipped": bool(known["skipped"])})
