"""Trees of JAX arrays: into an engine by reference, out of it as views, clipped into new trees, refused by name."""

import doctest
import functools
import importlib
import math
import subprocess
import sys
import textwrap
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import strategies as draw
from hostile_values import ENDLESS, HOSTILE, refusal_of
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


@dataclass
class Model:
    head: object
    layers: object


jax.tree_util.register_dataclass(Model, data_fields=["head", "layers"], meta_fields=[])


class Opaque:
    """Registered without names, as older libraries do."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_node(Opaque, lambda node: (node.children, None), lambda _, children: Opaque(*children))


class Label:
    def __str__(self):
        return "<label>"


class Labelled(Opaque):
    pass


jax.tree_util.register_pytree_with_keys(
    Labelled,
    lambda node: ([(Label(), child) for child in node.children], None),
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

    def test_shapes_alone_make_the_same_layout(self):
        abstract = jax.eval_shape(some_tree)
        assert GradientTree(abstract).layout == GradientTree(some_tree()).layout

    def test_a_lone_array_is_a_tree(self):
        assert [slot.name for slot in GradientTree(jnp.ones(3)).layout.slots] == ["gradient"]
        assert_same_trees(handed_back(jnp.ones(3)), jnp.ones(3))

    def test_containers_without_names_are_counted(self):
        assert [slot.name for slot in GradientTree({"x": Opaque(jnp.ones(1), jnp.ones(2))}).layout.slots] == [
            "x.0",
            "x.1",
        ]

    def test_a_path_part_of_the_callers_own_kind_is_its_text(self):
        assert [slot.name for slot in GradientTree(Labelled(jnp.ones(1))).layout.slots] == ["<label>"]

    def test_two_paths_that_give_one_name_are_refused(self):
        with pytest.raises(LayoutMismatch, match=r"two paths of the tree give one name, 'a\.b': got \['a\.b'\] for"):
            GradientTree({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(2)})

    @pytest.mark.parametrize("empty", [{}, [], None, {"a": None, "b": [(), {}]}])
    def test_a_tree_without_arrays_is_refused(self, empty):
        with pytest.raises(LayoutMismatch, match="a layout needs at least one component"):
            GradientTree(empty)

    @pytest.mark.parametrize(
        ("leaf", "dtype"),
        [
            (np.zeros(2), "float64"),
            (np.zeros(2, np.int32), "int32"),
            (np.zeros(2, np.complex64), "complex64"),
            (np.zeros((), jax.dtypes.float0), "void"),
            (np.zeros(2, ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        ],
    )
    def test_other_dtypes_are_refused_by_name(self, leaf, dtype):
        with pytest.raises(BufferRefused, match=rf"component 'a\.1' has an unsupported dtype: got {dtype}"):
            GradientTree({"a": [jnp.ones(1), leaf]})

    @pytest.mark.parametrize("leaf", [1.0, "text", object()])
    def test_what_is_no_array_is_refused_by_name(self, leaf):
        with pytest.raises(LayoutMismatch, match=r"component 'a' has no shape"):
            GradientTree({"a": leaf})

    def test_the_arrays_of_the_template_are_not_kept(self):
        tree = {"w": jnp.ones(3)}
        array_of_it = weakref.ref(tree["w"])
        gradient_tree = GradientTree(tree)
        del tree
        assert array_of_it() is None
        assert gradient_tree.layout.num_elements == 3


class TestIn:
    def test_the_leaves_themselves_are_passed_on(self):
        tree = some_tree()
        passed = GradientTree(tree).gradients(tree)
        assert list(passed) == NAMES
        for one, other in zip(passed.values(), jax.tree.leaves(tree), strict=True):
            assert one is other

    @pytest.mark.parametrize("dtype", draw.DTYPES)
    def test_the_engine_reads_them_where_they_lie(self, dtype):
        leaf = array(0, (5, 7), dtype)
        view = kernels_for("cpu").device.view(leaf, "w")
        assert (view.pointer, view.size, view.dtype) == (leaf.unsafe_buffer_pointer(), 35, dtype)
        assert not view.writable

    def test_none_stands_for_a_component_without_a_gradient(self):
        tree = {"a": jnp.full(2, 6.0), "b": jnp.full(3, 4.0)}
        gradient_tree = GradientTree(tree)
        engine = unclipped(gradient_tree)
        engine.add(gradient_tree.gradients(tree))
        engine.add(gradient_tree.gradients({"a": None, "b": jnp.zeros(3)}))
        assert_same_trees(gradient_tree.tree(engine.step().gradients), {"a": np.full(2, 3.0), "b": np.full(3, 2.0)})

    def test_one_array_may_stand_at_two_places(self):
        same = jnp.arange(4.0)
        assert_same_trees(handed_back({"a": same, "b": [same, same]}), {"a": same, "b": [same, same]})

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
        ("change", "message"),
        [
            ({"a": [jnp.ones((2, 3))]}, r"the tree lacks leaf 'a\.1'; None stands for"),
            ({"a": []}, r"the tree lacks leaf 'a\.0' \(and 1 more\); None stands for"),
            ({"a": None}, r"the tree lacks leaf 'a\.0' \(and 1 more\): got 'a', which it should not have"),
            ({"a": [jnp.ones((2, 3)), jnp.ones(4), jnp.ones(1)]}, r"the tree has an unexpected leaf 'a\.2'$"),
            ({"d": jnp.ones(1), "e": None}, r"the tree has an unexpected leaf 'd' \(and 1 more\)$"),
            ({"c": jnp.ones(6)}, r"the tree has an unexpected leaf 'c': got shape \(6,\), expected None"),
            (
                {"b": Projection(jnp.ones(5), jnp.ones(1))},
                r"the tree has an unexpected leaf 'b\.bias': got shape \(1,\)",
            ),
            ({"a": [jnp.ones((3, 2)), jnp.ones(4)]}, r"'a\.0' has another shape: got \(3, 2\), expected \(2, 3\)"),
            ({"a": [jnp.ones(6), jnp.ones(4)]}, r"'a\.0' has another shape: got \(6,\), expected \(2, 3\)"),
            ({"a": [jnp.ones((2, 3)), 1.0]}, r"'a\.1' has another shape: got float, expected \(4,\)"),
            (
                {"a": (jnp.ones((2, 3)), jnp.ones(4))},
                r"its leaves in other containers: got PyTreeDef\({'a': \(\*, \*\)",
            ),
            ({"b": {"w": jnp.ones(5), "bias": None}}, "its leaves in other containers: got .*, expected PyTreeDef"),
            ({"d": {}}, "its leaves in other containers"),
        ],
    )
    def test_refused_by_the_first_leaf_that_differs(self, change, message):
        with pytest.raises(LayoutMismatch, match=message):
            GradientTree(self.TREE()).gradients(self.TREE() | change)

    @pytest.mark.parametrize("other", [None, 1.0, jnp.ones(3), []])
    def test_what_is_no_such_tree_at_all(self, other):
        with pytest.raises(LayoutMismatch, match=r"the tree lacks leaf 'a\.0' \(and 4 more\)"):
            GradientTree(self.TREE()).gradients(other)

    def test_another_mapping_is_another_structure_as_in_jax_itself(self):
        with pytest.raises(LayoutMismatch, match=r"other containers: got .*OrderedDict"):
            GradientTree({"a": jnp.ones(1)}).gradients(OrderedDict(a=jnp.ones(1)))

    def test_a_long_structure_is_cut(self):
        names = [f"component_{i}" for i in range(99)]
        with pytest.raises(LayoutMismatch) as refusal:
            GradientTree({n: [jnp.ones(1)] for n in names}).gradients({n: (jnp.ones(1),) for n in names})
        assert len(str(refusal.value)) < 900

    @given(trees_with_arrays, trees)
    def test_a_tree_fits_where_its_structure_and_shapes_do_and_nowhere_else(self, tree, other):
        def outline(node):
            leaves, structure = jax.tree.flatten(node, is_leaf=lambda leaf: leaf is None)
            return structure, [None if leaf is None else leaf.shape for leaf in leaves]

        gradient_tree = GradientTree(tree)
        structure, shapes = outline(other)
        without_none = [s if o is None and s is not None else o for o, s in zip(shapes, outline(tree)[1], strict=False)]
        if (structure, without_none) == outline(tree):
            assert set(gradient_tree.gradients(other)) == {slot.name for slot in gradient_tree.layout.slots}
        else:
            with pytest.raises(LayoutMismatch):
                gradient_tree.gradients(other)


class TestOut:
    @given(trees_with_arrays, st.booleans())
    def test_any_tree_comes_back_in_fp32(self, tree, copy):
        assert_same_trees(handed_back(tree, copy=copy), tree)

    def test_views_lie_in_the_arena_itself(self):
        gradient_tree = GradientTree(some_tree())
        engine = unclipped(gradient_tree)
        engine.add(gradient_tree.gradients(some_tree()))
        result = engine.step()
        for leaf, (name, view) in zip(
            jax.tree.leaves(gradient_tree.tree(result.gradients)), result.gradients.items(), strict=True
        ):
            if view.size:
                assert leaf.unsafe_buffer_pointer() == view.ctypes.data, name

    def test_copies_lie_elsewhere_and_outlive_the_next_add(self):
        gradient_tree = GradientTree({"w": jnp.ones(1000)})
        engine = unclipped(gradient_tree)
        engine.add(gradient_tree.gradients({"w": jnp.full(1000, 2.0)}))
        result = engine.step()
        view, copy = gradient_tree.tree(result.gradients), gradient_tree.tree(result.gradients, copy=True)
        assert view["w"].unsafe_buffer_pointer() != copy["w"].unsafe_buffer_pointer()
        engine.add(gradient_tree.gradients({"w": jnp.full(1000, 3.0)}))
        assert (np.asarray(copy["w"]) == 2.0).all()
        assert (np.asarray(view["w"]) == 3.0).all()

    def test_donating_a_view_gives_nobody_the_arena(self):
        gradient_tree = GradientTree({"w": jnp.ones(1000)})
        engine = unclipped(gradient_tree)
        engine.add(gradient_tree.gradients({"w": jnp.ones(1000)}))
        result = engine.step()
        view = gradient_tree.tree(result.gradients)
        moved = jax.jit(lambda tree: {"w": tree["w"] + 1}, donate_argnums=0)(view)
        assert moved["w"].unsafe_buffer_pointer() != result.gradients["w"].ctypes.data
        assert (result.gradients["w"] == 1.0).all()
        assert (np.asarray(moved["w"]) == 2.0).all()

    @pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}])
    def test_what_a_jitted_function_returns_is_new_memory(self, options):
        view = handed_back({"w": jnp.ones(1000)})
        address = view["w"].unsafe_buffer_pointer()
        assert jax.jit(lambda tree: tree, **options)(view)["w"].unsafe_buffer_pointer() != address

    def test_a_view_keeps_the_arena_alive(self):
        view = handed_back({"w": jnp.arange(1000.0)})
        takers = [np.full(1000, -1, np.float32) for _ in range(100)]
        assert len(takers) == 100
        assert_same_trees(view, {"w": np.arange(1000.0)})

    def test_an_optimizers_loop_is_the_same_by_views_and_by_copies(self):
        """What the module promises of the usual loop: the next gradients wait for all that reads these."""
        assert_same_trees(trained(copy=False), trained(copy=True))

    @pytest.mark.parametrize(
        ("gradients", "message"),
        [
            ({"a": np.ones(2, np.float32)}, "gradients of the tree lack component 'b'"),
            ({"a": None, "b": None, "c": None}, "the tree has no component 'c'"),
            ([None], "another number of gradients than the tree has: got 1, expected 2: a, b"),
        ],
    )
    def test_other_components_are_refused(self, gradients, message):
        with pytest.raises(LayoutMismatch, match=message):
            GradientTree({"a": jnp.ones(2), "b": jnp.ones(3)}).tree(gradients)

    def test_none_comes_back_where_there_is_no_gradient(self):
        gradient_tree = GradientTree({"a": jnp.ones(2), "b": jnp.ones(3)})
        for copy in (False, True):
            got = gradient_tree.tree([None, np.ones(3, np.float32)], copy=copy)
            assert got["a"] is None
            assert got["b"].tolist() == [1, 1, 1]

    def test_destinations_that_jax_cannot_read_in_place_are_copied_only_where_that_is_asked_for(self):
        tree = {"w": jnp.asarray([1.0, 2.0], jnp.bfloat16)}
        gradient_tree = GradientTree(tree)
        engine = unclipped(gradient_tree)
        engine.add(gradient_tree.gradients(tree))
        result = engine.step(out={"w": np.zeros(2, ml_dtypes.bfloat16)})
        with pytest.raises(BufferRefused, match=r"JAX cannot read component 'w' in place .*copy=True"):
            gradient_tree.tree(result.gradients)
        assert_same_trees(gradient_tree.tree(result.gradients, copy=True), tree, dtype=None)

    def test_jax_arrays_are_no_destinations(self):
        tree = {"w": jnp.ones(2)}
        gradient_tree = GradientTree(tree)
        engine = unclipped(gradient_tree)
        engine.add(gradient_tree.gradients(tree))
        with pytest.raises(BufferRefused, match="destination 'w' is read-only"):
            engine.step(out=gradient_tree.gradients({"w": jnp.zeros(2)}))
        assert_same_trees(gradient_tree.tree(engine.step().gradients), tree)


def trained(copy):
    """Four steps of momentum on a small regression, its state updated leaf by leaf and nowhere waited for."""
    x, y = array(1, (256, 64)), array(2, (256,))
    differentiated = jax.jit(jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2)))
    parameters = {"w": array(3, (64, 128)), "v": array(4, (128,))}
    velocity = jax.tree.map(jnp.zeros_like, parameters)
    gradient_tree = GradientTree(parameters)
    engine = GradientEngine(gradient_tree.layout, max_norm=0.5)
    for _ in range(4):
        for _ in range(2):
            engine.add(gradient_tree.gradients(differentiated(parameters)))
        gradients = gradient_tree.tree(engine.step().gradients, copy=copy)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
        parameters = jax.tree.map(lambda p, v: p - 0.1 * v, parameters, velocity)
    return parameters


class TestClip:
    def test_known_values(self):
        tree = {"a": jnp.asarray([3.0, 0.0]), "b": [jnp.asarray(4.0, jnp.bfloat16), None]}
        clipped, norm = clip_by_global_norm(tree, 2.5)
        assert norm == 5.0
        assert isinstance(norm, float)
        assert_same_trees(clipped, {"a": np.float32([1.5, 0]), "b": [ml_dtypes.bfloat16(2.0), None]}, dtype=None)

    @given(trees, st.floats(2.0**-10, 2.0**10))
    def test_as_the_definition_in_float64(self, tree, max_norm):
        clipped, norm = clip_by_global_norm(tree, max_norm)
        wide = [leaf.astype(np.float64) for leaf in arrays_of(tree)]
        exact = math.sqrt(sum(float(np.sum(leaf * leaf)) for leaf in wide))
        assert norm == pytest.approx(exact, rel=1e-6)
        assert jax.tree.structure(clipped) == jax.tree.structure(tree)
        for got, leaf, value in zip(arrays_of(clipped), arrays_of(tree), wide, strict=True):
            assert got.dtype == leaf.dtype
            expected = value * min(1.0, max_norm / exact if exact else 1.0)
            rounding = 4 * ROUNDING["float32"] + ROUNDING[got.dtype.name]
            np.testing.assert_allclose(got.astype(np.float64), expected, rtol=2 * rounding, atol=1e-7)

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

    @pytest.mark.parametrize("bound", [5.0, 6.0, math.inf, None])
    def test_a_norm_within_the_bound_gives_the_tree_itself(self, bound):
        tree = {"w": jnp.asarray([3.0, 4.0])}
        clipped, norm = clip_by_global_norm(tree, bound)
        assert clipped is tree
        assert norm == 5.0

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_scales_nothing_and_shows_in_the_norm(self, bad):
        tree = {"w": jnp.asarray([3.0, bad])}
        clipped, norm = clip_by_global_norm(tree, 1.0)
        assert clipped is tree
        assert not math.isfinite(norm)

    def test_a_bound_of_zero_is_refused(self):
        with pytest.raises(CallerError, match="to switch clipping off pass None"):
            clip_by_global_norm([jnp.asarray([3.0, 4.0])], 0.0)

    @pytest.mark.parametrize("empty", [{}, [], None, {"a": None, "b": ()}, {"a": jnp.zeros((0, 3))}])
    def test_nothing_has_norm_zero(self, empty):
        assert clip_by_global_norm(empty, 1.0) == (empty, 0.0)

    def test_one_array_twice_counts_twice(self):
        same = jnp.asarray([3.0])
        clipped, norm = clip_by_global_norm({"a": same, "b": same}, 1.0)
        assert norm == pytest.approx(math.sqrt(18))
        assert float(clipped["a"][0]) == float(clipped["b"][0]) == pytest.approx(math.sqrt(0.5))

    @pytest.mark.parametrize("max_norm", [-1.0, math.nan, "x"])
    def test_a_bound_that_is_none_is_refused(self, max_norm):
        with pytest.raises(CallerError, match=r"max_norm is (out|not) "):
            clip_by_global_norm({"w": jnp.ones(1)}, max_norm)

    @pytest.mark.parametrize("leaf", [np.zeros(2), jnp.arange(2), 1.0])
    def test_other_leaves_are_refused_by_name(self, leaf):
        with pytest.raises(BufferRefused, match=r"component 'a\.1' (has an unsupported dtype|is neither a JAX nor)"):
            clip_by_global_norm({"a": [jnp.ones(1), leaf]}, 1.0)


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
        tree = {"a": [jnp.ones((2,)), jnp.ones((3,))]}
        if transformation is jax.vmap:
            tree = jax.tree.map(lambda leaf: leaf[None], tree)
        with pytest.raises(BufferRefused, match=r"component 'a\.0' is traced by JAX and has no memory yet"):
            transformation(lambda tree: passed_on(way, tree))(tree)

    @ENGINE_OR_CLIP
    @pytest.mark.parametrize("first", [True, False])
    def test_deleted_arrays(self, way, first):
        leaves = [jnp.ones(2), jnp.ones(3)]
        leaves[0 if first else 1].delete()
        with pytest.raises(BufferRefused, match=rf"component 'a\.{0 if first else 1}' was deleted by JAX"):
            passed_on(way, {"a": leaves})

    @ENGINE_OR_CLIP
    def test_donated_arrays(self, way):
        leaf = jnp.ones(3)
        jax.jit(lambda x: x + 1, donate_argnums=0)(leaf)
        with pytest.raises(BufferRefused, match=r"component 'a\.1' was deleted by JAX: .*do not donate"):
            passed_on(way, {"a": [jnp.ones(2), leaf]})

    @pytest.mark.parametrize("dtype", [np.float64, np.int32])
    def test_another_dtype_than_the_templates(self, dtype):
        with pytest.raises(BufferRefused, match=rf"component 'a\.1' has an unsupported dtype: got {dtype.__name__}"):
            passed_on("engine", {"a": [jnp.ones(2), np.ones(3, dtype)]})


def test_arrays_on_several_devices_are_refused_and_those_on_one_of_them_are_taken():
    script = """
        import jax, jax.numpy as jnp, numpy as np
        from gradengine import GradientEngine
        from gradengine.errors import BufferRefused
        from gradengine.jax import GradientTree, clip_by_global_norm

        one, other = jax.devices()
        halves = jax.sharding.Mesh(np.array([one, other]), "x")
        def spread(spec):
            return jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(halves, jax.sharding.PartitionSpec(spec)))

        engine = GradientEngine(GradientTree({"w": jnp.ones(4)}).layout)
        for spec in ("x", None):
            tree = {"w": spread(spec)}
            gradient_tree = GradientTree(tree)
            for call in (lambda: engine.add(gradient_tree.gradients(tree)), lambda: clip_by_global_norm(tree, 1.0)):
                try:
                    call()
                except BufferRefused as refusal:
                    print(refusal)
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
    refusal = (
        "component 'w' is sharded over several devices: got 2 devices, expected one device; pass each device's shard"
    )
    assert [line[: len(refusal)] for line in shown[:-1]] == [refusal] * 4
    assert shown[-1] == "4.0 True True"


def test_the_engine_takes_jax_arrays_without_this_module():
    code = "import gradengine, sys; assert not {'jax', 'gradengine.jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize("file", ["tree", "clipping"])
def test_the_examples_in_the_docstrings_run(file):
    """Also where doctests are collected without JAX, and these files left out."""
    found = doctest.testmod(importlib.import_module(f"gradengine.jax.{file}"))
    assert found.attempted >= 2
    assert found.failed == 0


def test_optax_is_needed_for_its_own_function_alone(monkeypatch):
    code = "import gradengine.jax, sys; assert 'optax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(DeviceUnavailable, match="multi_steps needs optax, which is not installed; pip install optax"):
        multi_steps(None, None)


@pytest.mark.parametrize(
    "call",
    [
        GradientTree,
        lambda v: GradientTree({"w": jnp.ones(2)}).gradients(v),
        lambda v: GradientTree({"w": jnp.ones(2)}).tree(v),
        lambda v: GradientTree({"w": jnp.ones(2)}).tree({"w": v}, copy=True),
        lambda v: GradientTree({"w": jnp.ones(2)}).tree({"w": np.ones(2, np.float32)}, copy=v),
        lambda v: clip_by_global_norm(v, 1.0),
        lambda v: clip_by_global_norm({"w": v}, 1.0),
        lambda v: clip_by_global_norm({"w": jnp.ones(2)}, v),
    ],
)
def test_whatever_a_call_is_given_it_is_taken_or_refused_by_an_error_of_ours(call):
    values = [*HOSTILE, *ENDLESS[-1:], jnp.float32(2), jnp.ones(2)]
    refusals = [refusal_of(functools.partial(call, value)) for value in values]
    assert max(map(len, refusals)) < 1500
