"""One rank of torch's DistributedDataParallel over gloo, beside an engine: it prints what was found.

How far the engine's gradient is from DDP's, for each window whose losses are divided; DDP's gradients, which are views
of its buckets, are taken by an engine too, whatever way they are cleared.
"""

import contextlib
import copy
import itertools
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from gradengine import GradientEngine, connect
from gradengine.torch import give_gradients, gradients_of, layout_of

K = 3  # micro-batches of a window, by which each loss is divided
WINDOWS = (3, 3, 2)  # the last one is short


def take_views_of_buckets():
    """A bucket of one parameter is changed once, by DDP's copy of a gradient that was cleared."""
    for bucket_mb, order, set_to_none in itertools.product(
        (25.0, 1e-6), (torch.contiguous_format, torch.channels_last), (True, False)
    ):
        module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2))
        module = module.to(memory_format=order)
        parallel = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
        engine = GradientEngine(layout_of(module))
        for _ in range(4):  # the buckets are made anew after the first
            module.zero_grad(set_to_none=set_to_none)
            parallel(torch.randn(2, 3, 6, 6)).sum().backward()
            engine.add(gradients_of(module))
        buckets = {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
        assert len(buckets) == (4 if bucket_mb < 1 else 1)


def print_sums(rank, folder):
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    ours = copy.deepcopy(theirs)
    parallel = DistributedDataParallel(theirs)
    with connect(f"unix://{folder}/engines", rank, 2, timeout=60.0, join_timeout=60.0) as exchange:
        engine = GradientEngine(layout_of(ours), average="prescaled", exchange=exchange)
        torch.manual_seed(1 + rank)
        for count in WINDOWS:
            batches = torch.randn(count, 4, 5)
            for k, batch in enumerate(batches):
                with parallel.no_sync() if k < count - 1 else contextlib.nullcontext():
                    (parallel(batch).square().mean() / K).backward()
            for batch in batches:
                ours.zero_grad()
                (ours(batch).square().mean() / K).backward()
                engine.add(gradients_of(ours))
            print(apart(engine.step(), ours, theirs), flush=True)
        # A rank whose data are used up: torch divides by the number of all ranks.
        batch = torch.randn(4, 5)
        with parallel.join():
            if rank == 0:
                parallel(batch).square().mean().backward()
        ours.zero_grad()
        if rank == 0:
            ours(batch).square().mean().backward()
            engine.add(gradients_of(ours))
        else:
            engine.add(None, weight=0)
        result = engine.step()
        if rank == 0:  # the other has no gradient of DDP's
            print(apart(result, ours, theirs), flush=True)


def apart(result, ours, theirs):
    """The largest difference between the engine's gradient and DDP's, in parts of the largest element."""
    give_gradients(ours, result)
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    found = max((mine.grad - other.grad).abs().max() for mine, other in pairs)
    largest = max(other.grad.abs().max() for _, other in pairs)
    theirs.zero_grad()
    return (found / largest).item()


def main(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    take_views_of_buckets()
    print_sums(rank, folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
