"""Frameworks asked by themselves: what lies where with no copy, whose stream it is, what is refused and how."""

import itertools
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
from gradengine.arrays.host import host_buffer
from gradengine.errors import BufferRefused, GradientError
from gradengine.kernels import HostKernels
from gradengine.kernels.host_device import HostDevice

writable_host_buffer = HostKernels(1).device.writable_view  # as a step takes its destinations


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


class TestNotLoaded:
    @pytest.mark.parametrize("name", ["torch", "jax"])
    @pytest.mark.parametrize("module", [None, types.SimpleNamespace()], ids=["absent", "half imported"])
    def test_nothing_is_its_own(self, monkeypatch, name, module):
        monkeypatch.setitem(sys.modules, name, module)
        assert host_buffer(np.ones(2, np.float32), "w").data.tolist() == [1, 1]
        assert not is_torch(np.zeros(2))
        assert not is_jax(np.zeros(2))
        assert device_name("cpu") == "cpu"

    def test_frameworks_are_never_imported(self):
        """By the whole package with a step on the CPU, on a machine that has them or not."""
        code = (
            "import sys, numpy as np, gradengine as g; e = g.GradientEngine(g.GradientLayout.of([(2,)]));"
            "e.add([np.ones(2, np.float32)]); e.step();"
            "print([n for n in ('torch', 'jax', 'cupy', 'ml_dtypes', 'tensorflow', 'typer', 'rich', 'matplotlib')"
            " if n in sys.modules])"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_torchs_devices_go_by_their_names(monkeypatch):
    class Device:
        def __init__(self, kind, index=None):
            self.type, self.index = kind, index

        def __str__(self):
            return self.type if self.index is None else f"{self.type}:{self.index}"

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(device=Device))
    devices = [Device("cpu"), Device("cpu", 0), Device("cuda"), Device("cuda", 1), "cuda:1", None]
    assert [device_name(device) for device in devices] == ["cpu", "cpu", "cuda", "cuda:1", "cuda:1", None]
    assert GradientEngine(GradientLayout.of([(2,)]), device=Device("cpu")).accumulator.kernels.device.name == "cpu"


# What is no gradient, and what its error says.
NO_GRADIENTS = [
    (lambda t: t.ones(3, requires_grad=True), "requires grad"),
    (lambda t: t.nn.Parameter(t.ones(3)), "got Parameter"),
    (lambda t: t.ones(3, device="meta"), "meta device"),
    (lambda t: t.ones(3).to_sparse(), "is sparse, .*got torch.sparse_coo"),
    (lambda t: t.quantize_per_tensor(t.ones(3), 0.1, 0, t.qint8), "got qint8"),
    (lambda t: t.ones(2, 3).T, r"strides \(1, 3\) .*tensor\.contiguous\(\)"),
    (lambda t: t.ones(6)[::2], r"not contiguous: .*strides \(2,\)"),
    (lambda t: t.ones(1).expand(3), r"not contiguous: .*strides \(0,\)"),
    (lambda t: t.ones(3, dtype=t.float64), "got float64, expected float32"),
    (lambda t: t.ones(3, dtype=t.int32), "got int32"),
    (lambda t: t.ones(3).to(t.float8_e4m3fn), "got float8_e4m3fn"),
    (lambda t: t._efficientzerotensor(3), "got pointer 0x0, size 3"),
    (lambda t: t.imag(t.ones(3, 2, dtype=t.complex64).conj())[:, :1], "not contiguous"),
    (lambda t: t._neg_view(t.ones(3)), "lazily negated"),
    (lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)]), "has no storage"),
]

CHANGES = {
    "t_": (lambda t, x: x.t_(), "not contiguous"),
    "data.t": (lambda t, x: setattr(x, "data", x.data.t()), "not contiguous"),
    "set_": (lambda t, x: x.set_(x.untyped_storage(), 0, (4, 4), (8, 1)), "not contiguous"),
    "neg": (lambda t, x: setattr(x, "data", t._neg_view(x.data)), "lazily negated"),
    "resize_": (lambda t, x: x.resize_(2, 4), "has the wrong shape"),
    "double": (lambda t, x: setattr(x, "data", x.data.double()), "got float64"),
    "requires_grad_": (lambda t, x: x.requires_grad_(), "requires grad"),
    "storage": (lambda t, x: x.untyped_storage().resize_(0), "is not at a valid address"),
}


class TestTorch:
    def test_the_same_memory_in_every_dtype_and_shape(self, torch):
        for dtype, shape in itertools.product(draw.DTYPES, [(2, 3), (), (1,), (0,), (3, 0, 2), (2, 1, 3)]):
            tensor = torch.arange(-1.0, int(np.prod(shape)) - 1).reshape(shape).to(getattr(torch, dtype))
            for view in (writable_host_buffer(tensor, "w"), host_buffer(tensor, "w")):
                assert (view.pointer, view.dtype, tuple(view.shape)) == (tensor.data_ptr(), dtype, shape)
                bits = tensor.flatten().view(torch.int32 if dtype == "float32" else torch.int16).numpy()
                np.testing.assert_array_equal(view.data.view(bits.dtype), bits)
        assert host_buffer(torch.arange(12.0).reshape(4, 3)[1:3], "w").data.tolist() == [3, 4, 5, 6, 7, 8]

    def test_a_gradient_that_is_itself_differentiated_is_a_source_but_no_destination(self, torch):
        weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        (gradient,) = torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
        assert host_buffer(gradient, "w").data.tolist() == [4, 6]
        with pytest.raises(BufferRefused, match="destination 'w' requires grad"):
            writable_host_buffer(gradient, "w")

    @pytest.mark.parametrize(("make", "message"), NO_GRADIENTS)
    @pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")  # torch's own of its old kinds
    def test_refused_alone_beside_others_and_by_an_engine_that_knows_others(self, torch, make, message):
        with pytest.raises(BufferRefused, match=f"'w' .*{message}"):
            host_buffer(make(torch), "w")
        for is_watched in (False, True):  # also where all that came before are results, which are no leaves
            engine = GradientEngine(GradientLayout.of([(3,)]))
            for _ in range(20):
                engine.add([torch.ones(3, requires_grad=is_watched) * 1])
                engine.step()
            with pytest.raises(GradientError, match=f"has the wrong shape|{message}"):
                engine.add([make(torch)])

    @pytest.mark.parametrize(
        "use", [lambda t: host_buffer(t, "arrays[0]"), lambda t: clip_by_global_norm([t], 1.0)], ids=["one", "clip"]
    )
    def test_inside_a_transformation(self, torch, use):
        def look(tensor):
            use(tensor)
            return tensor

        with pytest.raises(BufferRefused, match=r"component 'arrays\[0\]' has no storage"):
            torch.func.vmap(look)(torch.ones(2, 3))

    def test_one_that_became_a_leaf_is_not_known_again(self, torch):
        engine, tensor = GradientEngine(GradientLayout.of([(3,)])), torch.ones(3, requires_grad=True) * 1
        for _ in range(2):
            engine.add([tensor])
        tensor.detach_().requires_grad_()
        with pytest.raises(BufferRefused, match="requires grad"):
            engine.add([tensor])

    @pytest.mark.parametrize("how", CHANGES)
    @pytest.mark.parametrize("is_new", [False, True])
    def test_one_that_was_changed_in_place_is_not_known_again(self, torch, how, is_new):
        """Nor one of a loop that makes new ones each time, in which only their form is known."""
        tensor, engine = torch.arange(16.0).view(4, 4), GradientEngine(GradientLayout.of([(4, 4)]))
        change, message = CHANGES[how]
        for _ in range(20):
            engine.add([tensor.clone() if is_new else tensor])
            engine.step()
        change(torch, tensor)
        with pytest.raises(GradientError, match=message):
            engine.add([tensor])
        engine.add([torch.ones(4, 4)])
        assert engine.step().norm == 4

    def test_a_new_one_that_lies_in_the_arena_or_reaches_into_it_is_refused(self, torch, monkeypatch):
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
        for first in (start - 8, start - 4, start, start + 4):
            with pytest.raises(BufferRefused, match="own arena"):
                engine.add([torch.from_numpy(memory[first : first + 12].view(np.float32))])
        engine.add([torch.from_numpy(memory[start - 12 : start].view(np.float32))])

    def test_one_that_is_folded_may_move(self, torch):
        tensor, other = torch.ones(1000), torch.ones(1000)
        engine = GradientEngine(GradientLayout.of({"layers.0.w": (1000,), "head": (1000,)}), hold=2, max_norm=None)
        engine.add([tensor, other])
        engine.accumulator.block(0)
        tensor.data = torch.full((1000,), 7.0)
        assert (engine.step().gradients["layers.0.w"] == 1).all()

    def test_destinations_raise_autograds_version(self, torch):
        """A backward that saved one refuses what it holds now."""
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

    def test_distributed(self, backend):
        """torch's DTensor exports a null pointer (seen with 2.13); this one stands for it, without 15 s of imports."""

        class DTensor(NumPyProducer):
            def to_local(self):
                return self.array

        with pytest.raises(BufferRefused, match="'w' is a distributed tensor"):
            backend.kernels.device.view(DTensor(np.ones(3, np.float32)), "w")

    def test_subclasses_go_by_dlpack(self, torch):
        """What one stands for only its own protocol can say."""

        class Own(torch.Tensor):
            pass

        tensor = torch.ones(3).as_subclass(Own)
        assert not is_torch(tensor)
        assert host_buffer(tensor, "w").pointer == tensor.data_ptr()
        with pytest.raises(BufferRefused, match="lazily negated"):
            host_buffer(torch._neg_view(torch.ones(3)).as_subclass(Own), "w")


@pytest.fixture
def stand_in(device, monkeypatch):
    stand_in = emulated_torch(device.xp.cuda.Stream(non_blocking=True))
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    return stand_in


class TestTorchOnAGpu:
    """A stand-in for torch: what is read, and what is asked."""

    def test_its_memory_and_its_stream(self, device, stand_in, monkeypatch):
        tensor = Tensor(device.put(np.ones((2, 3), np.float16)))
        view = device.kernels.device.view(tensor, "w")
        assert (view.pointer, view.size, view.dtype, view.shape) == (tensor.data_ptr(), 6, "float16", (2, 3))
        assert view.producer == TorchStream(device.kernels.ordinal)
        assert view.producer.stream() == stand_in.current.ptr
        monkeypatch.setitem(sys.modules, "torch", emulated_torch(stand_in.current, is_old=True))
        assert view.producer.stream() == stand_in.current.ptr

    def test_it_is_asked_once_for_a_whole_micro_batch(self, device, stand_in):
        device.kernels.device.views([Tensor(device.put(np.ones(3, np.float32))) for _ in range(20)], ["w"] * 20)
        assert stand_in.asked == [device.kernels.ordinal]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layout": "sparse_coo"}, "got sparse_coo"),
            ({"dtype": "torch.float64"}, "got float64"),
            ({"is_cpu": True}, "got cpu, expected cuda:0"),
            ({"device": types.SimpleNamespace(type="cuda", index=7)}, "got cuda:7, expected cuda:0"),
            ({"device": types.SimpleNamespace(type="mps", index=None)}, "got mps:0, expected cuda:0"),
            ({"requires_grad": True}, "requires grad"),
            ({"is_neg": lambda: True}, "lazily negated"),
            ({"is_contiguous": lambda: False}, "not contiguous"),
        ],
    )
    @pytest.mark.usefixtures("stand_in")
    def test_refused(self, device, change, message):
        with pytest.raises(BufferRefused, match=f"'w' .*{message.replace('cuda:0', device.kernels.device.name)}"):
            device.kernels.device.view(Tensor(device.put(np.ones(3, np.float32)), **change), "w")


def test_each_device_has_a_torch_stream():
    assert len({TorchStream(0), TorchStream(0), TorchStream(1)}) == 2
    assert TorchStream(0) != 0


class TestJax:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda j: j.numpy.zeros(3, "complex64"), "got complex64"),
            (lambda j: j.numpy.zeros(3, "int32"), "got int32"),
            (lambda j: deleted(j.numpy.zeros(3)), r"was deleted by JAX: got float32\[3\]"),
            (lambda j: j.random.key(0), "got key"),
        ],
    )
    def test_refused(self, jax, make, message):
        with pytest.raises(BufferRefused, match=f"component 'w' .*{message}"):
            host_buffer(make(jax), "w")

    def test_inside_a_transformation(self, jax):
        with pytest.raises(BufferRefused, match="component 'w' is traced by JAX"):
            jax.jit(lambda x: host_buffer(x, "w"))(np.zeros(3, np.float32))

    @pytest.mark.usefixtures("jax")
    def test_spread_over_devices(self):
        code = (
            "import jax, numpy as np; from gradengine.arrays.host import host_buffer\n"
            "from jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n"
            "mesh = Mesh(np.array(jax.devices()), ('x',))\n"
            "for spec in (P('x'), P()):\n"
            "    array = jax.device_put(jax.numpy.arange(4.0), NamedSharding(mesh, spec))\n"
            "    try: print(host_buffer(array, 'w').data)\n"
            "    except Exception as e: print(e)\n"
            "print(host_buffer(jax.device_put(jax.numpy.ones(4), jax.devices()[1]), 'w').data)"
        )
        env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PATH": ""}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        sharded, replicated, other = done.stdout.splitlines()
        assert sharded.startswith("component 'w' is sharded over several devices: got 2 devices")
        assert (replicated, other) == ("[0. 1. 2. 3.]", "[1. 1. 1. 1.]")


def deleted(array):
    array.delete()
    return array
