"""A torch training loop with bf16 parameters, whose gradients are added up, averaged and clipped in fp32.

Shows the whole loop. Micro-batches of unequal length are weighted by their tokens. The averaged and clipped gradient is
written into the parameters' `.grad`, from which any torch optimizer continues.

Install in a clone ('.[cuda12]' or '.[cuda13]' for --device cuda) and run:

    pip install . torch
    python examples/torch_loop.py [--device cuda] [--steps 20]

The example checks itself against the same step by torch alone. torch adds up `.grad.float()`, divides by the tokens,
clips by `torch.nn.utils.clip_grad_norm_` in fp32 and rounds to bf16. In each step every element must agree within one
unit in the last place of bf16, and the norms within 1e-5. The loss must fall. Otherwise it exits with 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import nn

from gradengine import GradientEngine
from gradengine.torch import gradients_of, layout_of

VOCABULARY, WIDTH, MAX_NORM, LENGTHS = 64, 128, 1.0, (31, 7, 100, 54)


def new_model(device: str) -> nn.Module:
    """Return a small language model in bf16."""
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), hidden, nn.Linear(WIDTH, VOCABULARY))
    return model.to(device, torch.bfloat16)


def micro_batches(step: int, device: str) -> Iterator[torch.Tensor]:
    """Yield texts of several lengths in which each token determines the next."""
    generator = torch.Generator().manual_seed(step)
    for length in LENGTHS:
        text = [int(torch.randint(VOCABULARY, (), generator=generator))]
        while len(text) <= length:
            text.append((5 * text[-1] + 3) % VOCABULARY)
        yield torch.tensor(text, device=device)


class TorchsWay:
    """The same step by torch alone, in fp32."""

    def __init__(self, model: nn.Module) -> None:
        self.sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
        self.tokens = 0

    def add(self, model: nn.Module, tokens: int) -> None:
        """Add a micro-batch's gradients, weighted."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.sums[name] += parameter.grad.float() * tokens
        self.tokens += tokens

    def step(self) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the norm, and the gradients averaged, clipped and rounded to bf16."""
        means = {name: nn.Parameter(torch.empty_like(total)) for name, total in self.sums.items()}
        for name, mean in means.items():
            mean.grad = self.sums[name] / self.tokens
        norm = nn.utils.clip_grad_norm_(means.values(), MAX_NORM)
        return float(norm), {name: mean.grad.bfloat16() for name, mean in means.items() if mean.grad is not None}


def units_apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the difference of two tensors in units in the last place of bf16, element by element."""
    counted = [
        torch.where(bits < 0, -(bits & 0x7FFF), bits) for bits in (t.view(torch.int16).int() for t in (one, other))
    ]
    return (counted[0] - counted[1]).abs()


def main() -> int:
    """Train, compare each step, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", help="Device of the model (cpu, cuda or cuda:1).")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    model = new_model(arguments.device)
    engine = GradientEngine(layout_of(model), device=arguments.device, max_norm=MAX_NORM, micro_batches=len(LENGTHS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, elements, furthest, differing, norm_error = [], 0, 0, 0, 0.0
    for step in range(arguments.steps):
        by_torch, summed_loss = TorchsWay(model), 0.0
        for text in micro_batches(step, arguments.device):
            tokens = len(text) - 1
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(text[:-1]).float(), text[1:])  # mean over the text's tokens
            loss.backward()
            engine.add(gradients_of(model), weight=tokens)
            by_torch.add(model, tokens)
            summed_loss += loss.item() * tokens
        result = engine.step(out=gradients_of(model, allocate=True))

        norm, expected = by_torch.step()
        written = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        apart = torch.cat([units_apart(written[n], expected[n]).flatten() for n in expected])
        elements, differing = elements + apart.numel(), differing + int((apart > 0).sum())
        furthest = max(furthest, int(apart.max()))
        norm_error = max(norm_error, abs(float(result.norm) / norm - 1))
        losses.append(summed_loss / result.weight)
        print(f"step {step:2}  loss {losses[-1]:.4f}  norm {float(result.norm):.5f}  scale {float(result.scale):.4f}")
        optimizer.step()

    print(f"{differing} of {elements} gradient elements differ from torch's, by {furthest} bf16 unit(s) at most")
    print(f"norms differ by {norm_error:.1e} at most")
    agrees = furthest <= 1 and norm_error <= 1e-5 and losses[-1] < losses[0]
    print("agrees" if agrees else "DOES NOT AGREE")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
