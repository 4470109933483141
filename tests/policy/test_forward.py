import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dartrl.policy.forward import entropy, hidden_states, log_distribution, token_logprobs
from dartrl.policy.inputs import collate, encode_prompt, make_row, reply_row
from dartrl.policy.model import Policy, PolicyShape, build_policy

FULL = PolicyShape(vision_layers=2, text_layers=2)
WINDOWED = PolicyShape(vision_layers=2, text_layers=2, window_pixels=56, full_attention_layers=(1,))


def stock_logits(policy: Policy, ids: np.ndarray, images: list[bytes]) -> torch.Tensor:
    """Logits [S, V] of the stock model, with the stock image processor."""
    settings = policy.settings
    processor = Qwen2VLImageProcessorPil(
        patch_size=settings.patch_size,
        merge_size=settings.merge_size,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        image_mean=list(settings.mean),
        image_std=list(settings.std),
    )
    extras = dict(processor(images=[Image.open(io.BytesIO(data)) for data in images], return_tensors="pt")) if images else {}
    input_ids = torch.from_numpy(ids.astype(np.int64))[None]
    types = (input_ids == policy.image_token_id).int()
    with torch.no_grad():
        return policy.model(input_ids=input_ids, mm_token_type_ids=types, **extras).logits[0]


def rows_and_stock(policy: Policy, turns: dict, conversation) -> tuple[list, list]:
    rows, stock = [], []
    for number, parts in enumerate(turns.values()):
        row = reply_row(encode_prompt(policy, *conversation(*parts)), range(5, 8 + number))
        rows.append(row)
        stock.append(stock_logits(policy, row.ids_S, [part for part in parts if isinstance(part, bytes)]))
    return rows, stock


@pytest.mark.parametrize("shape", [FULL, WINDOWED], ids=["full", "windowed"])
@torch.no_grad()
def test_mixed_batch_agrees_with_stock_forward(tiny_tokenizer, turns, conversation, shape):
    policy = build_policy(tiny_tokenizer, shape, seed=3)
    rows, stock = rows_and_stock(policy, turns, conversation)
    batch = collate(rows)
    everywhere = (torch.arange(batch.ids_BS.shape[1]) < batch.lengths_B[:, None]).nonzero(as_tuple=True)
    logits_XV = policy.model.lm_head(hidden_states(policy, batch, places_X=everywhere))
    expected_XV = torch.cat(stock)
    assert expected_XV.std() > 0.1
    torch.testing.assert_close(policy.model.lm_head(hidden_states(policy, batch))[everywhere], expected_XV, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits_XV, expected_XV, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
@torch.no_grad()
def test_token_logprobs_are_those_of_stock_logits_after_ban_and_temperature(tiny_policy, turns, conversation, temperature):
    rows, stock = rows_and_stock(tiny_policy, turns, conversation)
    logprobs_BT, entropies_BT, mask_BT = token_logprobs(tiny_policy, collate(rows), temperature=temperature)
    assert mask_BT.sum(1).tolist() == [3 + number for number in range(len(rows))]
    for index, (row, logits_SV) in enumerate(zip(rows, stock, strict=True)):
        logits_SV[:, list(tiny_policy.banned_ids)] = -math.inf
        expected_SV = (logits_SV / (temperature or 1.0)).log_softmax(-1)
        for slot, place in enumerate(np.flatnonzero(row.is_label_S)):
            distribution_V = expected_SV[place - 1]
            assert float(logprobs_BT[index, slot]) == pytest.approx(float(distribution_V[row.ids_S[place]]), abs=1e-4)
            assert float(entropies_BT[index, slot]) == pytest.approx(
                float(torch.special.entr(distribution_V.exp()).sum()), abs=1e-4
            )
    assert not logprobs_BT[~mask_BT].any()
    assert not entropies_BT[~mask_BT].any()


def test_banned_ids_have_no_probability_and_gradients_stay_finite(tiny_policy):
    logits_XV = torch.full((2, tiny_policy.text_config.vocab_size), 0.5, requires_grad=True)
    logprobs_XV = log_distribution(tiny_policy, logits_XV, torch.tensor([[0.01], [0.0]]))
    allowed = tiny_policy.text_config.vocab_size - len(tiny_policy.banned_ids)
    assert float(logprobs_XV.exp()[:, list(tiny_policy.banned_ids)].sum()) == 0
    torch.testing.assert_close(entropy(logprobs_XV), torch.full((2,), math.log(allowed)))
    (entropy(logprobs_XV).sum() + logprobs_XV[:, 0].sum()).backward()
    assert torch.isfinite(logits_XV.grad).all()


def test_gradients_agree_with_stock_autograd(tiny_policy, png, conversation):
    messages, images = conversation(png(84, 56, 9), "Click.")
    row = reply_row(encode_prompt(tiny_policy, messages, images), [9, 10, 11, 12])
    parameters = dict(tiny_policy.model.named_parameters())
    logprobs_BT, _, _ = token_logprobs(tiny_policy, collate([row, row]))
    logprobs_BT.mean().backward()
    ours = {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}
    tiny_policy.model.zero_grad()
    pixels = Qwen2VLImageProcessorPil(image_mean=[1.0] * 3, image_std=[0.25] * 3)(
        images=[Image.open(io.BytesIO(next(iter(images.values()))))], return_tensors="pt"
    )
    input_ids = torch.from_numpy(row.ids_S.astype(np.int64))[None]
    logits_SV = tiny_policy.model(
        input_ids=input_ids, mm_token_type_ids=(input_ids == tiny_policy.image_token_id).int(), **pixels
    ).logits[0]
    logits_SV = logits_SV.index_fill(-1, torch.tensor(tiny_policy.banned_ids), -1e30)
    places = torch.from_numpy(np.flatnonzero(row.is_label_S))
    logits_SV.log_softmax(-1)[places - 1, input_ids[0, places]].mean().backward()
    assert ours.keys() == parameters.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient, parameters[name].grad, atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


@torch.no_grad()
def test_scattered_labels_score_like_separate_rows(tiny_policy, png, conversation):
    prompt = encode_prompt(tiny_policy, *conversation(png(56, 56, 4), "Two questions."))
    ids = np.concatenate([prompt.ids_S, [20, 21, 22, 23, 24, 25]]).astype(np.int32)
    is_label = np.zeros(len(ids), dtype=bool)
    is_label[[-6, -3, -1]] = True
    together, _, mask_BT = token_logprobs(tiny_policy, collate([make_row(tiny_policy, ids, is_label, prompt.images)]))
    everything, _, _ = token_logprobs(tiny_policy, collate([reply_row(prompt, ids[-6:])]))
    assert mask_BT.tolist() == [[True, True, True]]
    torch.testing.assert_close(together[0], everything[0, [0, 3, 5]])


@torch.no_grad()
def test_bfloat16_autocast_stays_near_float32(tiny_policy_folder, tiny_policy, turns, conversation):
    from dartrl.policy.model import load_policy

    rows, _ = rows_and_stock(tiny_policy, turns, conversation)
    exact, _, mask_BT = token_logprobs(tiny_policy, collate(rows))
    rounded, _, _ = token_logprobs(load_policy(tiny_policy_folder, dtype="bfloat16"), collate(rows))
    difference = (exact - rounded)[mask_BT].abs()
    assert rounded.dtype == torch.float32
    assert 0 < float(difference.max()) < 0.1
