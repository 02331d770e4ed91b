"""Generation and training with the modelling file of an export."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from convert.hf.modeling_fixbin import CACHE, FixbinForCausalLM  # noqa: E402
from tests.convert.torch_models import IDS, PAD, PROMPT, greedy, logits  # noqa: E402


def test_cached_and_uncached_greedy_tokens_are_the_argmax_of_whole_sequences(made: Any) -> None:
    model, _ = made
    expected = PROMPT
    for _ in range(8):
        following = logits(model, expected)[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, following], dim=1)
    assert len(set(expected[:, 6:].flatten().tolist())) > 2
    assert torch.equal(greedy(model), expected)
    assert torch.equal(greedy(model, use_cache=False), expected)


def test_generation_reads_each_position_once_and_makes_only_the_last_logits(model: Any) -> None:
    lengths = []
    for layer in (model.layers[0].mlp.up, model.head):
        layer.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    greedy(model, max_new_tokens=3)
    assert lengths == [6, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_left_padded_row_equals_itself_alone(model: Any, dtype: Any) -> None:
    model = model.to(dtype)
    rows = [torch.from_numpy(IDS[i, :n]).long() for i, n in enumerate((2, 7, 12))]
    ids, mask = torch.full((3, 12), PAD), torch.zeros(3, 12, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 12 - len(row) :], mask[i, 12 - len(row) :] = row, 1
    together = logits(model, ids, attention_mask=mask).float()
    assert bool(together.isfinite().all())
    close = 1e-4 if dtype == torch.float32 else 0.05 * float(together.abs().max())
    for i, row in enumerate(rows):
        alone = logits(model, row[None]).float()
        assert float((together[i, 12 - len(row) :] - alone[0]).abs().max()) < close
    made = greedy(model, ids, attention_mask=mask, max_new_tokens=4)
    if dtype == torch.float32:
        for i, row in enumerate(rows):
            assert torch.equal(made[i, 12:], greedy(model, row[None], max_new_tokens=4)[0, -4:])


def test_right_padding_changes_nothing_before_it(made: Any) -> None:
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[:, 10:] = 0
    padded = logits(made[0], attention_mask=mask)[:, :10]
    torch.testing.assert_close(padded, logits(made[0], IDS[:, :10]), atol=1e-4, rtol=0)


def test_continuing_from_a_returned_cache_gives_the_whole_sequences_logits(model: Any) -> None:
    whole = logits(model)
    ids = torch.from_numpy(IDS).long()
    with torch.no_grad():
        first = model(ids[:, :5], use_cache=True)
        second = model(ids[:, 5:9], **{CACHE: first[CACHE]}, use_cache=True)
        by_old_name = model(ids[:, 9:], past_key_values=second[CACHE], use_cache=True)
    for part, expected in ((second, whole[:, 5:9]), (by_old_name, whole[:, 9:])):
        torch.testing.assert_close(part.logits, expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"attention_mask: shape \(3, 1\), expected \(3, 17\)"):
        model(ids[:, :1], attention_mask=ids[:, :1] * 0 + 1, **{CACHE: second[CACHE]})


def test_beams_find_a_sequence_at_least_as_likely_as_greedy_and_need_no_cache(made: Any) -> None:
    model, _ = made
    beams = greedy(model, num_beams=3, max_new_tokens=5, min_new_tokens=5)
    uncached = greedy(model, num_beams=3, max_new_tokens=5, min_new_tokens=5, use_cache=False)
    assert torch.equal(beams, uncached)

    def likelihood(ids: Any) -> Any:
        scores = logits(model, ids).log_softmax(-1)[:, 5:-1]
        return scores.gather(-1, ids[:, 6:, None]).sum((1, 2))

    assert bool((likelihood(beams) >= likelihood(greedy(model, max_new_tokens=5)) - 1e-4).any())


def test_sampling_repeats_with_its_seed(made: Any) -> None:
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(greedy(made[0], do_sample=True, temperature=3.0, top_k=0))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_static_cache_is_refused(made: Any) -> None:
    with pytest.raises(ValueError, match="static"):
        greedy(made[0], cache_implementation="static")


def test_only_the_logits_to_keep_are_made(made: Any) -> None:
    kept = logits(made[0], logits_to_keep=2)
    torch.testing.assert_close(kept, logits(made[0])[:, -2:], atol=1e-5, rtol=0)


def test_inputs_embeds_are_what_the_layers_read(made: Any) -> None:
    model, _ = made
    ids = torch.from_numpy(IDS).long()
    with torch.no_grad():
        read = model(ids, output_hidden_states=True).hidden_states
        assert [tuple(state.shape) for state in read] == [(3, 16, 32)] * 3
        assert torch.equal(model.head(read[-1]), model(ids).logits)
        assert torch.equal(model(inputs_embeds=read[0]).logits, model(ids).logits)
        assert torch.equal(model(ids, return_dict=False)[0], model(ids).logits)
    for arguments in ({}, {"input_ids": ids, "inputs_embeds": read[0]}):
        with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
            model(**arguments)


def test_loss_is_the_mean_over_labels_that_count(made: Any) -> None:
    model, _ = made
    labels = torch.from_numpy(IDS).long()
    labels[:, :5] = -100
    scores = logits(model).double().log_softmax(-1).numpy()
    picked = [scores[b, t, IDS[b, t + 1]] for b in range(3) for t in range(4, 15)]
    ids = torch.from_numpy(IDS).long()
    assert model(ids, labels=labels).loss.item() == pytest.approx(-np.mean(picked), rel=1e-5)
    counted = model(ids, labels=labels, num_items_in_batch=torch.tensor(100)).loss.item()
    assert counted == pytest.approx(-np.sum(picked) / 100, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(model: Any, reentrant: bool) -> None:
    ids = torch.from_numpy(IDS).long()

    def gradients() -> dict[str, Any]:
        model.train().zero_grad()
        model(ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed = gradients()
    assert min(float(g.abs().max()) for g in plain.values()) > 0
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_trainer_lowers_the_loss_and_leaves_codes_alone(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = [{"input_ids": row, "labels": row} for row in torch.from_numpy(IDS).long()] * 8
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=12, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, report_to=[], save_strategy="no", logging_steps=1, use_cpu=True,
        disable_tqdm=True, gradient_checkpointing=True, weight_decay=0.1,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0] / 2
    # The first logged loss is that of the model as it was: accumulation counts no label twice.
    assert losses[0] == pytest.approx(float(reference_loss(model, before)), rel=0.25)
    for name, tensor in model.state_dict().items():
        coded = name.startswith("input.") and model.config.input_interface != "learned"
        assert torch.equal(tensor, before[name]) == coded, name


def reference_loss(model: Any, weights: dict[str, Any]) -> Any:
    copy = FixbinForCausalLM(model.config)
    copy.load_state_dict(weights)
    ids = torch.from_numpy(IDS).long()
    return copy.eval()(ids, labels=ids).loss
