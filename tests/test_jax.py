"""Trees of JAX arrays: into an engine by reference, out of it as views, clipped into new trees, refused by name."""

import functools
import math
import subprocess
import sys
import textwrap
import weakref
from collections import OrderedDict
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import strategies as draw
from hostile_values import HOSTILE, refusal_of
from hypothesis import given
from hypothesis import strategies as st

from gradengine import GradientEngine
from gradengine.errors import BufferRefused, CallerError, DeviceUnavailable, LayoutMismatch
from gradengine.kernels import kernels_for

jax = pytest.importorskip("jax")
jnp = jax.numpy

from gradengine.jax import GradientTree, clip_by_global_norm, multi_steps  # noqa: E402

ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half an ulp of 1


class Projection(NamedTuple):
    w: object
    bias: object = None


Model = make_dataclass("Model", ["head", "layers"])
jax.tree_util.register_dataclass(Model, data_fields=["head", "layers"], meta_fields=[])


class Opaque:
    """Registered without names, as older libraries do."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_node(Opaque, lambda node: (node.children, None), lambda _, children: Opaque(*children))


class Labelled(Opaque):
    """Registered with names that are neither keys nor positions."""


jax.tree_util.register_pytree_with_keys(
    Labelled,
    lambda node: ([(SimpleNamespace(label=1), child) for child in node.children], None),
    lambda _, children: Labelled(*children),
)


def array(seed, shape=(), dtype="float32", magnitude=1.0):
    return jnp.asarray(draw.random_array(seed, shape, dtype, magnitude))


def some_tree(seed=0):
    """Every kind of container, leaf and dtype once."""
    return {
        "layers": [
            {"wq": array([seed, 0], (3, 5)), "norm": array([seed, 1], (5,), "float16")},
            {"wq": array([seed, 2], (3, 5)), "norm": None},
        ],
        "head": Projection(array([seed, 3], (7, 33), "bfloat16"), array([seed, 4])),
        "model": Model(head=(array([seed, 5], (0, 4)),), layers=None),
    }


NAMES = ["head.w", "head.bias", "layers.0.norm", "layers.0.wq", "layers.1.wq", "model.head.0"]


def arrays_of(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same_trees(got, expected, dtype=np.float32):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(arrays_of(got), arrays_of(expected), strict=True):
        assert one.shape == other.shape
        draw.assert_same_bits(one, np.asarray(other, dtype or other.dtype))


def unclipped(gradient_tree, **options):
    return GradientEngine(gradient_tree.layout, max_norm=None, **options)


def handed_back(tree, **options):
    gradient_tree = GradientTree(tree)
    engine = unclipped(gradient_tree)
    engine.add(gradient_tree.gradients(tree))
    return gradient_tree.tree(engine.step().gradients, **options)


@st.composite
def leaves(draw_from):
    if draw_from(st.integers(0, 5)) == 0:
        return None
    return array(draw_from(draw.seeds), draw_from(draw.shapes), draw_from(draw.dtypes))


def containers(children):
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(draw.words, children, max_size=3),
        st.builds(Projection, children, children),
        st.builds(Model, children, children),
    )


trees = st.recursive(leaves(), containers, max_leaves=8)
trees_with_arrays = trees.filter(jax.tree.leaves)


class TestLayout:
    def test_components_are_named_by_their_paths_in_the_order_of_the_leaves(self):
        layout = GradientTree(some_tree()).layout
        assert [slot.name for slot in layout.slots] == NAMES
        assert [slot.shape for slot in layout.slots] == [leaf.shape for leaf in jax.tree.leaves(some_tree())]
        assert [block.name for block in layout.blocks] == ["layers.0", "layers.1"]
        assert GradientTree(jax.eval_shape(some_tree)).layout == layout

    def test_other_paths_have_names_too(self):
        for tree, names in (
            (jnp.ones(3), ["gradient"]),
            ({"x": Opaque(jnp.ones(1), jnp.ones(2))}, ["x.0", "x.1"]),
            (Labelled(jnp.ones(1)), ["namespace(label=1)"]),
        ):
            assert [slot.name for slot in GradientTree(tree).layout.slots] == names
            assert_same_trees(handed_back(tree), tree)

    def test_what_has_no_layout_is_refused_by_name(self):
        for tree, says in (
            ({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(2)}, r"'a\.b': got \['a\.b'\] for"),
            ({"a": None, "b": [(), {}]}, "at least one component"),
            ({"a": 1.0}, "'a' has no shape"),
        ):
            with pytest.raises(LayoutMismatch, match=says):
                GradientTree(tree)
        for dtype in ("float64", "int32", "complex64", jax.dtypes.float0, ml_dtypes.float8_e4m3fn):
            with pytest.raises(BufferRefused, match=rf"'a\.1' .*{np.dtype(dtype).name.rstrip('0123456789')}"):
                GradientTree({"a": [jnp.ones(1), np.zeros(2, dtype)]})

    def test_the_arrays_of_the_template_are_not_kept(self):
        tree = {"w": jnp.ones(3)}
        array_of_it = weakref.ref(tree["w"])
        gradient_tree = GradientTree(tree)
        del tree
        assert array_of_it() is None
        assert gradient_tree.layout.num_elements == 3


class TestIn:
    def test_the_leaves_themselves_are_passed_on_and_read_where_they_lie(self):
        tree = some_tree()
        passed = GradientTree(tree).gradients(tree)
        assert list(passed) == NAMES
        for one, other in zip(passed.values(), jax.tree.leaves(tree), strict=True):
            assert one is other
            view = kernels_for("cpu").device.view(one, "w")
            assert (view.size, view.dtype, view.writable) == (one.size, one.dtype.name, False)
            assert view.pointer == one.unsafe_buffer_pointer() or not one.size

    def test_none_stands_for_no_gradient_in_and_out_and_an_array_may_stand_at_two_places(self):
        same = jnp.full(3, 4.0)
        tree = {"a": jnp.full(2, 6.0), "b": [same, same]}
        gradient_tree = GradientTree(tree)
        engine = unclipped(gradient_tree)
        engine.add(gradient_tree.gradients(tree))
        engine.add(gradient_tree.gradients({"a": None, "b": [same, jnp.zeros(3)]}))
        expected = {"a": np.full(2, 3.0), "b": [np.full(3, 4.0), np.full(3, 2.0)]}
        result = engine.step()
        for copy in (False, True):
            assert_same_trees(gradient_tree.tree(result.gradients, copy=copy), expected)
            assert gradient_tree.tree({**result.gradients, "a": None}, copy=copy)["a"] is None

    @pytest.mark.parametrize("hold", [1, 2, 3])
    @pytest.mark.parametrize("way", ["dropped", "deleted", "donated"])
    def test_arrays_that_go_right_after_add_do_no_harm(self, hold, way):
        """Also where they are held by reference: what took their memory's place would show in the sum."""
        shape, donated = (1 << 16,), jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
        gradient_tree = GradientTree({"w": jnp.zeros(shape)})
        engine = unclipped(gradient_tree, hold=hold)
        takers = []
        for value in (1.0, 2.0, 3.0):
            leaf = jnp.full(shape, value)
            engine.add(gradient_tree.gradients({"w": leaf}))
            if way == "deleted":
                leaf.delete()
            if way == "donated":
                takers.append(donated(leaf).block_until_ready())
            del leaf
            takers += [jnp.full(shape, -9.0).block_until_ready() for _ in range(3)]
        np.testing.assert_array_equal(engine.step().gradients["w"], np.full(shape, 2.0, np.float32))

    @given(trees_with_arrays, st.lists(draw.weights, min_size=1, max_size=3))
    def test_any_tree_is_accumulated_as_the_contract_says(self, tree, weights):
        gradient_tree = GradientTree(tree)
        engine = unclipped(gradient_tree)
        for weight in weights:
            engine.add(gradient_tree.gradients(tree), weight)
        result = engine.step(deferred=True)
        got = gradient_tree.tree(result.sums)
        for one, leaf in zip(arrays_of(got), arrays_of(tree), strict=True):
            folded = draw.folded(None, [leaf] * len(weights), [np.float32(w) for w in weights], True)
            draw.assert_same_bits(one, folded)


class TestOtherStructure:
    TREE = staticmethod(lambda: {"a": [jnp.ones((2, 3)), jnp.ones(4)], "b": Projection(jnp.ones(5)), "c": None})

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"a": [jnp.ones((2, 3))]}, r"lacks leaf 'a\.1'; pass None for"),
            ({"a": None}, r"lacks leaf 'a\.0' \(and 1 more\); pass"),
            ({"a": [jnp.ones((2, 3)), jnp.ones(4), jnp.ones(1)]}, r"unexpected leaf 'a\.2'$"),
            ({"d": jnp.ones(1), "e": None}, r"unexpected leaf 'd' \(and 1 more\)$"),
            ({"c": jnp.ones(6)}, r"'c' has the wrong shape: got \(6,\), expected None"),
            ({"b": Projection(jnp.ones(5), jnp.ones(1))}, r"'b\.bias' has the wrong shape: got \(1,\), expected None"),
            ({"a": [jnp.ones((3, 2)), jnp.ones(4)]}, r"'a\.0' .* got \(3, 2\), expected \(2, 3\)"),
            ({"a": [jnp.ones((2, 3)), 1.0]}, r"'a\.1' .* got float, expected \(4,\)"),
            ({"a": (jnp.ones((2, 3)), jnp.ones(4))}, r"wrong containers: got PyTreeDef\({'a': \(\*, \*\)"),
            ({"d": {}}, "wrong containers"),
        ],
    )
    def test_refused_by_the_first_leaf_that_differs(self, change, says):
        with pytest.raises(LayoutMismatch, match=says):
            GradientTree(self.TREE()).gradients(self.TREE() | change)

    def test_what_is_no_such_tree_at_all_or_another_mapping_or_long(self):
        for other in (None, 1.0, jnp.ones(3), []):
            with pytest.raises(LayoutMismatch, match=r"lacks leaf 'a\.0' \(and 4 more\)"):
                GradientTree(self.TREE()).gradients(other)
        names = [f"component_{i}" for i in range(99)]
        with pytest.raises(LayoutMismatch, match="OrderedDict") as refusal:
            GradientTree({n: jnp.ones(1) for n in names}).gradients(OrderedDict((n, jnp.ones(1)) for n in names))
        assert len(str(refusal.value)) < 900


class TestOut:
    @given(trees_with_arrays, st.booleans())
    def test_any_tree_comes_back_in_fp32(self, tree, copy):
        assert_same_trees(handed_back(tree, copy=copy), tree)

    def test_views_lie_in_the_arena_and_copies_elsewhere_which_outlive_the_next_add(self):
        gradient_tree = GradientTree({"none": jnp.zeros(0), "w": jnp.ones(1000)})
        engine = unclipped(gradient_tree)
        engine.add(gradient_tree.gradients({"none": None, "w": jnp.full(1000, 2.0)}))
        gradients = engine.step().gradients
        view, copy = (gradient_tree.tree(gradients, copy=copy)["w"] for copy in (False, True))
        assert view.unsafe_buffer_pointer() == gradients["w"].ctypes.data != copy.unsafe_buffer_pointer()
        for function, options in ((lambda w: w, {}), (lambda w: w, {"donate_argnums": 0}), (lambda w: w + 1, {})):
            moved = jax.jit(function, **options)(gradient_tree.tree(gradients)["w"])  # donated or not: new memory
            assert moved.unsafe_buffer_pointer() != gradients["w"].ctypes.data
            assert (gradients["w"] == 2.0).all()
        engine.add(gradient_tree.gradients({"none": None, "w": jnp.full(1000, 3.0)}))
        assert (np.asarray(copy) == 2.0).all()
        assert (np.asarray(view) == 3.0).all()

    def test_other_components_are_refused(self):
        for gradients, says in (
            ({"a": np.ones(2, np.float32)}, "'b'"),
            ({"a": None, "b": None, "c": None}, "'c'"),
            ([None], "got 1, expected 2"),
        ):
            with pytest.raises(LayoutMismatch, match=says):
                GradientTree({"a": jnp.ones(2), "b": jnp.ones(3)}).tree(gradients)

    def test_destinations_that_jax_cannot_read_in_place_are_copied_only_where_that_is_asked_for(self):
        tree = {"w": jnp.asarray([1.0, 2.0], jnp.bfloat16)}
        gradient_tree = GradientTree(tree)
        engine = unclipped(gradient_tree)
        engine.add(gradient_tree.gradients(tree))
        result = engine.step(out={"w": np.zeros(2, ml_dtypes.bfloat16)})
        with pytest.raises(BufferRefused, match=r"JAX cannot read component 'w' in place .*copy=True"):
            gradient_tree.tree(result.gradients)
        assert_same_trees(gradient_tree.tree(result.gradients, copy=True), tree, dtype=None)


class TestClip:
    def test_known_values(self):
        same = jnp.asarray([3.0, 0.0])
        tree = {"a": same, "b": [jnp.asarray(4.0, jnp.bfloat16), None]}
        for bound in (5.0, 6.0, math.inf, None):
            clipped, norm = clip_by_global_norm(tree, bound)
            assert clipped is tree
            assert isinstance(norm, float)
        clipped, norm = clip_by_global_norm(tree, 2.5)
        assert norm == 5.0
        assert_same_trees(clipped, {"a": np.float32([1.5, 0]), "b": [ml_dtypes.bfloat16(2.0), None]}, dtype=None)
        assert clip_by_global_norm([same, same], 1.0)[1] == pytest.approx(math.sqrt(18))  # twice
        for empty in ({}, [], None, {"a": None, "b": ()}, {"a": jnp.zeros((0, 3))}):
            assert clip_by_global_norm(empty, 1.0) == (empty, 0.0)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_scales_nothing_and_shows_in_the_norm(self, bad):
        tree = {"w": jnp.asarray([3.0, bad])}
        clipped, norm = clip_by_global_norm(tree, 1.0)
        assert clipped is tree
        assert not math.isfinite(norm)

    def test_other_bounds_and_leaves_are_refused(self):
        for max_norm in (-1.0, 0.0, math.nan, "x"):
            with pytest.raises(CallerError, match="max_norm"):
                clip_by_global_norm({"w": jnp.ones(1)}, max_norm)
        for leaf in (np.zeros(2), jnp.arange(2), 1.0):
            with pytest.raises(BufferRefused, match=r"'a\.1'"):
                clip_by_global_norm({"a": [jnp.ones(1), leaf]}, 1.0)

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_each_element_is_multiplied_once_and_rounded_once(self, dtype):
        tree = {"a": array(0, (1000,), dtype), "b": array(1, (3, 4, 5), dtype)}
        before = arrays_of(tree)
        clipped, norm = clip_by_global_norm(tree, 0.7)
        for got, value in zip(arrays_of(clipped), before, strict=True):
            draw.assert_same_bits(got, draw.scaled(value, 0.7 / norm, dtype))
        assert_same_trees(tree, dict(zip("ab", before, strict=True)), dtype=None)

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_the_norm_is_summed_beyond_the_leaves_dtype(self, dtype):
        """In fp16 the squares overflow, in bf16 and fp32 a sum of a million ones stops growing or drifts."""
        tree = [jnp.full(1_000_000, 300, dtype)]
        clipped, norm = clip_by_global_norm(tree, 1000.0)
        assert norm == pytest.approx(300_000.0, rel=1e-6)
        assert np.asarray(clipped[0]).astype(np.float64) == pytest.approx(1.0, rel=ROUNDING[dtype])


ENGINE_OR_CLIP = pytest.mark.parametrize("way", ["engine", "clip"])


def passed_on(way, tree):
    if way == "clip":
        return clip_by_global_norm(tree, 1.0)
    gradient_tree = GradientTree(jax.eval_shape(lambda: {"a": [jnp.ones(2), jnp.ones(3)]}))
    engine = unclipped(gradient_tree)
    return engine.add(gradient_tree.gradients(tree))


class TestRefusedByName:
    @ENGINE_OR_CLIP
    @pytest.mark.parametrize("transformation", [jax.jit, lambda f: jax.grad(lambda tree: f(tree) or 0.0), jax.vmap])
    def test_tracers(self, way, transformation):
        shapes = [(2,), (3,)] if transformation is not jax.vmap else [(1, 2), (1, 3)]
        with pytest.raises(BufferRefused, match=r"'a\.0' is traced by JAX"):
            transformation(lambda tree: passed_on(way, tree))({"a": [jnp.ones(shape) for shape in shapes]})

    @ENGINE_OR_CLIP
    @pytest.mark.parametrize("spoil", [lambda leaf: leaf.delete(), jax.jit(lambda x: x + 1, donate_argnums=0)])
    def test_deleted_and_donated_arrays(self, way, spoil):
        for position in (0, 1):
            leaves = [jnp.ones(2), jnp.ones(3)]
            spoil(leaves[position])
            with pytest.raises(BufferRefused, match=rf"'a\.{position}' was deleted by JAX"):
                passed_on(way, {"a": leaves})

    def test_jax_arrays_as_destinations_and_another_dtype_than_the_templates(self):
        tree = {"w": jnp.ones(2)}
        gradient_tree = GradientTree(tree)
        engine = unclipped(gradient_tree)
        with pytest.raises(BufferRefused, match=r"'w' .*float64"):
            engine.add(gradient_tree.gradients({"w": np.ones(2)}))
        engine.add(gradient_tree.gradients(tree))
        with pytest.raises(BufferRefused, match="'w' is read-only"):
            engine.step(out=gradient_tree.gradients({"w": jnp.zeros(2)}))
        assert_same_trees(gradient_tree.tree(engine.step().gradients), tree)


def test_sharded_arrays_are_refused_and_those_on_one_device_or_replicated_are_taken(monkeypatch):
    """In another process, which has two devices; and which loads no framework before it is asked for."""
    script = """
        import sys
        from gradengine import GradientEngine
        assert not {"jax", "gradengine.jax"} & set(sys.modules)
        import jax, jax.numpy as jnp, numpy as np
        from gradengine.errors import BufferRefused
        from gradengine.jax import GradientTree, clip_by_global_norm
        assert "optax" not in sys.modules

        one, other = jax.devices()
        halves = jax.sharding.Mesh(np.array([one, other]), "x")
        engine = GradientEngine(GradientTree({"w": jnp.ones(4)}).layout)
        for spec in ("x", None):
            spread = jax.sharding.NamedSharding(halves, jax.sharding.PartitionSpec(spec))
            tree = {"w": jax.device_put(jnp.full(4, 2.0), spread)}
            passed = GradientTree(tree).gradients(tree)
            clip = lambda: print(clip_by_global_norm(tree, 1.0)[0]["w"].sharding.is_fully_replicated)
            for call in (lambda: engine.add(passed), clip):
                try:
                    call()
                except BufferRefused as refusal:
                    print(refusal)
        print(engine.step().norm)
        tree = {"w": jax.device_put(jnp.full(4, 2.0), other), "v": jnp.zeros(1)}
        clipped, norm = clip_by_global_norm(tree, 1.0)
        print(norm, clipped["w"].devices() == {other}, clipped["v"].devices() == {one})
    """
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert ["'w' is sharded over several devices: got 2 devices" in line for line in shown[:2]] == [True] * 2
    assert shown[2:] == ["True", "4.0", "4.0 True True"]
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(DeviceUnavailable, match="optax"):
        multi_steps(None, None)


TWO = GradientTree({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    "call",
    [
        *(GradientTree, TWO.gradients, TWO.tree),
        lambda v: TWO.tree({"w": np.ones(2, np.float32)}, copy=v),
        *(lambda v: clip_by_global_norm(v, 1.0), lambda v: clip_by_global_norm({"w": v}, 1.0)),
        lambda v: clip_by_global_norm({"w": jnp.ones(2)}, v),
    ],
)
def test_whatever_a_call_is_given_it_is_taken_or_refused_by_an_error_of_ours(call):
    refusals = [refusal_of(functools.partial(call, value)) for value in [*HOSTILE, jnp.float32(2), jnp.ones(2)]]
    assert max(map(len, refusals)) < 1500
