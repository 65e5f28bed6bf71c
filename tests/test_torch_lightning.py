"""Lightning by the engine's callback, and by hand in manual optimization: as Lightning's own; saved in mid-window."""

import contextlib
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from gradengine import GradientEngine  # noqa: E402
from gradengine.errors import CallerError, LayoutMismatch  # noqa: E402
from gradengine.torch import layout_of  # noqa: E402
from gradengine.torch.lightning import EngineCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")

K, MAX_NORM = 3, 0.1


class Net(LightningModule):
    """Losses are kept; that of a bad micro-batch is infinite, and one that is left out is none."""

    automatic = True

    def __init__(self, bad=(), left_out=()):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.bad, self.left_out, self.losses, self.weights = bad, left_out, [], []
        self.automatic_optimization = self.automatic

    def loss_of(self, batch_idx):
        loss = self.layers(batch_of(batch_idx, self.global_rank)).float().square().mean() * (
            math.inf if batch_idx in self.bad else 1
        )
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.left_out else self.loss_of(batch_idx)

    def on_train_batch_end(self, *_):
        self.weights.append([parameter.detach().clone() for parameter in self.parameters()])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, 8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Net):
    automatic = False


def batch_of(batch_idx, rank):
    """By its number: Lightning leaves it to the loader to go on in mid-epoch."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(batch_idx + 100 * rank))


def data():
    """Ten micro-batches: with K = 3 the last window of an epoch is one of them."""
    return torch.utils.data.DataLoader(torch.arange(10))


def trainer_of(*callbacks, **options):
    options = {"max_epochs": 2, "accumulate_grad_batches": K, **options}
    return Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def fitted(module, *callbacks, ckpt_path=None, **options):
    trainer_of(*callbacks, **options).fit(module, data(), ckpt_path=ckpt_path)
    return module


def callback_of(module, **options):
    return EngineCallback(
        GradientEngine(layout_of(module), **{"max_norm": MAX_NORM, "average": "prescaled", **options})
    )


def with_engine(module, *callbacks, engine_options=None, **options):
    return fitted(module, callback_of(module, **(engine_options or {})), *callbacks, **options)


def fp16():
    """Lightning makes a scaler for a GPU alone, unless it is given this plugin."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    return MixedPrecision("16-mixed", "cpu", scaler)


def assert_same(ours, theirs, rtol=1e-6, weights=1e-6):
    assert ours.losses == pytest.approx(theirs.losses, rel=rtol, nan_ok=True)
    assert len(ours.losses) == 20
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=weights)


def assert_equal(mine, others):
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class TestAsLightningsOwn:
    def test_losses_skips_and_scale_of_a_scaler(self):
        plugins = [fp16(), fp16()]
        ours = with_engine(Net(bad=(4,)), plugins=plugins[:1], engine_options={"on_non_finite": "propagate"})
        theirs = fitted(Net(bad=(4,)), plugins=plugins[1:], gradient_clip_val=MAX_NORM)
        assert_same(ours, theirs, rtol=1e-3, weights=1e-4)
        assert plugins[0].scaler.state_dict() == plugins[1].scaler.state_dict()
        assert_equal(ours.weights[5], ours.weights[2])
        assert any(not torch.equal(*pair) for pair in zip(ours.weights[8], ours.weights[5], strict=True))

    @pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
    def test_micro_batches_that_are_left_out(self):
        """At the end of a window, in its middle, at its beginning, and all of it."""
        ours, theirs = (Net(left_out=(0, 2, 4, 6, 7, 8)) for _ in range(2))
        with_engine(ours)
        fitted(theirs, gradient_clip_val=MAX_NORM)
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
        assert len(ours.losses) == 8
        assert_equal(ours.weights[8], ours.weights[5])

    def test_a_modules_own_optimizer_step(self):
        class Halved(Net):
            def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
                for group in optimizer.param_groups:
                    group["lr"] = 5e-3
                optimizer.step(closure=optimizer_closure)

        assert_same(with_engine(Halved()), fitted(Halved(), gradient_clip_val=MAX_NORM))


def test_a_request_to_stop_ends_the_fit_after_its_step():
    module = Net()
    callback = callback_of(module)
    trainer = trainer_of(callback)
    callback._engine.stop_after_step()
    trainer.fit(module, data())
    assert (trainer.global_step, len(module.losses)) == (1, K)
    fitted(module, callback)
    assert len(module.losses) == K + 20


class Save(Callback):
    """A checkpoint after a micro-batch, and the end."""

    def __init__(self, path, after):
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)
            raise ZeroDivisionError


class TestInTheMiddle:
    @pytest.mark.parametrize("after", [3, 4, 5])
    def test_a_run_goes_on_to_the_same_bytes_from_a_checkpoint_anywhere_in_a_window(self, after, tmp_path):
        whole = with_engine(Net(), max_epochs=1)
        path = tmp_path / "middle.ckpt"
        with pytest.raises(ZeroDivisionError):
            with_engine(Net(), Save(path, after), max_epochs=1)
        resumed = with_engine(Net(), ckpt_path=path, max_epochs=1)
        assert len(resumed.losses) == 10 - after
        assert_equal(resumed.parameters(), whole.parameters())

    def test_what_a_run_that_broke_off_left_is_dropped_by_the_next(self, tmp_path):
        module = Net()
        callback = callback_of(module)
        with pytest.raises(ZeroDivisionError):
            fitted(module, callback, Save(tmp_path / "middle.ckpt", 4), max_epochs=1)
        again = Net()
        again.load_state_dict(module.state_dict())
        fitted(module, callback, max_epochs=1)
        assert module.losses[4:] == with_engine(again, max_epochs=1).losses
        assert callback.result.micro_batches == 1

    def test_a_module_is_fitted_again_also_after_an_error_and_is_as_before(self, tmp_path):
        """By another callback and engine: plain Lightning allows both."""
        module = Net()
        for callbacks in ([], [Save(tmp_path / "middle.ckpt", 4)], []):
            callback = callback_of(module)
            with pytest.raises(ZeroDivisionError) if callbacks else contextlib.nullcontext():
                fitted(module, callback, *callbacks, max_epochs=1)
            assert "optimizer_step" not in vars(module)
            module.loss_of(0).backward()
            assert all(parameter.grad is not None for parameter in module.parameters())
            assert callback.result.step == (0 if callbacks else 3)


@pytest.mark.parametrize(
    ("make", "engine_options", "options", "says"),
    [
        (Net, {"average": "weighted"}, {}, "average='weighted'"),
        (Net, {}, {"gradient_clip_val": 1.0}, "gradient_clip_val: got 1.0"),
        (Manual, {}, {"accumulate_grad_batches": 1}, "manual optimization"),
        (Net, {"on_non_finite": "skip"}, {"plugins": [fp16()]}, "on_non_finite='skip'"),
    ],
)
def test_what_is_refused_before_anything_is_trained(make, engine_options, options, says):
    module = make()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(CallerError, match=says):
        with_engine(module, engine_options=engine_options, **options)
    assert all(map(torch.equal, module.parameters(), before))
    assert "optimizer_step" not in vars(module)


def test_what_does_not_belong_together(monkeypatch):
    with pytest.raises(LayoutMismatch):
        fitted(Net(), callback_of(torch.nn.Linear(2, 2)))
    with pytest.raises(CallerError, match="engine"):
        EngineCallback(Net())
    module = Net()
    trainer = trainer_of(callback_of(module))
    monkeypatch.setattr(type(trainer.strategy), "handles_gradient_accumulation", True)
    with pytest.raises(CallerError, match="accumulates gradients by itself: got SingleDeviceStrategy"):
        trainer.fit(module, data())
