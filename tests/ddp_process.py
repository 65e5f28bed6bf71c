"""One rank of torch's DistributedDataParallel over gloo, whose gradients are views of its buckets.

Says of each way to clear them how many micro-batches were taken, and how many buckets there were.
"""

import itertools
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from gradengine import GradientEngine
from gradengine.torch import gradients_of, layout_of

BUCKET_MB = {"one": 25.0, "one for each parameter": 1e-6}


def main(rank, meeting):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for buckets, order, set_to_none in itertools.product(
        BUCKET_MB, (torch.contiguous_format, torch.channels_last), (True, False)
    ):
        module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2))
        module = module.to(memory_format=order)
        parallel = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB[buckets])
        engine = GradientEngine(layout_of(module))
        for _ in range(5):  # the buckets are made anew after the first
            module.zero_grad(set_to_none=set_to_none)
            parallel(torch.randn(2, 3, 6, 6)).sum().backward()
            engine.add(gradients_of(module))
        found = {parameter.grad.untyped_storage() for parameter in module.parameters()}
        print(engine.accumulator.accumulated_count, len(found), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
