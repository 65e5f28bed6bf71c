"""What HF Trainer's and Lightning's doors share, with real ranks; and loops that need no door: Accelerate's, others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import on_ranks
from transports import free_port

torch = pytest.importorskip("torch")

from gradengine import GradientEngine  # noqa: E402
from gradengine.errors import CallerError  # noqa: E402
from gradengine.torch import attach, layout_of  # noqa: E402
from gradengine.torch.trainers import leave_sum_to  # noqa: E402

needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)
K, MAX_NORM = 3, 0.1


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def engine_of(module, **options):
    return GradientEngine(layout_of(module), **{"max_norm": MAX_NORM, "average": "prescaled", **options})


def assert_same(ours, theirs, losses):
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


class TestRanks:
    @needs_distributed
    def test_distributed_data_parallel_leaves_its_sum_to_an_engine_of_the_same_ranks(self, tmp_path):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
        try:
            module = net()
            parallel = torch.nn.parallel.DistributedDataParallel(module)

            def work(exchange):
                engine = engine_of(module, exchange=exchange)
                leave_sum_to(engine, torch.nn.ModuleList([parallel]), 2)  # as a compiled module holds it
                return parallel.require_backward_grad_sync

            assert on_ranks(work, 2) == [False, False]
        finally:
            torch.distributed.destroy_process_group()

    def test_ranks_that_are_not_the_engines_and_what_sums_in_another_way(self):
        leave_sum_to(engine_of(net()), net(), 1)  # one rank needs nothing
        with pytest.raises(CallerError, match="got world size 1, expected 2"):
            leave_sum_to(engine_of(net()), net(), 2)

        def work(exchange):
            with pytest.raises(CallerError, match=r"without DistributedDataParallel: got Sequential"):
                leave_sum_to(engine_of(net(), exchange=exchange), net(), 2)
            return True

        assert on_ranks(work, 2) == [True, True]

    @needs_distributed
    @pytest.mark.parametrize("framework", ["transformers", "lightning"])
    def test_two_ranks_learn_what_they_do_with_distributed_data_parallel(self, framework, tmp_path):
        """Within 1e-6, and all ranks the same bytes."""
        pytest.importorskip(framework)
        pytest.importorskip("peft")
        here, port = Path(__file__).parent, str(free_port())
        names = {"WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        paths = os.pathsep.join([str(here), str(here.parent)])
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(here / "trainers_process.py"), framework, str(tmp_path)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **names, "RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": paths},
            )
            for rank in "01"
        ]
        try:
            said = [rank.communicate(timeout=240)[0].splitlines()[-2:] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert said[0] == said[1]
        assert said[0][0].startswith("apart ")
        assert float(said[0][0].split()[1]) < 1e-6


class TestAccelerate:
    """Its loop with one line for another: of `clip_grad_norm_`."""

    @pytest.fixture(autouse=True)
    def _a_process_of_its_own(self):
        state = pytest.importorskip("accelerate.state")
        yield
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()

    def train(self, module, engine=None, scaler=None, bad=()):
        """Ten micro-batches: the last window is short, and is stepped at the end of the data."""
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=K)
        if scaler is not None:  # Accelerate makes none on the CPU, and unscales in fp16 alone
            accelerator.scaler, accelerator.native_amp, accelerator.state._mixed_precision = scaler, True, "fp16"
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, 8)
        batches = torch.utils.data.DataLoader(torch.randn(10, 6, generator=torch.Generator().manual_seed(1)))
        optimizer, batches, schedule = accelerator.prepare(optimizer, batches, schedule)
        attached, losses, rates = attach(module, engine) if engine else None, [], []
        for _ in range(2):
            for index, batch in enumerate(batches):
                with accelerator.accumulate(module):
                    loss = module(batch).square().mean()
                    losses.append(loss.item())
                    accelerator.backward(loss * (float("inf") if index in bad else 1))
                    if accelerator.sync_gradients:
                        if attached:
                            attached.step(scaler=accelerator.scaler, unscale=False)
                        else:
                            accelerator.clip_grad_norm_(module.parameters(), MAX_NORM)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                rates.append(schedule.get_last_lr())
        return losses, rates

    @pytest.mark.parametrize("bad", [None, (4,)])
    def test_losses_skips_scale_and_weights_are_those_of_its_own_loop(self, bad):
        """With a scaler where one loss is not finite."""
        ours, theirs = net(), net()
        scalers = [bad and torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) for _ in range(2)]
        engine = engine_of(ours, on_non_finite="propagate" if bad else "raise")
        mine, rates = self.train(ours, engine, scalers[0], bad or ())
        other, others = self.train(theirs, None, scalers[1], bad or ())
        assert_same(ours, theirs, (mine, other))
        assert rates == others
        if bad:
            assert scalers[0].state_dict() == scalers[1].state_dict()
            assert scalers[0].get_scale() != 2.0**8
