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
from hostile_values import HOSTILE, refusal_of

import gradengine as ge
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
from gradengine.engine.trainer import weights_digest
from gradengine.errors import CallerError, LayoutMismatch
from gradengine.kernels import HostKernels
from gradengine.layout import layout_from_table

LAYOUT = ge.GradientLayout.of({"layers.0.w": (3,), "head": (2,)})
LONG_NAMES = ge.GradientLayout.of({f"layers.{i}.{'c' * 200}": (2,) for i in range(60)})
NUMBERS = [3, 2.5, np.float32(2.5), np.float16(3), np.int64(3), np.uint8(3), np.array(2.5), fractions.Fraction(1, 3)]
NUMBERS += [decimal.Decimal("0.1"), ml_dtypes.bfloat16(3), math.inf, -math.inf, -0.0, np.float32(np.inf)]
NO_NUMBERS = ["3", b"3", None, True, np.bool_(1), 1j, np.complex64(1), [1], {}, object(), np.array([1.0, 2.0]), 10**400]
NO_NUMBERS += [np.array("3"), np.str_("3"), bytearray(b"3"), memoryview(b"3"), np.datetime64(3, "s"), len]


# ---- what is taken and what is not ----


def test_integers_and_numbers_of_any_kind_are_plain_ones():
    for value in (2, np.int64(2), np.uint8(2), np.array(2)):
        assert (type(whole_number("hold", value, 1)), as_index(value)) == (int, 2)
    for value in NUMBERS:
        assert type(as_number(value)) is float
        assert str(as_float(value)) == str(float(value))
    assert math.isnan(as_number(math.nan))
    assert [type(number) for number in checked_rank(np.int64(1), np.uint8(3))] == [int, int]
    assert [truth_value("deferred", value) for value in (True, False, np.bool_(1))] == [True, False, True]


def test_what_is_no_number_is_none():
    for value in NO_NUMBERS:
        assert as_number(value) is None
        assert math.isnan(as_float(value))


REFUSED = [
    *((whole_number, ("hold", value, 1)) for value in (0, -1, 2.0, np.float64(2), math.nan, *NO_NUMBERS)),
    *((whole_number, ("hold", value, 1, 8)) for value in (0, 9, 2**63)),
    *((checked_rank, each) for each in ((-1, 1), (1, 1), (0, 0), (0, -1), (0, 65537))),
    *((truth_value, ("hold", value)) for value in ("no", "", 0, 1, None, [], np.array(True), np.int8(1))),
    *((listed, ("hold", values)) for values in ("ab", b"ab", 5, None, np.array(2.0))),
]


def test_what_is_refused_is_named_with_what_it_was_and_what_is_expected():
    for call, arguments in REFUSED:
        with pytest.raises(CallerError, match=r"hold|rank|world_size") as refusal:
            call(*arguments)
        assert None not in (refusal.value.got, refusal.value.expected)
    with pytest.raises(LayoutMismatch):
        whole_number("num_blocks", -1, 0, kind=LayoutMismatch)


SAID = [("a\n", r"'a\n'"), (np.float32(2), np.float32(2)), (None, "None"), ([1], "list"), (np.zeros(9), "ndarray")]
SAID += [((2, "a"), "(2, 'a')"), ((1,), "(1,)"), (10**5000, "an integer of 16610 bits")]


def test_what_an_error_says_that_it_got():
    for value, shown in SAID:
        assert said(value) == shown


class Index:
    """An integer by its __index__ alone: nothing else of it can be compared or counted with."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_what_is_an_integer_by_its_index_is_used_as_one():
    layout = ge.GradientLayout.of([(3,)], tp_rank=Index(1), tp_size=Index(2), partitions={"0": "row"})
    assert (layout.tp_rank, layout.tp_size) == (1, 2)
    assert ge.GradientLayout.transformer(Index(2), 4, 4, 4, 4).num_elements
    held = ge.GradientEngine(LAYOUT, hold=Index(2), micro_batches=Index(3))
    for _ in range(3):
        held.add(gradients())
    assert held.step().micro_batches == 3
    distributed = ge.DistributedTrainer(trainer(), None, LAYOUT, hold=Index(2), check_every=Index(0))
    assert distributed.engine.accumulator.hold == 2
    for exchange in ge.local_group(Index(1), bucket_bytes=Index(8)):
        exchange.close()


# ---- whatever a call is given ----


def trainer():
    return SimpleNamespace(
        forward_backward=lambda batch: (0.0, {}), apply_gradients=lambda gradients: None, weights=dict
    )


def trained(micro_batches=(0,), **methods):
    """One step of a trainer that has these methods."""
    local = trainer()
    local.forward_backward = lambda batch: (0.0, gradients())
    vars(local).update(methods)
    return ge.DistributedTrainer(local, None, LAYOUT, micro_batches=1).train_batch(micro_batches)


def raw(**options):
    """A gradient that is given by its address."""
    memory = floats()
    given = {"pointer": memory.ctypes.data, "size": 3, "dtype": "float32", "owner": memory} | options
    engine().add([ge.RawBuffer(**given), floats(2)])


def floats(size=3):
    return np.ones(size, np.float32)


def gradients():
    return [floats(slot.size) for slot in LAYOUT.slots]


def engine(**options):
    return ge.GradientEngine(LAYOUT, **options)


def of_an_engine(method):
    def call(*arguments, **options):
        return getattr(engine(), method)(*arguments, **options)

    return call


def stepped(**options):
    built = engine()
    built.add(gradients())
    return built.step(**options)


def bound():
    (exchange,) = ge.local_group(1)
    exchange.bind(LAYOUT, floats(LAYOUT.arena_size))
    return exchange


def closing(make):
    def call(*arguments, **options):
        made = make(*arguments, **options)
        for one in made if isinstance(made, list) else [made]:
            one.close()

    return call


def reached(host):
    ge.connect(f"tcp://{host}:1" if type(host) is str else host, 0, 1, served=True, join_timeout=0.01).bind(
        LAYOUT, floats(LAYOUT.arena_size)
    )


FREE = "tcp://127.0.0.1:0"
CONFIG = ge.TensorParallelConfig(0, 2, 8, 8, 4, 2)
SHARD, STATE = ge.RowParallelShard(4, 4, 0, 2), functools.partial(ge.FusedClipState, [3])
GIGABIT, COST = ge.Bandwidth.gigabits(1), ge.TensorParallelCost(4, 2, 4, 2)
PARTS = {"tp_size": 2, "partitions": {"0": "row"}}
BLOCK = ge.BlockGradientSet(LAYOUT.blocks[0])

# A call, arguments that it takes, and which of them are replaced in turn: numbers are positions.
VARIED = {
    "GradientEngine": (
        ge.GradientEngine, [LAYOUT, "cpu"], {},
        "0 1 max_norm exchange on_non_finite micro_batches hold average loss_scale tp_exchange measure_noise",
    ),
    "engine.add": (of_an_engine("add"), [gradients(), 1.0], {}, "0 1"),
    "engine.add_block": (of_an_engine("add_block"), [0, [floats()], 1.0], {}, "0 1 2 last"),
    "engine.add_non_block": (of_an_engine("add_non_block"), ["head", floats(2)], {}, "0 1 last"),
    "engine.micro_batch": (of_an_engine("micro_batch"), [1.0], {}, "0 last"),
    "micro_batch.add": (lambda *given: engine().micro_batch().add(*given), ["head", floats(2)], {}, "0 1"),
    "engine.step": (stepped, [], {}, "loss_scale deferred out"),
    "engine.reconnect": (of_an_engine("reconnect"), [None], {}, "0 tp_exchange"),
    "RawBuffer": (raw, [], {}, "dtype device owner writable stream"),
    "PerBlockGradientAccumulator": (ge.PerBlockGradientAccumulator, [LAYOUT, None], {}, "0 1 hold"),
    "BlockGradientSet": (ge.BlockGradientSet, [LAYOUT.blocks[0], None], {}, "0 1"),
    "FusedClipState": (ge.FusedClipState, [[3], "cpu"], {}, "0 1"),
    "clip_gradients_fused": (ge.clip_gradients_fused, [[floats()], 1.0, STATE(), None], {}, "0 1 2 3"),
    "clip_by_global_norm": (ge.clip_by_global_norm, [[floats()], 1.0], {}, "0 1"),
    "init_lora_fused_clip": (ge.init_lora_fused_clip, [{"lora_a_q": floats()}, "cpu"], {}, "0 1"),
    "clip_lora_gradients_fused": (ge.clip_lora_gradients_fused, [{"lora_a_q": floats()}, 1.0, STATE()], {}, "0 2"),
    "GradientLayout.of": (ge.GradientLayout.of, [[(3,)]], PARTS, "0 tp_rank tp_size partitions"),
    "GradientLayout.lora": (ge.GradientLayout.lora, [1, 4, 4, 2], {}, "0 3"),
    "GradientLayout.transformer": (ge.GradientLayout.transformer, [1, 4, 4, 4, 4], {}, "1 embedding tensor_parallel"),
    "local_group": (closing(ge.local_group), [2], {}, "0 timeout join_timeout bucket_bytes"),
    "shard_batches": (ge.shard_batches, [7, 0, 3], {}, "0 1 2"),
    "DistributedTrainer": (ge.DistributedTrainer, [trainer(), None, LAYOUT], {}, "0 1 2 max_steps check_every"),
    "TensorParallelConfig": (ge.TensorParallelConfig, [0, 2, 8, 8, 4, 2], {}, "0 1 2 4 5 vocab_parallel"),
    "config.shard_of": (CONFIG.shard_of, ["w_q", (8, 8)], {}, "0 1"),
    "config.weight_memory_fraction": (CONFIG.weight_memory_fraction, [1, 8], {}, "0 embedding"),
    "ColumnParallelShard": (ge.ColumnParallelShard, [4, 4, 0, 2], {}, "0"),
    "RowParallelShard": (ge.RowParallelShard, [4, 4, 0, 2], {}, "2"),
    "shard.extract_shard": (SHARD.extract_shard, [np.ones((4, 4))], {}, "0 copy"),
    "shard.merge_shards": (SHARD.merge_shards, [[np.ones((2, 4))] * 2, None], {}, "0 1"),
    "TensorParallelCost": (ge.TensorParallelCost, [4, 2, 4, 2], {}, "0 vocab_parallel"),
    "cost.seconds_per_step": (COST.seconds_per_step, [GIGABIT], {}, "0 latency_seconds"),
    "add": (add, [floats(), floats(), 1.0], {}, "0 1 2 device"),
    "scale": (scale, [floats(), 2.0], {}, "0 1 stream"),
    "connect": (closing(ge.connect), [FREE, 0, 1], {}, "0 1 2 job join_timeout bucket_bytes secret timeout"),
    "GradientServer": (
        closing(ge.GradientServer), [1], {}, "0 1 secret job join_timeout bucket_bytes max_arena_bytes",
    ),
}  # fmt: skip


def varied():
    for label, (call, arguments, options, which) in VARIED.items():
        for name in which.split():

            def given(value, call=call, arguments=arguments, options=options, name=name):
                if name.isdigit():
                    call(*arguments[: int(name)], value, *arguments[int(name) + 1 :], **options)
                else:
                    call(*arguments, **options | {name: value})

            yield f"{label}({name})", given


CALLS = dict(varied()) | {
    "GradientEngine(groups)": lambda v: None if callable(v) else engine(groups=v),  # a function's errors are its own
    "engine.add([gradient])": lambda v: engine().add([v, v]),
    "engine.step(out=[one])": lambda v: stepped(out=[v, None]),
    "engine.loss_scale": lambda v: setattr(engine(), "loss_scale", v),
    "RawBuffer(pointer)": lambda v: raw(pointer=v) if v is None or type(v) is str else None,
    "accumulator.add(measure)": lambda v: ge.PerBlockGradientAccumulator(LAYOUT).add(gradients(), measure=v),
    "accumulator.block": lambda v: ge.PerBlockGradientAccumulator(LAYOUT).block(v),
    "GpuGradientAccumulator(layout)": lambda v: ge.GpuGradientAccumulator(v, "cpu"),
    "GpuGradientAccumulator(device)": lambda v: ge.GpuGradientAccumulator(LAYOUT, v),
    "of many long names: slot": LONG_NAMES.slot,
    "of many long names: add": lambda v: ge.GradientEngine(LONG_NAMES).add(v),
    "of many long names: add_block": lambda v: ge.GradientEngine(LONG_NAMES).add_block(0, v),
    "GpuGradientAccumulator.memory_needed": ge.GpuGradientAccumulator.memory_needed,
    "block.scale": BLOCK.scale,
    "block.accumulate": BLOCK.accumulate,
    "block.from_flat": BLOCK.from_flat,
    "FusedClipState([size])": lambda v: ge.FusedClipState([v]),
    "clip_gradients_fused([buffer])": lambda v: ge.clip_gradients_fused([v], 1.0, STATE()),
    "clip_by_global_norm([array])": lambda v: ge.clip_by_global_norm([v], 1.0),
    "init_lora_fused_clip({buffer})": lambda v: ge.init_lora_fused_clip({"lora_a_q": v}),
    "GradientLayout.of([shape])": lambda v: ge.GradientLayout.of([v]),
    "GradientLayout.of([(dimension,)])": lambda v: ge.GradientLayout.of([(v,)]),
    "GradientLayout.of({partition})": lambda v: ge.GradientLayout.of([(3,)], tp_size=2, partitions={"0": v}),
    "GradientLayout.of({name: shape})": lambda v: ge.GradientLayout.of({v: (2,)}) if isinstance(v, Hashable) else None,
    "layout.slot": LAYOUT.slot,
    "layout.block": LAYOUT.block,
    "layout_from_table": layout_from_table,
    "exchange.all_gather(data)": lambda v: bound().all_gather(v),
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
    "Bandwidth": ge.Bandwidth,
    "Bandwidth.gigabits": ge.Bandwidth.gigabits,
    "Bandwidth.parse": ge.Bandwidth.parse,
    "cost(tp_size)": lambda v: ge.TensorParallelCost(4, 2, 4, v).seconds_per_step(GIGABIT),
    "fill(value)": lambda v: fill(floats(), v),
    "cast(destination)": lambda v: cast(floats(), v),
    "HostKernels(threads)": HostKernels,
    "connect(served)": closing(lambda v: ge.connect("tcp://127.0.0.1:1", 0, 1, served=v)),
    "connect(host)": closing(lambda v: ge.connect(f"tcp://{v}:0" if type(v) is str else v, 0, 1)),
    "GradientServer(host)": closing(lambda v: ge.GradientServer(1, (v, 0))),
    "GradientServer(port)": closing(lambda v: ge.GradientServer(1, ("127.0.0.1", v))),
    "connect(served host)": reached,
}


@pytest.mark.parametrize("name", VARIED)
def test_what_is_varied_is_taken_as_it_is_here(name):
    """Else all values would be refused for another argument."""
    call, arguments, options, _ = VARIED[name]
    call(*arguments, **options)


@pytest.mark.parametrize("name", CALLS)
def test_whatever_a_call_is_given_it_is_taken_or_refused_by_an_error_of_ours(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # text may be the path of a socket
    refusals = [refusal_of(functools.partial(CALLS[name], value)) for value in HOSTILE]
    assert max(map(len, refusals)) < 1500
    assert max(refusal.count("\n") for refusal in refusals) < 12
