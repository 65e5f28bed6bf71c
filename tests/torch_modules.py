"""Small modules of torch with gradients, and what torch in fp64 makes of them: for the tests of `gradengine.torch`."""

import math
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gradengine import GradientEngine  # noqa: E402
from gradengine.torch import gradients_of, layout_of  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
torch.set_num_threads(1)  # of modules this small more would wait for each other
has_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch < 2.10")
needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


def loop_of_the_readme():
    """The whole training loop that it shows."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    return re.search(r"^```python\n(import torch\n.*?)^```", text, re.DOTALL | re.MULTILINE)[1]


def bits(tensor):
    return tensor.detach().reshape(-1).clone().view(torch.uint8)


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other))


def net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(dtype)


class Branches(torch.nn.Module):
    """Two branches, one of them in a block of its own, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.other, self.tied = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)

    def forward(self, x, block=True):
        return self.tied(self.tied((self.layers[0] if block else self.other)(x)))


def tied():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    return module


def backward(module, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    parameter = next(module.parameters())
    inputs = torch.randn(4, parameter.shape[1], generator=generator).to(parameter.dtype)
    (module(inputs).float().square().mean() * scale).backward()


def accumulated(module, seeds=(0,), weights=(1.0,), **options):
    """An engine with these micro-batches, its window open."""
    engine = GradientEngine(layout_of(module), **options)
    for seed, weight in zip(seeds, weights, strict=True):
        module.zero_grad()
        backward(module, seed, options.get("loss_scale", 1.0))
        engine.add(gradients_of(module), weight)
    module.zero_grad()
    return engine


def averaged(module, seeds, weights, max_norm):
    """What the engine is to hand back, by torch in fp64: name -> gradient."""
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in module.named_parameters()}
    for seed, weight in zip(seeds, weights, strict=True):
        module.zero_grad()
        backward(module, seed)
        for name, p in module.named_parameters():
            total[name] += weight * p.grad.double()
    module.zero_grad()
    mean = {name: value / sum(weights) for name, value in total.items()}
    norm = math.sqrt(sum((value**2).sum().item() for value in mean.values()))
    return {name: value * min(1.0, max_norm / norm) for name, value in mean.items()}
