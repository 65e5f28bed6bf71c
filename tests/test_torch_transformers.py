"""HF Trainer by the engine's callback: a Llama with LoRA learns what Trainer's own loop teaches it."""

import math
import re

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
from gradengine.torch import attach, layout_of  # noqa: E402
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


def llama(lora=True, dtype=torch.float32, tied=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


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
    """The trainer, and its engine."""
    engine = GradientEngine(layout_of(trainer.model), **{"max_norm": MAX_NORM, "average": "sum", **options})
    callback = EngineCallback(trainer, engine)
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


def weights_of(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters() if parameter.requires_grad]


def assert_equal(mine, others):
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class TestAsTrainersOwn:
    @pytest.mark.parametrize("max_grad_norm", [0, math.inf])
    def test_a_llama_with_lora(self, tmp_path, max_grad_norm):
        theirs = trainer_of(tmp_path, llama(), compute_loss_func=None, max_grad_norm=MAX_NORM)
        ours = trainer_of(tmp_path, llama(), compute_loss_func=None, max_grad_norm=max_grad_norm)
        with_engine(ours)
        for trainer in (ours, theirs):
            trainer.train()
        assert_same(ours, theirs)
        assert theirs.state.log_history[0].keys() - ours.state.log_history[0].keys() <= {"grad_norm"}
        assert max(each["grad_norm"] for each in theirs.state.log_history[:-1]) > 2 * MAX_NORM

    def test_a_loss_that_trainer_divides_by_the_micro_batches(self, tmp_path):
        ours, theirs = (
            trainer_of(tmp_path, llama(), compute_loss_func=None, max_grad_norm=n) for n in (math.inf, MAX_NORM)
        )
        with_engine(ours)
        for trainer in (ours, theirs):
            trainer.model_accepts_loss_kwargs = False  # as a model's that does not take the number of tokens
            trainer.train()
        assert_same(ours, theirs)

    def test_all_weights_with_tied_embeddings_and_no_bound(self, tmp_path):
        ours, theirs = both(
            tmp_path, lambda: llama(lora=False, tied=True), engine_options={"max_norm": None}, max_grad_norm=math.inf
        )
        assert_same(ours, theirs, weights=1e-5)

    def test_under_bf16_autocast(self, tmp_path):
        assert_same(*both(tmp_path, bf16=True))

    def test_bf16_weights_are_those_of_fp32_gradients_that_are_rounded_once(self, tmp_path):
        """Trainer's own loop adds up in bf16: there is only its kind of result to compare with."""
        ours, theirs = both(tmp_path, lambda: llama(dtype=torch.bfloat16))
        losses = [[each["loss"] for each in trainer.state.log_history[:-1]] for trainer in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)
        assert {parameter.dtype for parameter in weights_of(ours)} == {torch.bfloat16}

    def test_activation_checkpointing(self, tmp_path):
        model = llama()
        model.enable_input_require_grads()
        ours = trainer_of(
            tmp_path, model, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        with_engine(ours)
        ours.train()
        theirs = trainer_of(tmp_path, llama(), max_grad_norm=MAX_NORM)
        theirs.train()
        assert_same(ours, theirs)

    def test_losses_skips_scale_and_schedule_of_a_scaler(self, tmp_path):
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) for _ in range(2)]
        options = {"scalers": scalers, "engine_options": {"on_non_finite": "pass"}, "fp16": True}
        ours, theirs = both(tmp_path, bad=(4,), **options)
        assert_same(ours, theirs, weights=1e-4)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert finite_steps(ours).count(False) == 2
        assert scalers[1].get_scale() != 2.0**8

    def test_trainers_that_ask_for_no_norm(self, tmp_path, monkeypatch):
        """Versions before 5, without a bound of their own; then no norm is logged."""
        ours, theirs = (trainer_of(tmp_path, llama(), max_grad_norm=norm) for norm in (0, MAX_NORM))
        callback, _ = with_engine(ours)
        monkeypatch.setattr(ours, "_get_grad_norm", lambda *_, **__: None, raising=False)
        for trainer in (ours, theirs):
            trainer.train()
        assert "grad_norm" not in ours.state.log_history[0]
        assert callback.result.step + 1 == ours.state.global_step
        for mine, other in zip(weights_of(ours), weights_of(theirs), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


class Note(TrainerCallback):
    """The weights after each step; it fails after so many micro-batches."""

    def __init__(self, trainer, fail_at=None):
        self.trainer, self.fail_at, self.weights, self.micro_batches = trainer, fail_at, [], 0

    def on_substep_end(self, args, state, control, **_):
        self.micro_batches += 1
        if self.micro_batches == self.fail_at:
            raise ZeroDivisionError

    def on_step_end(self, args, state, control, **_):
        self.weights.append(weights_of(self.trainer))


class TestInTheMiddle:
    def test_a_step_that_is_skipped_changes_no_weight(self, tmp_path):
        ours = trainer_of(tmp_path, llama(), bad=(4,))
        with_engine(ours, on_non_finite="skip")
        note, start = Note(ours), weights_of(ours)
        ours.add_callback(note)
        ours.train()
        assert finite_steps(ours).count(False) == 2
        pairs = zip([start, *note.weights], note.weights)  # noqa: B905
        moved = [not all(torch.equal(one, other) for one, other in zip(*pair, strict=True)) for pair in pairs]
        assert moved == finite_steps(ours)

    def test_a_run_goes_on_from_a_checkpoint_to_the_same_bytes(self, tmp_path):
        whole = trainer_of(tmp_path, llama(), save_strategy="steps", save_steps=3)
        with_engine(whole)
        whole.train()
        resumed = trainer_of(tmp_path, llama())
        _, engine = with_engine(resumed)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert engine.current_step == whole.state.global_step - 3 > 0
        assert_equal(weights_of(resumed), weights_of(whole))

    def test_what_a_run_that_broke_off_left_is_dropped_when_it_is_trained_again(self, tmp_path):
        ours = trainer_of(tmp_path, llama(), num_train_epochs=1)
        _, engine = with_engine(ours)
        note = Note(ours, fail_at=3)
        ours.add_callback(note)
        with pytest.raises(ZeroDivisionError):
            ours.train()
        assert engine.accumulator.accumulated_count == 1
        note.fail_at = None
        ours.train()
        assert engine.accumulator.state.now is State.EMPTY
        assert len(note.weights) == 1 + ours.state.global_step

    def test_after_training_the_model_and_the_accelerator_are_as_before(self, tmp_path):
        ours = trainer_of(tmp_path, llama(), max_steps=1)
        _, engine = with_engine(ours)
        ours.train()
        assert "clip_grad_norm_" not in vars(ours.accelerator)
        ours.model(**{name: tokens[None] for name, tokens in sequences()[0].items()}).loss.backward()
        assert all(parameter.grad is not None for parameter in ours.model.parameters() if parameter.requires_grad)
        assert not engine.has_open_window


class TestRefused:
    @pytest.mark.parametrize(
        ("engine_options", "options", "match"),
        [
            ({"average": "weighted"}, {}, "divides the loss .* got average='weighted'; build .*average=\"sum\""),
            ({}, {"max_grad_norm": 1.0}, "would clip again by its max_grad_norm: got 1.0, expected 0"),
        ],
    )
    def test_before_anything_is_trained(self, tmp_path, engine_options, options, match):
        ours = trainer_of(tmp_path, llama(), **options)
        with_engine(ours, **engine_options)
        before = weights_of(ours)
        with pytest.raises(CallerError, match=match):
            ours.train()
        assert_equal(weights_of(ours), before)
        assert "clip_grad_norm_" not in vars(ours.accelerator)

    def test_deepspeed(self, tmp_path):
        ours = trainer_of(tmp_path, llama())
        with_engine(ours)
        ours.is_deepspeed_enabled = True
        with pytest.raises(CallerError, match="DeepSpeed accumulates gradients by itself"):
            EngineCallback.on_train_begin(*ours.callback_handler.callbacks[-1:], ours.args, ours.state, ours.control)

    def test_a_scaler_that_would_not_see_what_is_not_finite(self, tmp_path):
        ours = trainer_of(tmp_path, llama(), scaler=torch.amp.GradScaler("cpu"))
        with_engine(ours, on_non_finite="skip")
        with pytest.raises(CallerError, match=re.escape("got on_non_finite='skip'; build the engine with on_non_fin")):
            ours.train()

    def test_another_model_and_one_that_is_attached_already(self, tmp_path):
        ours = trainer_of(tmp_path, llama())
        ours.add_callback(EngineCallback(ours, GradientEngine(layout_of(llama(lora=False)), average="sum")))
        with pytest.raises(LayoutMismatch):
            ours.train()
        ours = trainer_of(tmp_path, llama())
        _, engine = with_engine(ours)
        with attach(ours.model, engine), pytest.raises(CallerError, match="attached"):
            ours.train()

    def test_what_is_no_trainer_or_no_engine(self, tmp_path):
        ours = trainer_of(tmp_path, llama())
        with pytest.raises(CallerError, match="trainer"):
            EngineCallback(ours.model, GradientEngine(layout_of(ours.model)))
        with pytest.raises(CallerError, match="engine"):
            EngineCallback(ours, 1.0)
