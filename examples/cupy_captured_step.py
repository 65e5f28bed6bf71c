"""A CuPy training loop that never waits for the GPU, with the window and its step in one CUDA graph.

Shows `engine.capture()`, which records sum, norm and check of four micro-batches once. `graph.replay()` runs them by
one launch. The step is deferred, so the arena keeps the plain sum. AdamW is one kernel for each parameter. It
multiplies by `result.factor` (average and clip in one) and reads `result.skipped` in device memory. So scaling needs no
pass, and a gradient that is not finite needs no `if` on the host.

Install in a clone ('.[cuda12]' or '.[cuda13]', by the CUDA version that nvidia-smi shows) and run:

    pip install '.[cuda12]'
    python examples/cupy_captured_step.py

The example checks itself against NumPy in float64, step by step. Weights, both moments, norm and clip scale must agree
to `TOLERANCE`. (A factor on all gradients hardly changes AdamW's weights, but it changes the moments.) The step with a
NaN must change nothing. Otherwise it exits with 1.
"""

import sys
from typing import Any

import numpy as np

from gradengine import GradientEngine, GradientLayout

try:
    import cupy
except ModuleNotFoundError:
    sys.exit("this example needs CuPy and a GPU: pip install 'gradengine[cuda12]', or [cuda13] (docs/concepts/gpu.md)")

FEATURES, EXAMPLES, MICRO_BATCHES, STEPS, BAD_STEP = 1000, 8, 4, 16, 5
RATE, BETA1, BETA2, EPSILON, DECAY = OPTIONS = 0.1, 0.9, 0.95, 1e-8, 0.01
MAX_NORM = 20.0
TOLERANCE = 1e-5  # relative to the largest value (fp32 rounds by 6e-8)
NAMES = ("weights", "first moments", "second moments", "norm", "clip scale")

# The model is target = scale * input + shift for each feature. The loss is the mean squared error over the examples.
backward = cupy.ElementwiseKernel(
    "float32 scale, float32 shift, raw float32 inputs, raw float32 targets",
    "float32 scale_gradient, float32 shift_gradient",
    """
    const int features = _ind.size(), examples = inputs.size() / features;
    scale_gradient = shift_gradient = 0;
    for (int e = 0; e < examples; ++e) {
        const float input = inputs[e * features + i];
        const float slope = 2 * (scale * input + shift - targets[e * features + i]) / examples;
        scale_gradient += slope * input;
        shift_gradient += slope;
    }
    """,
    "least_squares_backward",
)

count = cupy.ElementwiseKernel("raw float32 skipped", "float32 taken", "taken += 1 - skipped[0]", "count_step")

adamw = cupy.ElementwiseKernel(
    """float32 total, raw float32 factor, raw float32 skipped, raw float32 taken,
       float32 rate, float32 beta1, float32 beta2, float32 epsilon, float32 decay""",
    "float32 weight, float32 first, float32 second",
    """
    if (skipped[0] == 0) {
        const float gradient = total * factor[0], t = taken[0];
        first = beta1 * first + (1 - beta1) * gradient;
        second = beta2 * second + (1 - beta2) * gradient * gradient;
        const float mean = first / (1 - powf(beta1, t)), square = second / (1 - powf(beta2, t));
        weight -= rate * (mean / (sqrtf(square) + epsilon) + decay * weight);
    }
    """,
    "adamw",
)


def train(inputs: Any, targets: Any) -> list[list[Any]]:
    """Return copies of the weights, the moments, the norm and the clip scale after every step, on the device."""
    state = weights, first, second = list(cupy.zeros((3, 2, FEATURES), np.float32))
    taken = cupy.zeros(1, np.float32)  # number of steps that were not skipped, counted on the device
    micro_batches = [list(pair) for pair in cupy.zeros((MICRO_BATCHES, 2, FEATURES), np.float32)]
    layout = GradientLayout.of({"scale": (FEATURES,), "shift": (FEATURES,)})
    engine = GradientEngine(layout, "cuda", MAX_NORM, on_non_finite="skip", micro_batches=MICRO_BATCHES)
    with engine.capture() as graph:
        for gradients in micro_batches:
            engine.add(gradients)
        engine.step(deferred=True)
    history = []
    for step in range(STEPS):
        for k, gradients in enumerate(micro_batches):
            backward(*weights, inputs[step, k], targets[step, k], *gradients)
        result = graph.replay()
        count(result.skipped, taken)
        for i, total in enumerate(result.sums.values()):
            adamw(total, result.factor, result.skipped, taken, *OPTIONS, weights[i], first[i], second[i])
        history.append([array.copy() for array in (*state, result.norm, result.scale)])
    return history


def train_plainly(inputs: Any, targets: Any) -> list[list[Any]]:
    """Return the same values, computed by NumPy in float64."""
    weights, first, second = np.zeros((3, 2, FEATURES))
    taken, history = 0, []
    for step in range(STEPS):
        slopes = 2 / EXAMPLES * (weights[0] * inputs[step] + weights[1] - targets[step])
        gradient = np.stack([(slopes * inputs[step]).sum(1), slopes.sum(1)]).mean(1)  # mean over micro-batches
        norm, clip_scale = np.linalg.norm(gradient), 1.0
        if np.isfinite(norm):
            taken, clip_scale = taken + 1, min(1.0, MAX_NORM / norm)
            gradient *= clip_scale
            first = BETA1 * first + (1 - BETA1) * gradient
            second = BETA2 * second + (1 - BETA2) * gradient**2
            mean, square = first / (1 - BETA1**taken), second / (1 - BETA2**taken)
            weights = weights - RATE * (mean / (np.sqrt(square) + EPSILON) + DECAY * weights)
        history.append([weights, first, second, norm, clip_scale])
    return history


def check(history: list[list[Any]], plain: list[list[Any]]) -> None:
    """Raise `AssertionError` if the two differ, or if the step with a NaN was not skipped."""
    for step, (arrays, wanted) in enumerate(zip(history, plain, strict=True)):
        for name, got, exact in zip(NAMES, arrays, wanted, strict=True):
            allowed = TOLERANCE * np.abs(exact).max()
            np.testing.assert_allclose(got, exact, rtol=0, atol=allowed, err_msg=f"step {step}: {name}")
    for name, after, before in zip(NAMES[:3], history[BAD_STEP], history[BAD_STEP - 1], strict=False):
        np.testing.assert_array_equal(after, before, f"step {BAD_STEP} had a NaN and has changed the {name}")


def main() -> None:
    """Train in both ways and compare."""
    random = np.random.default_rng(0)
    inputs = random.standard_normal((STEPS, MICRO_BATCHES, EXAMPLES, FEATURES), np.float32)
    targets = 1.5 * inputs - 0.5 + 0.1 * random.standard_normal(inputs.shape, np.float32)
    inputs[BAD_STEP, 2, 0, 7] = np.nan
    history = [[array.get() for array in arrays] for arrays in train(cupy.asarray(inputs), cupy.asarray(targets))]
    check(history, train_plainly(inputs.astype(np.float64), targets.astype(np.float64)))
    clipped = sum(bool(arrays[-1] < 1) for arrays in history)
    print(f"{STEPS} steps as NumPy's in float64: {clipped} of them clipped, step {BAD_STEP} skipped")


if __name__ == "__main__":
    main()
