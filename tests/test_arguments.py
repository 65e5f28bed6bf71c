"""Numbers, words and objects as callers give them: whatever they are, what comes out is taken or is our own error."""

import decimal
import fractions
import functools
import math
from collections.abc import Hashable, Mapping
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hostile_values import ENDLESS, HOSTILE, Unshowable, refusal_of

from gradengine import (
    Bandwidth,
    BlockGradientSet,
    ColumnParallelShard,
    DistributedTrainer,
    FusedClipState,
    GpuGradientAccumulator,
    GradientEngine,
    GradientLayout,
    GradientServer,
    PerBlockGradientAccumulator,
    RawBuffer,
    RowParallelShard,
    TensorParallelConfig,
    TensorParallelCost,
    WorkerClient,
    clip_by_global_norm,
    clip_gradients_fused,
    clip_lora_gradients_fused,
    connect,
    init_lora_fused_clip,
    local_group,
    shard_batches,
)
from gradengine.arguments import (
    as_float,
    as_index,
    as_number,
    checked_rank,
    listed,
    said,
    truth_value,
    whole_number,
)
from gradengine.elementwise import add, cast, fill, scale
from gradengine.errors import CallerError, LayoutMismatch
from gradengine.exchange import Progress
from gradengine.kernels import HostKernels
from gradengine.layout import layout_from_table
from gradengine.layout.slots import Row
from gradengine.trainer import weights_digest

LAYOUT = GradientLayout.of({"layers.0.w": (3,), "head": (2,)})
NUMBERS = [3, 2.5, np.float32(2.5), np.float16(3), np.int64(3), np.uint8(3), np.array(2.5), fractions.Fraction(1, 3)]
NO_NUMBERS = [
    "3",
    b"3",
    None,
    True,
    np.bool_(1),
    1j,
    np.complex64(1),
    [1],
    (1,),
    {},
    {1},
    object(),
    np.array([1.0, 2.0]),
]
NO_NUMBERS += [np.array("3"), np.str_("3"), bytearray(b"3"), memoryview(b"3"), np.datetime64(3, "s"), len, 10**400]


class TestWholeNumber:
    @pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), np.array(2)])
    def test_integers_of_any_kind_are_plain_ones(self, value):
        assert type(whole_number("hold", value, 1)) is int
        assert as_index(value) == 2

    @pytest.mark.parametrize("value", [0, -1, 2.0, np.float64(2), math.nan, *NO_NUMBERS[:-1]])
    def test_refused(self, value):
        with pytest.raises(CallerError, match=r"hold is (out|not) .*: got .*, expected a whole number >= 1"):
            whole_number("hold", value, 1)

    @pytest.mark.parametrize("value", [0, 9, 2**63])
    def test_beyond_the_most(self, value):
        with pytest.raises(CallerError, match=rf"blocks is out of range: got {value}, expected .* in 1\.\.8"):
            whole_number("blocks", value, 1, 8)

    def test_with_the_error_that_is_asked_for(self):
        with pytest.raises(LayoutMismatch):
            whole_number("num_blocks", -1, 0, kind=LayoutMismatch)


@pytest.mark.parametrize("value", [True, False, np.bool_(1)])
def test_a_truth_value_is_a_plain_bool(value):
    assert truth_value("deferred", value) is bool(value)


@pytest.mark.parametrize("value", ["no", "", 0, 1, None, [], np.array(True), np.int8(1)])
def test_what_merely_counts_as_true_or_false_is_refused(value):
    with pytest.raises(CallerError, match=r"^deferred is not a bool: got .*, expected True or False"):
        truth_value("deferred", value)


class Index:
    """An integer by its __index__ alone: nothing else of it can be compared or counted with."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_what_is_an_integer_by_its_index_is_used_as_one():
    layout = GradientLayout.of([(3,)], tp_rank=Index(1), tp_size=Index(2), partitions={"0": "row"})
    assert (layout.tp_rank, layout.tp_size) == (1, 2)
    assert GradientLayout.transformer(Index(2), 4, 4, 4, 4).num_elements
    held = GradientEngine(LAYOUT, hold=Index(2), micro_batches=Index(3))
    for _ in range(3):
        held.add(gradients())
    assert held.step().micro_batches == 3
    assert DistributedTrainer(trainer(), None, LAYOUT, hold=Index(2), check_every=Index(0)).engine.accumulator.hold == 2
    for exchange in local_group(Index(1), bucket_bytes=Index(8)):
        exchange.close()


class TestCheckedRank:
    @pytest.mark.parametrize(("rank", "size"), [(-1, 1), (1, 1), (0, 0), (0, -1), (0, 65537)])
    def test_refused(self, rank, size):
        with pytest.raises(CallerError, match="out of range"):
            checked_rank(rank, size)

    def test_integers_of_any_kind(self):
        assert [type(number) for number in checked_rank(np.int64(1), np.uint8(3))] == [int, int]


class TestNumber:
    @pytest.mark.parametrize("value", [*NUMBERS, decimal.Decimal("0.1"), ml_dtypes.bfloat16(3)])
    def test_numbers_of_any_kind_are_floats(self, value):
        assert type(as_number(value)) is float
        assert as_float(value) == float(value)

    @pytest.mark.parametrize("value", NO_NUMBERS)
    def test_what_is_none(self, value):
        assert as_number(value) is None
        assert math.isnan(as_float(value))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, np.float32(np.inf)])
    def test_what_is_no_finite_number_is_one_all_the_same(self, value):
        assert str(as_number(value)) == str(float(value))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\n", r"'a\n'"),
        (np.float32(2), np.float32(2)),
        (None, "None"),
        ([1], "list"),
        (np.zeros(9), "ndarray"),
        (len, "builtin_function_or_method"),
    ],
)
def test_what_an_error_says_that_it_got(value, shown):
    assert said(value) == shown


@pytest.mark.parametrize("values", ["ab", b"ab", 5, None, np.array(2.0)])
def test_what_is_no_sequence(values):
    with pytest.raises(CallerError, match=r"sizes is not a sequence: got .*, expected a list"):
        listed("sizes", values)


@pytest.mark.parametrize("values", ENDLESS[:3], ids=["range", "count", "repeat"])
def test_what_does_not_end_is_no_list(values):
    with pytest.raises(CallerError, match=r"sizes is too long: got more than 1048576 items, expected at most 1048576"):
        listed("sizes", values)


@pytest.mark.parametrize(
    "shown", [Unshowable(), type("Number", (int,), {"__repr__": Unshowable.__repr__})(3)], ids=["error", "number"]
)
def test_what_cannot_be_shown_is_named_by_its_kind(shown):
    assert said(shown) == type(shown).__name__
    assert type(shown).__name__ in str(CallerError("what", got=shown))


def engine(**options):
    return GradientEngine(LAYOUT, **options)


def trainer():
    return SimpleNamespace(
        forward_backward=lambda batch: (0.0, {}), apply_gradients=lambda gradients: None, weights=dict
    )


def trained(micro_batches=(0,), **methods):
    """One step of a trainer that has these methods."""
    local = trainer()
    local.forward_backward = lambda batch: (0.0, gradients())
    vars(local).update(methods)
    return DistributedTrainer(local, None, LAYOUT, micro_batches=1).train_batch(micro_batches)


def raw(**options):
    """A gradient that is given by its address."""
    memory = floats()
    given = {"pointer": memory.ctypes.data, "size": 3, "dtype": "float32", "owner": memory} | options
    engine().add([RawBuffer(**given), floats(2)])


def gradients(value=1.0):
    return [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots]


def stepped(**options):
    built = engine()
    built.add(gradients())
    return built.step(**options)


def closing(make):
    def call(value):
        made = make(value)
        for one in made if isinstance(made, list) else [made]:
            one.close()

    return call


def bound(layout=LAYOUT, arena=np.zeros(LAYOUT.arena_size, np.float32)):  # noqa: B008  (nobody writes to it)
    (exchange,) = local_group(1)
    exchange.bind(layout, arena, Progress())
    return exchange


def floats(size=3):
    return np.ones(size, np.float32)


CALLS = {
    "GradientEngine(layout)": GradientEngine,
    "GradientEngine(device)": lambda v: GradientEngine(LAYOUT, v),
    **{
        f"GradientEngine({name})": functools.partial(lambda name, v: engine(**{name: v}), name)
        for name in (
            *("max_norm", "exchange", "on_non_finite", "micro_batches", "hold", "average", "loss_scale"),
            *("tp_exchange", "replicated", "copy_strided"),
        )
    },
    "GradientEngine(groups)": lambda v: (
        None if callable(v) else engine(groups=v)
    ),  # a function's own errors are its own
    "engine.add(gradients)": lambda v: engine().add(v),
    "engine.add([gradient])": lambda v: engine().add([v, v]),
    "engine.add(weight)": lambda v: engine().add(gradients(), v),
    "engine.add_block(index)": lambda v: engine().add_block(v, [floats()]),
    "engine.add_block(weight)": lambda v: engine().add_block(0, [floats()], v),
    "engine.add_non_block(name)": lambda v: engine().add_non_block(v, floats(2)),
    "engine.add_block(gradients)": lambda v: engine().add_block(0, v),
    "engine.add_block(last)": lambda v: engine().add_block(0, [floats()], last=v),
    "engine.add_non_block(gradient)": lambda v: engine().add_non_block("head", v),
    "engine.add_non_block(last)": lambda v: engine().add_non_block("head", floats(2), last=v),
    "engine.micro_batch(weight)": lambda v: engine().micro_batch(v),
    "engine.micro_batch(last)": lambda v: engine().micro_batch(last=v),
    "micro_batch.add(name)": lambda v: engine().micro_batch().add(v, floats(2)),
    "micro_batch.add(gradient)": lambda v: engine().micro_batch().add("head", v),
    "engine.step(loss_scale)": lambda v: stepped(loss_scale=v),
    "engine.step(deferred)": lambda v: stepped(deferred=v),
    "RawBuffer(pointer)": lambda v: raw(pointer=v) if v is None or type(v) is str else None,
    **{
        f"RawBuffer({name})": functools.partial(lambda name, v: raw(**{name: v}), name)
        for name in ("dtype", "device", "owner", "writable", "stream")
    },
    "engine.step(out)": lambda v: stepped(out=v),
    "engine.step(out=[one])": lambda v: stepped(out=[v, None]),
    "engine.loss_scale": lambda v: setattr(engine(), "loss_scale", v),
    "engine.reconnect(exchange)": lambda v: engine().reconnect(v),
    "engine.reconnect(tp_exchange)": lambda v: engine().reconnect(tp_exchange=v),
    "PerBlockGradientAccumulator(layout)": PerBlockGradientAccumulator,
    "PerBlockGradientAccumulator(kernels)": lambda v: PerBlockGradientAccumulator(LAYOUT, v),
    "PerBlockGradientAccumulator(hold)": lambda v: PerBlockGradientAccumulator(LAYOUT, hold=v),
    "PerBlockGradientAccumulator(copy_strided)": lambda v: PerBlockGradientAccumulator(LAYOUT, copy_strided=v),
    "accumulator.add(measure)": lambda v: PerBlockGradientAccumulator(LAYOUT).add(gradients(), measure=v),
    "accumulator.block": lambda v: PerBlockGradientAccumulator(LAYOUT).block(v),
    "GpuGradientAccumulator(layout)": lambda v: GpuGradientAccumulator(v, "cpu"),
    "GpuGradientAccumulator(device)": lambda v: GpuGradientAccumulator(LAYOUT, v),
    "GpuGradientAccumulator.memory_needed": GpuGradientAccumulator.memory_needed,
    "BlockGradientSet(block)": BlockGradientSet,
    "BlockGradientSet(kernels)": lambda v: BlockGradientSet(LAYOUT.blocks[0], v),
    "block.scale": lambda v: BlockGradientSet(LAYOUT.blocks[0]).scale(v),
    "block.accumulate": lambda v: BlockGradientSet(LAYOUT.blocks[0]).accumulate(v),
    "block.from_flat": lambda v: BlockGradientSet(LAYOUT.blocks[0]).from_flat(v),
    "FusedClipState(sizes)": FusedClipState,
    "FusedClipState([size])": lambda v: FusedClipState([v]),
    "FusedClipState(device)": lambda v: FusedClipState([3], v),
    "clip_gradients_fused(buffers)": lambda v: clip_gradients_fused(v, 1.0, FusedClipState([3])),
    "clip_gradients_fused([buffer])": lambda v: clip_gradients_fused([v], 1.0, FusedClipState([3])),
    "clip_gradients_fused(max_norm)": lambda v: clip_gradients_fused([floats()], v, FusedClipState([3])),
    "clip_gradients_fused(state)": lambda v: clip_gradients_fused([floats()], 1.0, v),
    "clip_gradients_fused(stream)": lambda v: clip_gradients_fused([floats()], 1.0, FusedClipState([3]), v),
    "clip_by_global_norm(arrays)": lambda v: clip_by_global_norm(v, 1.0),
    "clip_by_global_norm([array])": lambda v: clip_by_global_norm([v], 1.0),
    "clip_by_global_norm(max_norm)": lambda v: clip_by_global_norm([floats()], v),
    "init_lora_fused_clip(workspace)": init_lora_fused_clip,
    "init_lora_fused_clip({buffer})": lambda v: init_lora_fused_clip({"lora_a_q": v}),
    "init_lora_fused_clip(device)": lambda v: init_lora_fused_clip({"lora_a_q": floats()}, v),
    "clip_lora_gradients_fused(workspace)": lambda v: clip_lora_gradients_fused(v, 1.0, FusedClipState([3])),
    "clip_lora_gradients_fused(state)": lambda v: clip_lora_gradients_fused({"lora_a_q": floats()}, 1.0, v),
    "GradientLayout.of": GradientLayout.of,
    "GradientLayout.of([shape])": lambda v: GradientLayout.of([v]),
    "GradientLayout.of([(dimension,)])": lambda v: GradientLayout.of([(v,)]),
    "GradientLayout.of(tp_rank)": lambda v: GradientLayout.of([(3,)], tp_rank=v, tp_size=2, partitions={"0": "row"}),
    "GradientLayout.of(tp_size)": lambda v: GradientLayout.of([(3,)], tp_size=v, partitions={"0": "row"}),
    "GradientLayout.of(partitions)": lambda v: GradientLayout.of([(3,)], tp_size=2, partitions=v),
    "GradientLayout.of({partition})": lambda v: GradientLayout.of([(3,)], tp_size=2, partitions={"0": v}),
    "GradientLayout.lora(num_blocks)": lambda v: GradientLayout.lora(v, 4, 4, 2),
    "GradientLayout.lora(rank)": lambda v: GradientLayout.lora(1, 4, 4, v),
    "GradientLayout.transformer(hidden)": lambda v: GradientLayout.transformer(1, v, 4, 4, 4),
    "GradientLayout.of({name: shape})": lambda v: (
        GradientLayout.of({v: (2,)}).table() if isinstance(v, Hashable) else None
    ),
    "GradientLayout.transformer(embedding)": lambda v: GradientLayout.transformer(1, 4, 4, 4, 4, embedding=v),
    "GradientLayout.transformer(tensor_parallel)": lambda v: GradientLayout.transformer(
        1, 4, 4, 4, 4, tensor_parallel=v
    ),
    "layout.slot": LAYOUT.slot,
    "layout.block": LAYOUT.block,
    "exchange.bind(layout)": lambda v: bound(layout=v),
    "exchange.bind(arena)": lambda v: bound(arena=v),
    "exchange.start(span)": lambda v: bound().start(v),
    "exchange.gather(data)": lambda v: bound().gather(v),
    "GradientLayout(rows)": GradientLayout,
    "GradientLayout(backward_order)": lambda v: GradientLayout([Row("w", (2,), None)], v),
    "layout_from_table": layout_from_table,
    "local_group(world_size)": closing(local_group),
    "local_group(timeout)": closing(lambda v: local_group(2, timeout=v)),
    "local_group(join_timeout)": closing(lambda v: local_group(2, join_timeout=v)),
    "local_group(bucket_bytes)": closing(lambda v: local_group(2, bucket_bytes=v)),
    "shard_batches(num_batches)": lambda v: shard_batches(v, 0, 2),
    "shard_batches(rank)": lambda v: shard_batches(7, v, 3),
    "shard_batches(world_size)": lambda v: shard_batches(7, 0, v),
    "DistributedTrainer(trainer)": lambda v: DistributedTrainer(v, None, LAYOUT),
    "DistributedTrainer(exchange)": lambda v: DistributedTrainer(trainer(), v, LAYOUT),
    "DistributedTrainer(layout)": lambda v: DistributedTrainer(trainer(), None, v),
    "DistributedTrainer(max_steps)": lambda v: DistributedTrainer(trainer(), None, LAYOUT, max_steps=v),
    "DistributedTrainer(check_every)": lambda v: DistributedTrainer(trainer(), None, LAYOUT, check_every=v),
    "trainer.train_batch(micro_batches)": lambda v: None if isinstance(v, (range, Mapping)) else trained(v),
    "trainer.forward_backward()": lambda v: trained(forward_backward=lambda batch: v),
    "trainer.forward_backward() loss": lambda v: trained(forward_backward=lambda batch: (v, gradients())),
    "trainer.forward_backward() gradients": lambda v: trained(forward_backward=lambda batch: (0.0, v)),
    "trainer.stream_backward()": lambda v: trained(stream_backward=lambda batch: v),
    "trainer.stream_backward() stream": lambda v: trained(stream_backward=lambda batch: (0.0, v)),
    "trainer.stream_backward() part": lambda v: trained(stream_backward=lambda batch: (0.0, [v])),
    "trainer.stream_backward() key": lambda v: trained(stream_backward=lambda batch: (0.0, [(v, [floats()])])),
    "trainer.weight()": lambda v: trained(weight=lambda batch: v),
    "weights_digest": weights_digest,
    "weights_digest([array])": lambda v: weights_digest([v]),
    "TensorParallelConfig(tp_rank)": lambda v: TensorParallelConfig(v, 2, 8, 8, 4, 2),
    "TensorParallelConfig(tp_size)": lambda v: TensorParallelConfig(0, v, 8, 8, 4, 2),
    "TensorParallelConfig(hidden_size)": lambda v: TensorParallelConfig(0, 2, v, 8, 4, 2),
    "TensorParallelConfig(num_heads)": lambda v: TensorParallelConfig(0, 2, 8, 8, v, 2),
    "TensorParallelConfig(num_kv_heads)": lambda v: TensorParallelConfig(0, 2, 8, 8, 4, v),
    "TensorParallelConfig(vocab_parallel)": lambda v: TensorParallelConfig(0, 2, 8, 8, 4, 2, vocab_parallel=v),
    "config.shard_of(name)": lambda v: TensorParallelConfig(0, 2, 8, 8, 4, 2).shard_of(v, (8, 8)),
    "config.shard_of(shape)": lambda v: TensorParallelConfig(0, 2, 8, 8, 4, 2).shard_of("w_q", v),
    "config.weight_memory_fraction": lambda v: TensorParallelConfig(0, 2, 8, 8, 4, 2).weight_memory_fraction(v),
    "config.weight_memory_fraction(embedding)": lambda v: TensorParallelConfig(0, 2, 8, 8, 4, 2).weight_memory_fraction(
        1, 8, embedding=v
    ),
    "ColumnParallelShard(rows)": lambda v: ColumnParallelShard(v, 4, 0, 2),
    "RowParallelShard(tp_rank)": lambda v: RowParallelShard(4, 4, v, 2),
    "shard.extract_shard": lambda v: RowParallelShard(4, 4, 0, 2).extract_shard(v),
    "shard.extract_shard(copy)": lambda v: RowParallelShard(4, 4, 0, 2).extract_shard(np.ones((4, 4)), copy=v),
    "shard.merge_shards(out)": lambda v: RowParallelShard(4, 4, 0, 2).merge_shards([np.ones((2, 4))] * 2, v),
    "shard.merge_shards": lambda v: RowParallelShard(4, 4, 0, 2).merge_shards(v),
    "TensorParallelCost(hidden_size)": lambda v: TensorParallelCost(v, 2, 4, 2),
    "TensorParallelCost(tp_size)": lambda v: TensorParallelCost(4, 2, 4, v).seconds_per_step(Bandwidth.gigabits(1)),
    "TensorParallelCost(vocab_parallel)": lambda v: TensorParallelCost(4, 2, 4, 2, vocab_parallel=v),
    "cost.seconds_per_step(bandwidth)": lambda v: TensorParallelCost(4, 2, 4, 2).seconds_per_step(v),
    "cost.seconds_per_step(latency)": lambda v: TensorParallelCost(4, 2, 4, 2).seconds_per_step(
        Bandwidth.gigabits(1), latency_seconds=v
    ),
    "Bandwidth": Bandwidth,
    "Bandwidth.gigabits": Bandwidth.gigabits,
    "Bandwidth.parse": Bandwidth.parse,
    "add(target)": lambda v: add(v, floats()),
    "add(source)": lambda v: add(floats(), v),
    "add(weight)": lambda v: add(floats(), floats(), v),
    "add(device)": lambda v: add(floats(), floats(), device=v),
    "scale(buffer)": lambda v: scale(v, 2.0),
    "scale(factor)": lambda v: scale(floats(), v),
    "scale(stream)": lambda v: scale(floats(), 2.0, stream=v),
    "fill(value)": lambda v: fill(floats(), v),
    "cast(destination)": lambda v: cast(floats(), v),
    "HostKernels(threads)": HostKernels,
    "connect(url)": closing(lambda v: connect(v, 0, 1)),
    "connect(rank)": closing(lambda v: connect("tcp://127.0.0.1:0", v, 3)),
    "connect(world_size)": closing(lambda v: connect("tcp://127.0.0.1:0", 0, v)),
    **{
        f"connect({name})": closing(
            functools.partial(lambda name, v: connect("tcp://127.0.0.1:0", 0, 1, **{name: v}), name)
        )
        for name in ("job", "join_timeout", "bucket_bytes")
    },
    "connect(served)": closing(lambda v: connect("tcp://127.0.0.1:1", 0, 1, served=v)),
    "connect(host)": closing(lambda v: connect(f"tcp://{v}:0" if type(v) is str else v, 0, 1)),
    "connect(token)": closing(lambda v: connect("tcp://127.0.0.1:0", 0, 1, token=v)),
    "connect(timeout)": closing(lambda v: connect("tcp://127.0.0.1:0", 0, 1, timeout=v)),
    "GradientServer(world_size)": closing(GradientServer),
    "GradientServer(address)": closing(lambda v: GradientServer(1, v)),
    "GradientServer(token)": closing(lambda v: GradientServer(1, token=v)),
    "GradientServer(host)": closing(lambda v: GradientServer(1, (v, 0))),
    "GradientServer(port)": closing(lambda v: GradientServer(1, ("127.0.0.1", v))),
    "GradientServer(job)": closing(lambda v: GradientServer(1, job=v)),
    "GradientServer(join_timeout)": closing(lambda v: GradientServer(1, join_timeout=v)),
    "GradientServer(bucket_bytes)": closing(lambda v: GradientServer(1, bucket_bytes=v)),
    "GradientServer(max_arena_bytes)": closing(lambda v: GradientServer(1, max_arena_bytes=v)),
    "WorkerClient(address)": closing(lambda v: WorkerClient(v, 0, 1)),
    "WorkerClient(rank)": closing(lambda v: WorkerClient(("127.0.0.1", 1), v, 3)),
    "WorkerClient(host)": closing(
        lambda v: WorkerClient((v, 1), 0, 1, join_timeout=0.01).bind(
            LAYOUT, np.zeros(LAYOUT.arena_size, np.float32), Progress()
        )
    ),
    "WorkerClient(token)": closing(lambda v: WorkerClient(("127.0.0.1", 1), 0, 1, token=v)),
    "WorkerClient(join_timeout)": closing(lambda v: WorkerClient(("127.0.0.1", 1), 0, 1, join_timeout=v)),
}


@pytest.mark.parametrize("name", CALLS)
def test_whatever_a_call_is_given_it_is_taken_or_refused_by_an_error_of_ours(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # text may be the path of a socket
    refusals = [refusal_of(functools.partial(CALLS[name], value)) for value in HOSTILE]
    assert max(map(len, refusals)) < 1500
