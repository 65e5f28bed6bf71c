"""One rank of a training framework over gloo: how far the engine's weights are from those of DistributedDataParallel.

Launchers' variables (RANK, WORLD_SIZE, MASTER_PORT, ...) are set; it prints a number, the largest difference.
"""

import os
import sys

import torch

import gradengine
from gradengine import GradientEngine
from gradengine.torch import layout_of


def weights(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def transformers(folder):
    import test_torch_transformers as single

    from gradengine.torch.transformers import EngineCallback

    options = {"compute_loss_func": None, "ddp_backend": "gloo"}
    theirs = single.trainer_of(folder, single.llama(), max_grad_norm=single.MAX_NORM, **options)
    theirs.train()
    ours = single.trainer_of(folder, single.llama(), **options)
    exchange = gradengine.connect(process_group=torch.distributed.group.WORLD)
    engine = GradientEngine(layout_of(ours.model), max_norm=single.MAX_NORM, average="prescaled", exchange=exchange)
    ours.add_callback(EngineCallback(engine))
    ours.train()
    exchange.close()
    return weights(ours.model), weights(theirs.model)


def lightning(folder):
    import test_torch_lightning as single
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    def strategy():
        return DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo")

    options = {"accumulate_grad_batches": 2}
    theirs = single.fitted(single.Net(), strategy=strategy(), devices=2, gradient_clip_val=single.MAX_NORM, **options)
    with gradengine.connect(f"unix://{folder}/engines", int(os.environ["RANK"]), 2) as exchange:
        options |= {"engine_options": {"exchange": exchange}}
        ours = single.with_engine(single.Net(), strategy=strategy(), devices=2, **options)
    return weights(ours), weights(theirs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    ours, theirs = {"transformers": transformers, "lightning": lightning}[sys.argv[1]](sys.argv[2])
    print("apart", max((mine - other).abs().max().item() for mine, other in zip(ours, theirs, strict=True)), flush=True)
    print("sum", sum(mine.double().sum().item() for mine in ours), flush=True)
    torch.distributed.destroy_process_group()
