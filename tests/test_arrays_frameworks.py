"""Frameworks asked by themselves: what lies where with no copy, whose stream it is, what is refused and how."""

import gc
import subprocess
import sys
import types

import numpy as np
import pytest
import strategies as draw
from emulated_torch import Tensor, emulated_torch
from producers import NumPyProducer

from gradengine import (
    FusedClipState,
    GradientEngine,
    GradientLayout,
    clip_by_global_norm,
    clip_gradients_fused,
    clip_lora_gradients_fused,
)
from gradengine.arrays.buffer import Buffer
from gradengine.arrays.frameworks import TorchStream, device_name, is_jax, is_torch
from gradengine.arrays.host import host_buffer, host_buffers
from gradengine.errors import BufferRefused, GradientError
from gradengine.kernels import HostKernels
from gradengine.kernels.host_device import HostDevice

writable_host_buffer = HostKernels(1).device.writable_view  # as a step takes its destinations


def test_nothing_is_a_frameworks_where_none_is_loaded(monkeypatch):
    for name in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not is_torch(np.zeros(2))
    assert not is_jax(np.zeros(2))


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_framework_that_is_only_half_imported(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert host_buffer(np.ones(2, np.float32), "w").data.tolist() == [1, 1]
    assert not is_torch(1)
    assert not is_jax(1)


def test_frameworks_are_never_imported():
    """By the whole package with a step on the CPU, on a machine that has them or not."""
    code = (
        "import sys, numpy as np, gradengine as g; e = g.GradientEngine(g.GradientLayout.of([(2,)]));"
        "e.add([np.ones(2, np.float32)]); e.step();"
        "print([n for n in ('torch', 'jax', 'cupy', 'ml_dtypes', 'tensorflow') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


class TestDeviceName:
    def test_torchs_devices_go_by_their_names(self, monkeypatch):
        class Device:
            def __init__(self, kind, index=None):
                self.type, self.index = kind, index

            def __str__(self):
                return self.type if self.index is None else f"{self.type}:{self.index}"

        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(device=Device))
        devices = [Device("cpu"), Device("cpu", 0), Device("cuda"), Device("cuda", 1), "cuda:1", None]
        assert [device_name(device) for device in devices] == ["cpu", "cpu", "cuda", "cuda:1", "cuda:1", None]
        assert GradientEngine(GradientLayout.of([(2,)]), device=Device("cpu")).accumulator.kernels.device.name == "cpu"

    def test_half_imported_torch_has_none(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())
        assert device_name("cpu") == "cpu"


class TestTorch:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_the_same_memory(self, dtype):
        torch = pytest.importorskip("torch")
        tensor = torch.tensor([[1.5, -2.0, 3.25], [0.0, -0.0, 1e-7]]).to(getattr(torch, dtype))
        view = writable_host_buffer(tensor, "w")
        assert (view.pointer, view.dtype, view.shape) == (tensor.data_ptr(), dtype, (2, 3))
        expected = tensor.flatten().view(torch.int32 if dtype == "float32" else torch.int16).numpy()
        np.testing.assert_array_equal(view.data.view(expected.dtype), expected)

    @pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 1, 3)])
    def test_any_shape(self, shape):
        torch = pytest.importorskip("torch")
        view = host_buffer(torch.ones(shape), "w")
        assert (view.shape, view.size, view.data.size) == (shape, int(np.prod(shape)), int(np.prod(shape)))

    def test_a_slice_begins_where_it_begins(self):
        torch = pytest.importorskip("torch")
        tensor = torch.arange(12.0).reshape(4, 3)[1:3]
        assert host_buffer(tensor, "w").data.tolist() == [3, 4, 5, 6, 7, 8]

    def test_the_tensor_may_go_at_once(self):
        torch = pytest.importorskip("torch")
        view = host_buffer(torch.full((100_000,), 3.0), "w")
        gc.collect()
        others = [torch.full((100_000,), float(i)) for i in range(20)]
        assert (view.data == 3).all()
        assert len(others) == 20

    def test_gradients_of_a_backward_pass(self):
        torch = pytest.importorskip("torch")
        layer = torch.nn.Linear(3, 2)
        layer(torch.ones(1, 3)).sum().backward()
        assert host_buffer(layer.weight.grad, "w").data.tolist() == [1] * 6

    def test_a_gradient_that_is_itself_differentiated(self):
        torch = pytest.importorskip("torch")
        weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        (gradient,) = torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
        assert host_buffer(gradient, "w").data.tolist() == [4, 6]
        with pytest.raises(
            BufferRefused, match="destination 'w' requires grad: got Tensor, expected a tensor that auto"
        ):
            writable_host_buffer(gradient, "w")

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda t: t.ones(3, requires_grad=True),
                r"'w' requires grad: it is a parameter, not a gradient or a destination: got Ten",
            ),
            (lambda t: t.nn.Parameter(t.ones(3)), r"it is a parameter, .*: got Parameter; pass its .grad, or .detach"),
            (lambda t: t.ones(3, device="meta"), "component 'w' is on the meta device and has no memory: .*to_empty"),
            (lambda t: t.ones(3).to_sparse(), r"'w' is sparse, .*: got torch.sparse_coo, .*; pass .to_dense\(\)"),
            (
                lambda t: t.quantize_per_tensor(t.ones(3), 0.1, 0, t.qint8),
                "unsupported dtype: got qint8, expected float32",
            ),
            (
                lambda t: t.ones(2, 3).T,
                r"not contiguous: got shape \(3, 2\) with strides \(1, 3\) .*copy, tensor\.contiguous\(\); ",
            ),
            (lambda t: t.ones(6)[::2], r"not contiguous: got shape \(3,\) with strides \(2,\)"),
            (lambda t: t.ones(1).expand(3), r"not contiguous: got shape \(3,\) with strides \(0,\)"),
            (lambda t: t.ones(3, dtype=t.float64), "an unsupported dtype: got float64, expected float32"),
            (lambda t: t.ones(3, dtype=t.int32), "got int32"),
            (lambda t: t.ones(3, dtype=t.bool), "got bool"),
            (lambda t: t.ones(3, dtype=t.complex64), "got complex64"),
            (lambda t: t.ones(3).to(t.float8_e4m3fn), "an unsupported dtype: got float8_e4m3fn"),
            (lambda t: t._efficientzerotensor(3), "is not at a valid address: got pointer 0x0, size 3"),
            (lambda t: t.imag(t.ones(3, 2, dtype=t.complex64).conj())[:, :1], "not contiguous"),
            (lambda t: t._neg_view(t.ones(3)), r"component 'w' is lazily negated; pass .resolve_neg\(\)"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")  # torch's own of its old kinds
    def test_refused(self, make, message):
        torch = pytest.importorskip("torch")
        with pytest.raises(BufferRefused, match=message):
            host_buffer(make(torch), "w")
        with pytest.raises(BufferRefused, match=message):
            host_buffers([torch.ones(1), make(torch)], ["v", "w"])

    @pytest.mark.parametrize(
        "use", [lambda t: host_buffer(t, "arrays[0]"), lambda t: clip_by_global_norm([t], 1.0)], ids=["one", "clip"]
    )
    def test_inside_a_transformation(self, use):
        torch = pytest.importorskip("torch")

        def look(tensor):
            use(tensor)
            return tensor

        with pytest.raises(BufferRefused, match=r"component 'arrays\[0\]' has no storage .*torch.func"):
            torch.func.vmap(look)(torch.ones(2, 3))

    @pytest.mark.parametrize("comes", ["cold", "in a loop of new ones"])
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda t: t.ones(3).to_sparse(), "is sparse"),
            (lambda t: t.ones(3, requires_grad=True), "requires grad: it is a parameter"),
            (lambda t: t.nn.Parameter(t.ones(3)), "requires grad: it is a parameter"),
            (lambda t: t.ones(3, dtype=t.float64), "an unsupported dtype: got float64"),
        ],
        ids=["sparse", "leaf", "parameter", "float64"],
    )
    @pytest.mark.parametrize("is_watched", [False, True])
    def test_refused_by_an_engine(self, comes, make, message, is_watched):
        """Also where all that came before are results of differentiable work, which are no leaves."""
        torch = pytest.importorskip("torch")
        engine = GradientEngine(GradientLayout.of([(3,)]))
        for _ in range(20 if comes != "cold" else 0):
            engine.add([torch.ones(3, requires_grad=is_watched) * 1])
            engine.step()
        with pytest.raises(BufferRefused, match=message):
            engine.add([make(torch)])

    def test_one_that_became_a_leaf_is_not_known_again(self):
        torch = pytest.importorskip("torch")
        engine, tensor = GradientEngine(GradientLayout.of([(3,)])), torch.ones(3, requires_grad=True) * 1
        for _ in range(2):
            engine.add([tensor])
        tensor.detach_().requires_grad_()
        with pytest.raises(BufferRefused, match="requires grad: it is a parameter"):
            engine.add([tensor])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t, x: x.t_(), "not contiguous"),
            (lambda t, x: setattr(x, "data", x.data.t()), "not contiguous"),
            (lambda t, x: x.set_(x.untyped_storage(), 0, (4, 4), (8, 1)), "not contiguous"),
            (lambda t, x: setattr(x, "data", t._neg_view(x.data)), "lazily negated"),
            (lambda t, x: x.resize_(2, 4), "has another shape"),
            (lambda t, x: setattr(x, "data", x.data.double()), "an unsupported dtype: got float64"),
            (lambda t, x: x.requires_grad_(), "requires grad"),
            (lambda t, x: x.untyped_storage().resize_(0), "is not at a valid address"),
        ],
        ids=["t_", "data.t", "set_", "neg", "resize_", "double", "requires_grad_", "storage"],
    )
    @pytest.mark.parametrize("is_new", [False, True])
    def test_one_that_was_changed_in_place_is_not_known_again(self, change, message, is_new):
        """Nor one of a loop that makes new ones each time, in which only their form is known."""
        torch = pytest.importorskip("torch")
        tensor, engine = torch.arange(16.0).view(4, 4), GradientEngine(GradientLayout.of([(4, 4)]))
        for _ in range(20):
            engine.add([tensor.clone() if is_new else tensor])
            engine.step()
        change(torch, tensor)
        with pytest.raises(GradientError, match=message):
            engine.add([tensor])
        engine.add([torch.ones(4, 4)])
        assert engine.step().norm == 4

    def test_new_ones_at_each_micro_batch(self):
        torch = pytest.importorskip("torch")
        layout = GradientLayout.of([(3,), (2, 2)])
        engines = [GradientEngine(layout, max_norm=None, hold=hold) for hold in (1, 3)]
        for step in range(10):
            micro_batches = [[torch.full((3,), step + k), torch.full((2, 2), -1.0 - k)] for k in range(3)]
            for engine in engines:
                for gradients in micro_batches:
                    engine.add([gradient.float() for gradient in gradients])  # gone at once, where they are not held
                found = [array.tolist() for array in engine.step().gradients.values()]
                assert found == [[step + 1] * 3, [[-2, -2], [-2, -2]]]

    def test_a_new_one_that_lies_in_the_arena_is_refused(self):
        torch = pytest.importorskip("torch")
        engine = GradientEngine(GradientLayout.of([(3,)]))
        for _ in range(20):
            engine.add([torch.ones(3)])
            result = engine.step()
        with pytest.raises(BufferRefused, match="own arena"):
            engine.add([torch.from_numpy(result.gradients["0"])])

    def test_a_new_one_that_reaches_into_the_arena_is_refused(self, monkeypatch):
        torch = pytest.importorskip("torch")
        memory = np.zeros(1024, np.uint8)
        start = -memory.ctypes.data % 128 + 128

        def allocate(_, size, **_options):
            data = memory[start : start + 4 * size].view(np.float32)
            return Buffer(data.ctypes.data, size, "float32", (size,), True, memory, data=data)

        monkeypatch.setattr(HostDevice, "allocate", allocate)
        engine = GradientEngine(GradientLayout.of([(3,)]))
        for _ in range(20):
            engine.add([torch.ones(3)])
            engine.step()
        with pytest.raises(BufferRefused, match="own arena"):
            engine.add([torch.from_numpy(memory[start - 4 : start + 8].view(np.float32))])

    @pytest.mark.parametrize(
        "change",
        [
            lambda t, x: setattr(x, "data", t.full((100_000,), 7.0)),
            lambda t, x: x.set_(t.ones(100_000)),
            lambda t, x: x.untyped_storage().resize_(0),
        ],
        ids=["data", "set_", "storage"],
    )
    @pytest.mark.parametrize("comes", ["known", "first", "in a loop of new ones"])
    def test_a_held_one_that_loses_its_memory(self, change, comes):
        torch = pytest.importorskip("torch")
        tensor, other = torch.ones(100_000), torch.ones(100_000)
        engine = GradientEngine(GradientLayout.of([(100_000,)]), hold=2)
        for before in {"known": [tensor], "first": []}.get(comes, (tensor.clone() for _ in range(20))):
            engine.add([before])
            engine.step()
        engine.add([tensor])
        change(torch, tensor)
        for call in (lambda: engine.add([other]), engine.step):
            with pytest.raises(BufferRefused, match="'0' was given other memory, or freed, while it was held"):
                call()
        engine.discard()
        engine.add([other])
        assert engine.step().norm == pytest.approx(100_000**0.5)

    def test_a_held_one_beside_others(self):
        """Of another kind in the same micro-batch."""
        torch = pytest.importorskip("torch")
        tensor, other = torch.ones(1000), np.ones(1000, np.float32)
        engine = GradientEngine(GradientLayout.of([(1000,), (1000,)]), hold=2)
        engine.add([tensor, other])
        tensor.data = torch.full((1000,), 7.0)
        with pytest.raises(BufferRefused, match="'0' was given other memory, or freed, while it was held"):
            engine.step()

    def test_one_that_is_folded_may_move(self):
        torch = pytest.importorskip("torch")
        tensor, other = torch.ones(1000), torch.ones(1000)
        engine = GradientEngine(GradientLayout.of({"layers.0.w": (1000,), "head": (1000,)}), hold=2, max_norm=None)
        engine.add([tensor, other])
        engine.accumulator.block(0)
        tensor.data = torch.full((1000,), 7.0)
        assert (engine.step().gradients["layers.0.w"] == 1).all()

    def test_destinations_raise_autograds_version(self):
        """A backward that saved one refuses what it holds now."""
        torch = pytest.importorskip("torch")
        weight, gradient = torch.nn.Parameter(torch.tensor([2.0, 3.0])), torch.ones(2)
        saved = (weight * gradient).square().sum()
        engine = GradientEngine(GradientLayout.of([(2,)]), max_norm=None)
        engine.add([gradient])
        engine.step(out=[gradient])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
        for clip in (
            lambda: clip_by_global_norm([gradient], 0.1),
            lambda: clip_gradients_fused([gradient], 0.1, FusedClipState([2])),
            lambda: clip_lora_gradients_fused({"lora_a_q": gradient}, 0.1, FusedClipState([2])),
        ):
            before = gradient._version
            clip()
            assert gradient._version > before

    @pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
    def test_nested(self):
        torch = pytest.importorskip("torch")
        with pytest.raises(BufferRefused, match="'w' has no storage"):
            host_buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "w")

    def test_distributed(self, backend):
        """torch's DTensor exports a null pointer (seen with 2.13); this one stands for it, without 15 s of imports."""

        class DTensor(NumPyProducer):
            def to_local(self):
                return self.array

        with pytest.raises(BufferRefused, match="'w' is a distributed tensor: got DTensor"):
            backend.kernels.device.view(DTensor(np.ones(3, np.float32)), "w")

    def test_subclasses_go_by_dlpack(self):
        """What one stands for only its own protocol can say."""
        torch = pytest.importorskip("torch")

        class Own(torch.Tensor):
            pass

        tensor = torch.ones(3).as_subclass(Own)
        assert not is_torch(tensor)
        assert host_buffer(tensor, "w").pointer == tensor.data_ptr()
        with pytest.raises(BufferRefused, match="lazily negated"):
            host_buffer(torch._neg_view(torch.ones(3)).as_subclass(Own), "w")

    def test_in_and_out_of_a_step(self):
        torch = pytest.importorskip("torch")
        gradients = {"a": torch.full((2, 3), 2.0), "b": torch.full((5,), 4.0, dtype=torch.bfloat16)}
        engine = GradientEngine(GradientLayout.of(gradients), max_norm=None)
        engine.add(gradients)
        result = engine.step(out=gradients)
        assert result.gradients["b"] is gradients["b"]
        engine.add({name: 3 * tensor for name, tensor in gradients.items()})
        there = {name: torch.from_dlpack(array) for name, array in engine.step().gradients.items()}
        pointers = [tensor.data_ptr() for tensor in there.values()]
        assert pointers == [target.pointer for target in engine.accumulator.arena.targets]
        assert (there["a"] == 6).all()
        assert (there["b"] == 12).all()


class TestTorchOnAGpu:
    """A stand-in for torch: what is read, and what is asked."""

    def test_its_memory_and_its_stream(self, device, monkeypatch):
        stream = device.xp.cuda.Stream(non_blocking=True)
        torch = emulated_torch(stream)
        monkeypatch.setitem(sys.modules, "torch", torch)
        tensor = Tensor(device.put(np.ones((2, 3), np.float16)))
        view = device.kernels.device.view(tensor, "w")
        assert (view.pointer, view.size, view.dtype, view.shape) == (tensor.data_ptr(), 6, "float16", (2, 3))
        assert view.producer == TorchStream(torch, device.kernels.ordinal)
        assert view.producer.stream() == stream.ptr

    def test_an_older_torch(self, device):
        stream = device.xp.cuda.Stream(non_blocking=True)
        assert TorchStream(emulated_torch(stream, is_old=True), 0).stream() == stream.ptr

    def test_each_device_has_a_stream(self):
        torch = types.ModuleType("torch")
        assert len({TorchStream(torch, 0), TorchStream(torch, 0), TorchStream(torch, 1)}) == 2
        assert TorchStream(torch, 0) != 0

    def test_asked_once_for_a_whole_micro_batch(self, device, monkeypatch):
        torch = emulated_torch(device.xp.cuda.Stream(non_blocking=True))
        monkeypatch.setitem(sys.modules, "torch", torch)
        device.kernels.device.views([Tensor(device.put(np.ones(3, np.float32))) for _ in range(20)], ["w"] * 20)
        assert torch.asked == [device.kernels.ordinal]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"layout": "sparse_coo"},
                "component 'w' is sparse, or of another torch.layout than strided: got sparse_coo",
            ),
            ({"dtype": "torch.float64"}, "an unsupported dtype: got float64"),
            ({"is_cpu": True}, "is on another device: got cpu, expected cuda:0"),
            ({"device": types.SimpleNamespace(type="cuda", index=7)}, "got cuda:7, expected cuda:0"),
            ({"device": types.SimpleNamespace(type="mps", index=None)}, "got mps:0, expected cuda:0"),
            ({"requires_grad": True}, "it is a parameter, not a gradient or a destination"),
            ({"is_neg": lambda: True}, "lazily negated"),
            ({"is_contiguous": lambda: False}, "not contiguous"),
        ],
    )
    def test_refused(self, device, monkeypatch, change, message):
        monkeypatch.setitem(sys.modules, "torch", emulated_torch(device.xp.cuda.Stream(non_blocking=True)))
        with pytest.raises(BufferRefused, match=message.replace("cuda:0", device.kernels.device.name)):
            device.kernels.device.view(Tensor(device.put(np.ones(3, np.float32)), **change), "w")


class TestJax:
    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_the_same_memory(self, dtype):
        jax = pytest.importorskip("jax")
        array = jax.numpy.asarray([[1.5, -2.0, 3.25], [0.0, -0.0, 1e-7]], dtype)
        view = host_buffer(array, "w")
        assert (view.pointer, view.dtype, view.shape) == (array.unsafe_buffer_pointer(), dtype, (2, 3))
        draw.assert_same_bits(view.data, np.asarray(array))

    def test_immutable(self):
        jax = pytest.importorskip("jax")
        with pytest.raises(BufferRefused, match="destination 'w' is read-only: got ArrayImpl, expected writable"):
            writable_host_buffer(jax.numpy.zeros(3), "w")

    def test_the_array_may_go_at_once(self):
        jax = pytest.importorskip("jax")
        view = host_buffer(jax.numpy.full(100_000, 3.0), "w")
        gc.collect()
        others = [jax.numpy.full(100_000, float(i)) for i in range(20)]
        assert (view.data == 3).all()
        assert len(others) == 20

    def test_one_that_is_still_computed_is_waited_for(self):
        jax = pytest.importorskip("jax")
        slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: y @ x, x)[0])
        array = slow(jax.numpy.eye(300) * 1.0)
        assert host_buffer(array, "w").data[0] == 1

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda j: j.numpy.zeros(3, "complex64"), "an unsupported dtype: got complex64"),
            (lambda j: j.numpy.zeros(3, "int32"), "an unsupported dtype: got int32"),
            (lambda j: deleted(j.numpy.zeros(3)), r"component 'w' was deleted by JAX: got float32\[3\]"),
        ],
    )
    def test_refused(self, make, message):
        jax = pytest.importorskip("jax")
        with pytest.raises(BufferRefused, match=message):
            host_buffer(make(jax), "w")

    def test_keys_of_random_numbers(self):
        jax = pytest.importorskip("jax")
        with pytest.raises(BufferRefused, match="an unsupported dtype: got key"):
            host_buffer(jax.random.key(0), "w")

    def test_inside_a_transformation(self):
        jax = pytest.importorskip("jax")
        with pytest.raises(BufferRefused, match="component 'w' is traced by JAX and has no memory yet"):
            jax.jit(lambda x: host_buffer(x, "w"))(np.zeros(3, np.float32))

    def test_spread_over_devices(self):
        pytest.importorskip("jax")
        code = (
            "import jax, numpy as np; from gradengine.arrays.host import host_buffer\n"
            "from jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n"
            "mesh = Mesh(np.array(jax.devices()), ('x',))\n"
            "for spec in (P('x'), P()):\n"
            "    array = jax.device_put(jax.numpy.ones(4), NamedSharding(mesh, spec))\n"
            "    try: host_buffer(array, 'w')\n"
            "    except Exception as e: print(e)\n"
            "print(host_buffer(jax.device_put(jax.numpy.ones(4), jax.devices()[1]), 'w').data)"
        )
        env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PATH": ""}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        refused, replicated, other = done.stdout.splitlines()
        for line in (refused, replicated):
            assert line.startswith("component 'w' is sharded over several devices: got 2 devices, expected one device")
        assert other == "[1. 1. 1. 1.]"


def deleted(array):
    array.delete()
    return array
