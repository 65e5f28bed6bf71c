"""HF Trainer by the engine's callback: a Llama with LoRA learns what Trainer's own loop teaches it."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from gradengine import GradientEngine  # noqa: E402
from gradengine.accumulate.state import State  # noqa: E402
from gradengine.errors import CallerError, LayoutMismatch  # noqa: E402
from gradengine.torch import layout_of  # noqa: E402
from gradengine.torch.transformers import EngineCallback  # noqa: E402

VOCABULARY, BAD = 64, 63  # a sequence that begins with BAD has a loss that is not finite
K, MAX_NORM = 3, 0.1
RTOL = {"loss": 1e-5, "grad_norm": 1e-5, "learning_rate": 0}  # of what Trainer logs of each step


@pytest.fixture(autouse=True)
def _a_process_of_its_own():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of a model this small more would wait for each other
    yield
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def llama(lora=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def sequences(bad=()):
    """Ten of unlike lengths: with K = 3 the last window of an epoch is one micro-batch."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, BAD, (6 + i,), generator=generator) for i in range(10)]
    for index in bad:
        made[index][0] = BAD
    return [{"input_ids": tokens, "labels": tokens} for tokens in made]


def loss_of(outputs, labels, num_items_in_batch=None):
    """The mean over all tokens of the step, as the model's own; infinite for a bad sequence."""
    losses = torch.nn.functional.cross_entropy(outputs.logits[0, :-1].float(), labels[0, 1:], reduction="sum")
    return losses / (num_items_in_batch or 100) * (math.inf if labels[0, 0] == BAD else 1)


def trainer_of(folder, model, bad=(), scaler=None, compute_loss_func=loss_of, **options):
    options = {
        "max_grad_norm": math.inf, "num_train_epochs": 2, "gradient_accumulation_steps": K, "learning_rate": 1e-2,
        "lr_scheduler_type": "linear", "save_strategy": "no", **options,
    }  # fmt: skip
    args = TrainingArguments(
        folder, per_device_train_batch_size=1, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        **options,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=sequences(bad), compute_loss_func=compute_loss_func)
    if scaler is not None:  # Accelerate makes none on the CPU
        trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler, True
    return trainer


def with_engine(trainer, **options):
    """The trainer's callback, and its engine."""
    engine = GradientEngine(layout_of(trainer.model), **{"max_norm": MAX_NORM, "average": "prescaled", **options})
    callback = EngineCallback(engine)
    trainer.add_callback(callback)
    return callback, engine


def both(folder, make=llama, bad=(), scalers=(None, None), engine_options=None, **options):
    """Trained by Trainer alone, and by the engine."""
    theirs = trainer_of(folder, make(), bad, scalers[0], **{"max_grad_norm": MAX_NORM, **options})
    theirs.train()
    ours = trainer_of(folder, make(), bad, scalers[1], **options)
    with_engine(ours, **(engine_options or {}))
    ours.train()
    return ours, theirs


def assert_same(ours, theirs, weights=1e-6):
    """Losses, norms and learning rates of each step, and the weights at the end."""
    assert len(ours.state.log_history) == len(theirs.state.log_history) > 4
    for mine, other in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        for name in RTOL.keys() & mine.keys():
            assert mine[name] == pytest.approx(other[name], rel=RTOL[name], nan_ok=True), (mine, other)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=weights)


def finite_steps(trainer):
    return [math.isfinite(each["grad_norm"]) for each in trainer.state.log_history[:-1]]


def trained(trainer):
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]


class TestAsTrainersOwn:
    @pytest.mark.parametrize(("max_grad_norm", "takes_tokens"), [(0, True), (math.inf, True), (math.inf, False)])
    def test_a_llama_with_lora(self, tmp_path, max_grad_norm, takes_tokens):
        """Also where Trainer divides the loss by the micro-batches."""
        ours, theirs = (
            trainer_of(tmp_path, llama(), compute_loss_func=None, max_grad_norm=norm)
            for norm in (max_grad_norm, MAX_NORM)
        )
        with_engine(ours)
        for trainer in (ours, theirs):
            trainer.model_accepts_loss_kwargs &= takes_tokens
            trainer.train()
        assert_same(ours, theirs)
        assert theirs.state.log_history[0].keys() - ours.state.log_history[0].keys() <= {"grad_norm"}
        assert max(each["grad_norm"] for each in theirs.state.log_history[:-1]) > 2 * MAX_NORM

    def test_trainers_that_ask_for_no_norm(self, tmp_path, monkeypatch):
        """Versions before 5, without a bound of their own; then no norm is logged."""
        ours, theirs = (trainer_of(tmp_path, llama(), max_grad_norm=norm) for norm in (0, MAX_NORM))
        callback, _ = with_engine(ours)
        monkeypatch.setattr(ours, "_get_grad_norm", lambda *_, **__: None, raising=False)
        for trainer in (ours, theirs):
            trainer.train()
        assert "grad_norm" not in ours.state.log_history[0]
        assert callback.result.step + 1 == ours.state.global_step
        for mine, other in zip(trained(ours), trained(theirs), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)

    def test_losses_skips_scale_and_schedule_of_a_scaler(self, tmp_path):
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) for _ in range(2)]
        options = {"scalers": scalers, "engine_options": {"on_non_finite": "propagate"}, "fp16": True}
        ours, theirs = both(tmp_path, bad=(4,), **options)
        assert_same(ours, theirs, weights=1e-4)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert finite_steps(ours).count(False) == 2
        assert scalers[1].get_scale() != 2.0**8


class FailsAfter(TrainerCallback):
    """It fails after so many micro-batches, and keeps how many each step was of."""

    def __init__(self, micro_batches, callback):
        self.left, self.callback, self.counts = micro_batches, callback, []

    def on_optimizer_step(self, args, state, control, **_):
        self.counts.append(self.callback.result.micro_batches)

    def on_substep_end(self, args, state, control, **_):
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError


def test_what_a_run_that_broke_off_left_is_dropped_by_the_next_after_which_all_is_as_before(tmp_path):
    ours = trainer_of(tmp_path, llama(), num_train_epochs=1)
    callback, engine = with_engine(ours)
    fails = FailsAfter(3, callback)
    ours.add_callback(fails)
    with pytest.raises(ZeroDivisionError):
        ours.train()
    assert engine.accumulator.accumulated_count == 1
    ours.train()
    assert fails.counts == [K, K, K, K, 1]
    assert engine.accumulator.state.now is State.EMPTY
    assert engine.current_step == 1 + ours.state.global_step
    assert "clip_grad_norm_" not in vars(ours.accelerator)
    ours.model(**{name: tokens[None] for name, tokens in sequences()[0].items()}).loss.backward()
    assert all(parameter.grad is not None for parameter in trained(ours))
    assert not engine.has_open_window


def begin(self):
    """A frame of the trainer, as `train()` is, but without DeepSpeed's own."""
    self.callback_handler.on_train_begin(self.args, self.state, self.control)


@pytest.mark.parametrize("saves", ["no", "epoch"])
def test_a_request_to_stop_ends_the_run_after_its_step_and_saves_if_trainer_saves(tmp_path, saves):
    trainer = trainer_of(tmp_path, llama(), save_strategy=saves)
    _, engine = with_engine(trainer)
    engine.stop_after_step()
    trainer.train()
    assert trainer.state.global_step == engine.current_step == 1
    assert (tmp_path / "checkpoint-1").exists() is (saves == "epoch")
    trainer.train()
    assert engine.current_step == 1 + trainer.state.max_steps


class TestRefused:
    @pytest.mark.parametrize(
        ("engine_options", "options", "says"),
        [
            ({"average": "weighted"}, {}, "average='weighted'"),
            ({}, {"max_grad_norm": 1.0}, "max_grad_norm: got 1.0"),
            ({"on_non_finite": "skip"}, {"scaler": torch.amp.GradScaler("cpu")}, "on_non_finite='skip'"),
            ({}, {"is_deepspeed_enabled": True}, "DeepSpeed"),
        ],
    )
    def test_before_anything_is_trained(self, tmp_path, engine_options, options, says):
        is_deepspeed = options.pop("is_deepspeed_enabled", False)
        ours = trainer_of(tmp_path, llama(), **options)
        _, engine = with_engine(ours, **engine_options)
        ours.is_deepspeed_enabled = is_deepspeed
        before = [parameter.detach().clone() for parameter in trained(ours)]
        with pytest.raises(CallerError, match=says):
            begin(ours) if is_deepspeed else ours.train()
        assert all(map(torch.equal, trained(ours), before))
        assert engine.current_step == 0

    def test_what_does_not_belong_together(self, tmp_path):
        ours = trainer_of(tmp_path, llama())
        engine = GradientEngine(layout_of(llama(lora=False)), average="prescaled")
        for given in (EngineCallback, [ours]):
            with pytest.raises(CallerError, match=r"engine .*callbacks=\[EngineCallback\(engine\)\]"):
                Trainer(ours.model, ours.args, callbacks=[given]) if given is EngineCallback else EngineCallback(*given)
        callback = EngineCallback(engine)
        with pytest.raises(CallerError, match="no Trainer"):
            callback.on_train_begin(ours.args, ours.state, ours.control)
        with pytest.raises(LayoutMismatch):
            Trainer(ours.model, ours.args, train_dataset=sequences(), callbacks=[callback]).train()
