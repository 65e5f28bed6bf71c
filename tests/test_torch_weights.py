"""Weights over ranks: rank 0's are copied to all, byte for byte and in place; ranks that differ are refused by name."""

import copy
from unittest import mock

import numpy as np
import pytest
import strategies as draw
from hypothesis import given
from hypothesis import strategies as st
from ranks import OPTIONS, on_grid, on_links, on_ranks
from transports import Transport, group, on_all, outcomes

torch = pytest.importorskip("torch")

from gradengine import GradientEngine, GradientLayout, local_group  # noqa: E402
from gradengine.errors import CallerError, ExchangeError, LayoutMismatch, PeerLost, WindowError  # noqa: E402
from gradengine.exchange import exchange as exchange_file  # noqa: E402
from gradengine.torch import attach, gradients_of, layout_of  # noqa: E402

FP8 = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int8,
    torch.uint8, torch.bool, *FP8,
]  # fmt: skip
MEMORY = ["contiguous", "transposed", "channels_last", "gaps", "expanded", "conjugate"]
KINDS = ["frozen", "buffer", "non-persistent buffer"]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def values_of(rng, dtype, shape):
    values = torch.empty(shape, dtype=dtype)
    values.view(-1).view(torch.uint8).numpy()[:] = rng.integers(0, 2 if dtype is torch.bool else 256, values.nbytes)
    return values


def tensor_of(seed, dtype, shape, memory):
    """Random bits, NaN among them, in memory of that kind where the shape and dtype allow it."""
    rng = np.random.default_rng(seed)
    if memory == "transposed" and shape:
        return values_of(rng, dtype, shape[::-1]).permute(*reversed(range(len(shape))))
    if memory == "channels_last" and len(shape) == 4:
        return values_of(rng, dtype, shape).to(memory_format=torch.channels_last)
    if memory == "gaps" and shape:
        return values_of(rng, dtype, (*shape[:-1], 2 * shape[-1]))[..., ::2]
    if memory == "expanded" and shape:
        return values_of(rng, dtype, (1, *shape[1:])).expand(shape)
    if memory == "conjugate" and dtype.is_complex:
        return values_of(rng, dtype, shape).conj()
    return values_of(rng, dtype, shape)


rows = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.sampled_from(MEMORY),
    st.sampled_from(DEVICES),
)


def module_of(seed, rows):
    """A trainable parameter, a frozen one that is tied to it by name, and these."""
    module = torch.nn.Module()
    weight = tensor_of([seed, 0], torch.float32, (3, 2), "transposed").nan_to_num().clamp(-1, 1)
    module.weight = module.again = torch.nn.Parameter(weight)
    for i, (kind, dtype, shape, memory, device) in enumerate(rows):
        tensor = tensor_of([seed, 1 + i], dtype, shape, memory).to(device)
        if kind == "frozen":
            module.register_parameter(f"t{i}", torch.nn.Parameter(tensor, requires_grad=False))
        else:
            module.register_buffer(f"t{i}", tensor, persistent=kind == "buffer")
    return module


def tensors_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def bits(tensor):
    values = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return values.view(-1).view(torch.uint8).tolist()


def all_bits(module):
    return {name: bits(tensor) for name, tensor in tensors_of(module).items()}


def attached_to(module, exchange, **options):
    return attach(module, GradientEngine(layout_of(module), exchange=exchange, **options))


class TestBroadcast:
    @given(st.lists(rows, max_size=5), st.integers(1, 4), st.booleans(), st.sampled_from([1, 7, 64, 1 << 20]))
    def test_all_ranks_have_the_bytes_of_rank_0_in_their_own_memory(self, rows, world_size, buffers_only, piece):
        """Whatever the size of a piece: tensors share it, or need several."""
        modules = [module_of(seed, rows) for seed in range(world_size)]
        before = [all_bits(module) for module in modules]
        places = [{n: (t.data_ptr(), t.stride()) for n, t in tensors_of(module).items()} for module in modules]
        with mock.patch.object(exchange_file, "MAX_SMALL_PAYLOAD", piece):
            exchanges = local_group(world_size, **OPTIONS)
            on_all(
                lambda exchange: attached_to(modules[exchange.rank], exchange).broadcast(buffers_only=buffers_only),
                exchanges,
            )
        for rank, module in enumerate(modules):
            buffers = dict(module.named_buffers())
            for name, tensor in tensors_of(module).items():
                source = 0 if name in buffers or not buffers_only else rank
                assert bits(tensor) == before[source][name], name
                assert (tensor.data_ptr(), tensor.stride()) == places[rank][name], name

    @pytest.mark.parametrize("transport", list(Transport), ids=lambda transport: transport.value)
    def test_over_each_transport_with_a_tensor_of_several_pieces(self, transport):
        rows = [("frozen", torch.bfloat16, (3, 1 << 19), "transposed", "cpu"), ("buffer", torch.int64, (), "", "cpu")]
        modules = [module_of(seed, rows) for seed in range(3)]
        expected = all_bits(modules[0])

        def work(exchange):
            attached_to(modules[exchange.rank], exchange).broadcast()
            exchange.barrier()  # none leaves before all are done

        with group(transport, 3) as exchanges:
            on_all(work, exchanges)
        assert all(all_bits(module) == expected for module in modules)

    def test_a_list_of_parameters_has_no_buffers(self):
        modules = [module_of(seed, [("buffer", torch.float32, (2,), "", "cpu")]) for seed in range(2)]
        buffers = [bits(module.t0) for module in modules]

        def work(exchange):
            attached = attached_to(list(modules[exchange.rank].parameters()), exchange)
            attached.broadcast(buffers_only=True)
            other = bits(modules[exchange.rank].weight)
            attached.broadcast()
            return other

        found = on_ranks(work, 2)
        assert found[0] != found[1]
        assert bits(modules[0].weight) == bits(modules[1].weight) == found[0]
        assert [bits(module.t0) for module in modules] == buffers

    @pytest.mark.parametrize("world_size", [0, 1])
    def test_alone_nothing_is_done(self, world_size):
        module = module_of(0, [("buffer", torch.float32, (2,), "", "cpu")]).to_empty(device="cpu")
        module.register_buffer("elsewhere", torch.empty(2, device="meta"))
        attached_to(module, local_group(1)[0] if world_size else None).broadcast()

    @pytest.mark.parametrize(
        ("first", "second", "says"),
        [
            (("a", (2,), torch.float32), ("b", (2,), torch.float32), r"got 'b' \(2,\).* expected 'a'"),
            (("a", (2, 3), torch.float32), ("a", (3, 2), torch.float32), r"got 'a' \(3, 2\).* expected 'a' \(2, 3\)"),
            (("a", (2,), torch.float16), ("a", (2,), torch.bfloat16), r"got 'a' .*bfloat16, expected 'a' .*float16"),
            (("a", (2,), torch.int8), None, r"got none, expected 'a'"),
            (None, ("a", (2,), torch.int8), r"got 'a' .*, expected none"),
        ],
    )
    def test_other_modules_are_refused_by_name_on_all_ranks_before_anything_is_written(self, first, second, says):
        modules = [module_of(seed, []) for seed in range(3)]
        for module, row in zip(modules, (first, first, second), strict=True):
            if row is not None:
                module.register_buffer(row[0], torch.zeros(row[1], dtype=row[2]))
        before = [all_bits(module) for module in modules]

        def work(exchange):
            attached = attached_to(modules[exchange.rank], exchange)
            with pytest.raises(LayoutMismatch, match=rf"module of rank 2 is not that of rank 0: {says}"):
                attached.broadcast()
            assert all_bits(modules[exchange.rank]) == before[exchange.rank]
            for name, _ in [*modules[exchange.rank].named_buffers()]:
                delattr(modules[exchange.rank], name)
            attached.broadcast()  # over the same exchange
            return bits(modules[exchange.rank].weight)

        assert on_ranks(work, 3) == [before[0]["weight"]] * 3

    @pytest.mark.parametrize("tensor", ["meta", "sparse"])
    def test_what_has_no_memory_is_refused_on_all_ranks_and_its_gradients_are_trained_all_the_same(self, tensor):
        empty = torch.zeros(2, device="meta") if tensor == "meta" else torch.zeros(2).to_sparse()
        modules = [module_of(seed, []) for seed in range(2)]
        for module in modules:
            module.register_parameter("other", torch.nn.Parameter(empty.clone(), requires_grad=False))

        def work(exchange):
            attached = attached_to(modules[exchange.rank], exchange)
            with pytest.raises(CallerError, match=rf"'other' \(2,\).*{tensor}.* cannot be sent"):
                attached.broadcast()
            with torch.no_grad():
                modules[exchange.rank].weight.fill_(1)
            modules[exchange.rank].weight.sum().backward()
            return attached.step().micro_batches

        assert on_ranks(work, 2) == [2, 2]

    def test_a_loop_by_hand_sends_them_once_and_keeps_no_hook(self):
        def work(exchange):
            module = module_of(exchange.rank, [])
            engine = GradientEngine(layout_of(module), exchange=exchange)
            attach(module, engine).broadcast()
            module.weight.sum().backward()
            engine.add(gradients_of(module))
            return bits(module.weight), float(engine.step().norm)

        first, second = on_ranks(work, 2)
        assert first == second

    def test_a_rank_in_another_step_is_refused_on_all_ranks(self):
        """As where one rank alone loads the engine's saved state."""
        saved = GradientEngine(layout_of(torch.nn.Linear(2, 1)))
        saved.add([np.ones((1, 2), np.float32), np.ones(1, np.float32)])
        saved.step()

        def work(exchange):
            module = torch.nn.Linear(2, 1)
            engine = GradientEngine(layout_of(module), exchange=exchange)
            if exchange.rank == 0:
                engine.load_state_dict(saved.state_dict())
            with pytest.raises(ExchangeError, match=r"step 0'?, expected .*step 1"):
                attach(module, engine).broadcast()
            return True

        assert on_ranks(work, 2) == [True, True]

    def test_what_torch_lets_nobody_write_to_is_refused_on_all_ranks(self):
        def work(exchange):
            module = module_of(exchange.rank, [])
            with torch.inference_mode():
                module.register_buffer("fixed", torch.ones(2))
            before = bits(module.weight)
            with pytest.raises(CallerError, match=r"'fixed' .*inference"):
                attached_to(module, exchange).broadcast()
            return bits(module.weight) == before

        assert on_ranks(work, 2) == [True, True]

    @pytest.mark.parametrize("opens", ["backward", "nothing"])
    def test_an_open_window_is_refused(self, opens):
        module = module_of(0, [])
        attached = attached_to(module, None)
        if opens == "backward":
            module.weight.sum().backward()
        else:
            attached._engine.add(None, weight=0)
        with pytest.raises(WindowError, match=r"a window is open: got \d micro-batches; step\(\) or discard\(\)"):
            attached.broadcast()
        attached._engine.discard()
        attached.broadcast()

    def test_a_rank_that_is_lost_meanwhile_is_an_error_on_all_and_closes_the_exchange(self):
        rows = [("frozen", torch.float32, (100,), "", "cpu")]
        modules = [module_of(seed, rows) for seed in range(3)]
        before = [all_bits(module) for module in modules]

        def work(exchange):
            attached = attached_to(modules[exchange.rank], exchange)
            with pytest.raises(PeerLost):
                attached.broadcast()
            with pytest.raises(PeerLost):
                attached.broadcast()
            return all_bits(modules[exchange.rank])

        with mock.patch.object(exchange_file, "MAX_SMALL_PAYLOAD", 64):  # more pieces than the link has transfers left
            found = on_links(work, 3, lost_after=30)
        assert found[0] == before[0]
        for rank in (1, 2):
            assert all(found[rank][name] in (before[0][name], before[rank][name]) for name in before[0]), found[rank]

    @pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
    def test_a_rank_that_fails_meanwhile_is_not_waited_for(self, fault, monkeypatch):
        modules = [module_of(seed, [("buffer", torch.float32, (2,), "", "cpu")] * 2) for seed in range(3)]
        copied = torch.Tensor.copy_

        def copy(tensor, source):
            if tensor.data_ptr() == modules[1].t0.data_ptr():
                raise fault("of the test")
            return copied(tensor, source)

        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(exchange_file, "MAX_SMALL_PAYLOAD", 8)

        def broadcast_and_wait(attached):
            attached.broadcast()
            attached._engine.exchange.barrier()

        def work(exchange):
            attached = attached_to(modules[exchange.rank], exchange)
            # Rank 0 may have sent all before the other failed.
            with pytest.raises(fault if exchange.rank == 1 else PeerLost):
                broadcast_and_wait(attached)
            with pytest.raises(PeerLost):
                exchange.barrier()

        assert on_ranks(work, 3) == [None] * 3


class Adapted(torch.nn.Module):
    """A frozen base and a trainable part, as with LoRA."""

    def __init__(self, change=0.0, of="base"):
        super().__init__()
        self.base = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).to(torch.bfloat16), requires_grad=False)
        self.part = torch.nn.Parameter(torch.ones(3))
        with torch.no_grad():
            getattr(self, of)[..., 2] += change

    def forward(self, x):
        return (self.base.float() @ self.part * x).sum()


def sum_of_squares(tensor):
    return tensor.float().square().sum().item()


class TestComparison:
    @pytest.mark.parametrize("of", ["base", "part"])
    @pytest.mark.parametrize("way", ["backward", "with", "by hand", "nothing"])
    @pytest.mark.parametrize("micro_batches", [None, 1])
    def test_other_weights_are_refused_on_all_ranks_in_step_0_and_mended_as_it_says(self, of, way, micro_batches):
        """The last rank begins by another call: it has no micro-batch, or adds its gradients by hand."""
        modules = [Adapted(), Adapted(), Adapted(1.0, of)]
        expected = [sum_of_squares(tensor) for tensor in modules[0].parameters()]

        def micro_batch(attached, module, way):
            if way == "nothing":
                attached._engine.add(None, weight=0)
            elif way == "by hand":
                attached._engine.add({"part": torch.ones(3)})
            elif way == "backward":
                module(2.0).backward()
            else:
                with attached.micro_batch():
                    module(2.0).backward()

        def step(attached, module, way):
            micro_batch(attached, module, way)
            return attached.step()

        def work(exchange):
            module, own = modules[exchange.rank], way if exchange.rank == 2 else "backward"
            attached = attached_to(module, exchange, micro_batches=micro_batches)
            with pytest.raises(CallerError, match=rf"'{of}' of rank 2 is not .*discard\(\).* attached.broadcast\(\)"):
                step(attached, module, own)
            assert all(parameter.grad is None for parameter in module.parameters())
            if attached._engine.has_open_window:
                attached._engine.discard()
            if own == "by hand" and micro_batches == 1:  # all that it had was sent
                return "closed"
            attached.broadcast()
            result = step(attached, module, own)
            assert [sum_of_squares(tensor) for tensor in module.parameters()] == expected
            return result.micro_batches

        if way == "by hand" and micro_batches == 1:
            found = on_ranks(work, 3)
            assert found[2] == "closed"
            assert {*map(type, found[:2])} == {PeerLost}
        else:
            assert on_ranks(work, 3) == [2 + (way != "nothing")] * 3

    def test_other_parameters_are_refused(self):
        """With the same layout: a frozen one that rank 0 does not have."""

        def work(exchange):
            module = Adapted()
            if exchange.rank:
                module.more = torch.nn.Parameter(torch.ones(1), requires_grad=False)
            with pytest.raises(CallerError, match=r"parameter 'more' of rank 1 is not that of rank 0"):
                attached_to(module, exchange).step()

        assert on_ranks(work, 2) == [None, None]

    def test_frozen_weights_are_compared_once(self):
        module, count = Adapted(), []
        hashed = "gradengine.torch.weights._digest_of"

        def work(exchange):
            ours = copy.deepcopy(module)
            attached = attached_to(ours, exchange)
            for _ in range(2):
                for _ in range(2):
                    ours(1.0).backward()
                attached.step()
                ours.zero_grad()

        with mock.patch(hashed, side_effect=lambda *_: count.append(1) or 7):
            assert on_ranks(work, 2) == [None, None]
        assert len(count) == 2 * 2

    def test_a_rank_that_joins_anew_in_step_0_is_compared_and_later_it_is_not(self):
        modules, groups = [Adapted(), Adapted(), Adapted(1.0)], [local_group(2, **OPTIONS) for _ in range(2)]

        def work(rank):
            module = modules[rank]
            attached = attached_to(module, groups[0][rank])
            module(1.0).backward()
            groups[0][rank].close()
            if rank == 1:  # as another process
                module = modules[2]
                attached = attached_to(module, groups[1][1])
            else:
                attached._engine.reconnect(groups[1][0])
            with pytest.raises(CallerError, match="'base' of rank 1"):
                module(1.0).backward() if rank else attached.step()
            attached._engine.discard()
            state = GradientEngine(layout_of(module)).state_dict() | {"step": np.array(1)}
            attached._engine.load_state_dict(state)
            module(1.0).backward()
            return attached.step().step

        assert on_all(work, [0, 1]) == [1, 1]

    @pytest.mark.parametrize("call", ["step", "broadcast"])
    def test_all_parts_of_a_model_are_told_of_one_that_differs(self, call):
        def work(workers, parts):
            place = (workers.rank, parts.rank)
            module = Adapted(10.0 * parts.rank)
            with torch.no_grad():
                module.part += place == (1, 0)
            if call == "broadcast" and place == (1, 0):
                module.register_buffer("more", torch.ones(1))
            partitions = {"part": "column"}
            layout = GradientLayout.of({"part": (3,)}, tp_rank=parts.rank, tp_size=2, partitions=partitions)
            attached = attach(module, GradientEngine(layout, exchange=workers, tp_exchange=parts))
            if call == "broadcast":
                with pytest.raises(LayoutMismatch, match=r"module of rank 1 .* got 'more'"):
                    attached.broadcast()
                if place == (1, 0):
                    del module.more
            else:
                with pytest.raises(CallerError, match=r"'part' of rank 1 is not that of rank 0"):
                    module(1.0).backward()
            attached.broadcast()
            module(1.0).backward()
            attached.step()
            return sum_of_squares(module.base), sum_of_squares(module.part)

        expected = [(sum_of_squares(Adapted(10.0 * part).base), 3.0) for part in range(2)]
        assert on_grid(work, 2, 2) == [expected, expected]


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 4), st.integers(1, 33), draw.seeds)
def test_bytes_of_rank_0_are_all_ranks_whatever_the_piece(sizes, world_size, piece, seed):
    rng, layout = np.random.default_rng(seed), GradientLayout.of([(1,)])
    given_bytes = [[rng.integers(0, 256, size, np.uint8) for size in sizes] for _ in range(world_size)]
    expected = [array.tobytes() for array in given_bytes[0]]

    def work(exchange):
        exchange.bind(layout, np.zeros(layout.arena_size, np.float32))
        found = []

        def arrays():
            for array in given_bytes[exchange.rank]:
                yield array
                found.append(array.tobytes())  # it is whole as the next is asked for

        exchange.broadcast(arrays())
        return found

    with mock.patch.object(exchange_file, "MAX_SMALL_PAYLOAD", piece):
        assert outcomes(work, local_group(world_size, **OPTIONS)) == [expected] * world_size
