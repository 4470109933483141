import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dartrl.policy.decoding import Decoder, Reply, begin_reply, draw_tokens
from dartrl.policy.forward import token_logprobs
from dartrl.policy.inputs import collate, encode_prompt, reply_row


def run(decoder: Decoder, replies: list[Reply], *, join_every: int = 0) -> None:
    """Decode all replies; with join_every, admit one more after that many steps instead of all at once."""
    waiting = list(replies)
    decoder.admit([waiting.pop(0)] if join_every else [waiting.pop(0) for _ in range(len(waiting))])
    steps = 0
    decoder.collect()
    while len(decoder) or waiting:
        if waiting and steps % max(join_every, 1) == 0:
            decoder.admit([waiting.pop(0)])
            decoder.collect()
        if len(decoder):
            decoder.step()
            decoder.collect()
        steps += 1


@pytest.fixture
def prompts(shared_policy, turns, conversation):
    return [encode_prompt(shared_policy, *conversation(*parts)) for parts in turns.values()]


def test_greedy_replies_equal_stock_generate(shared_policy, turns, conversation, prompts):
    replies = [begin_reply(shared_policy, prompt, temperature=0.0, max_tokens=12, seed=0) for prompt in prompts]
    run(Decoder(shared_policy, max_rows=8), replies)
    processor = Qwen2VLImageProcessorPil(
        image_mean=[1.0] * 3, image_std=[0.25] * 3, size={"shortest_edge": 3136, "longest_edge": 313600}
    )
    for reply, parts in zip(replies, turns.values(), strict=True):
        images = [Image.open(io.BytesIO(part)) for part in parts if isinstance(part, bytes)]
        extras = dict(processor(images=images, return_tensors="pt")) if images else {}
        input_ids = torch.from_numpy(reply.prompt.ids_S.astype(np.int64))[None]
        expected = shared_policy.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            mm_token_type_ids=(input_ids == shared_policy.image_token_id).int(),
            suppress_tokens=list(shared_policy.banned_ids),
            max_new_tokens=12,
            do_sample=False,
            **extras,
        )[0, input_ids.shape[1] :]
        assert reply.ids == expected.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_and_entropies_equal_those_of_the_training_forward(shared_policy, prompts, temperature):
    replies = [
        begin_reply(shared_policy, prompt, temperature=temperature, max_tokens=9, seed=n) for n, prompt in enumerate(prompts)
    ]
    run(Decoder(shared_policy, max_rows=8), replies)
    batch = collate([reply_row(reply.prompt, reply.ids) for reply in replies])
    with torch.no_grad():
        logprobs_BT, entropies_BT, mask_BT = token_logprobs(shared_policy, batch, temperature=temperature)
    for index, reply in enumerate(replies):
        assert len(reply.ids) == int(mask_BT[index].sum())
        np.testing.assert_allclose(reply.logprobs, logprobs_BT[index, : len(reply.ids)], atol=1e-5)
        np.testing.assert_allclose(reply.entropies, entropies_BT[index, : len(reply.ids)], atol=1e-5)


@pytest.mark.parametrize("join_every", [0, 1, 3])
def test_reply_does_not_depend_on_its_company(shared_policy, prompts, join_every):
    def begin() -> list[Reply]:
        return [
            begin_reply(shared_policy, prompts[n % len(prompts)], temperature=1.0, max_tokens=4 + n % 7, seed=100 + n)
            for n in range(8)
        ]

    together, alone = begin(), begin()
    run(Decoder(shared_policy, max_rows=8), together, join_every=join_every)
    for reply in alone:
        run(Decoder(shared_policy, max_rows=1), [reply])
    for one, other in zip(together, alone, strict=True):
        assert one.ids == other.ids
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_drawn_shares_are_the_probabilities():
    probabilities = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0])
    logprobs_BV = probabilities.log().expand(64, -1)
    uniforms_B = (torch.arange(64, dtype=torch.float64)[:, None] + 0.5) / 64
    ids_B = draw_tokens(logprobs_BV, uniforms_B, torch.ones(64, 1))
    assert (torch.bincount(ids_B[:, 0], minlength=7) / 64).tolist() == probabilities.tolist()


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=2, max_size=8).filter(any),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53)),
)
def test_impossible_ids_are_never_drawn(weights, uniform):
    logprobs_BV = (torch.tensor([weights]) / sum(weights)).log()
    drawn = draw_tokens(logprobs_BV, torch.tensor([[uniform]], dtype=torch.float64), torch.ones(1, 1))
    greedy = draw_tokens(logprobs_BV, torch.tensor([[uniform]], dtype=torch.float64), torch.zeros(1, 1))
    assert weights[int(drawn)] > 0
    assert weights[int(greedy)] == pytest.approx(max(weights))


def test_banned_ids_are_never_sampled(tiny_policy, prompts):
    with torch.no_grad():
        tiny_policy.model.lm_head.weight[list(tiny_policy.banned_ids)] *= 100
    replies = [begin_reply(tiny_policy, prompts[1], temperature=5.0, max_tokens=8, seed=seed) for seed in range(20)]
    run(Decoder(tiny_policy, max_rows=20), replies)
    assert not set(tiny_policy.banned_ids) & {token for reply in replies for token in reply.ids}


def test_reply_stops_where_the_policy_stops_reading(shared_policy, prompts):
    room = shared_policy.max_positions - len(prompts[0].ids_S)
    assert begin_reply(shared_policy, prompts[0], temperature=1.0, max_tokens=10**6, seed=0).max_tokens == room


def test_cached_features_are_used_and_forgotten(tiny_policy, prompts):
    decoder = Decoder(tiny_policy, max_rows=2, feature_cache_images=2)

    def first_token() -> list[float]:
        reply = begin_reply(tiny_policy, prompts[1], temperature=1.0, max_tokens=1, seed=0)
        decoder.admit([reply])
        decoder.collect()
        return reply.logprobs

    before = first_token()
    with torch.no_grad():
        tiny_policy.model.model.visual.merger.mlp[2].bias.add_(1.0)
    assert first_token() == before
    decoder.forget_images()
    assert first_token() != before


def test_overfull_decoder_refuses(shared_policy, prompts):
    decoder = Decoder(shared_policy, max_rows=1)
    replies = [begin_reply(shared_policy, prompts[0], temperature=1.0, max_tokens=4, seed=0) for _ in range(2)]
    with pytest.raises(ValueError, match="at most 1 rows"):
        decoder.admit(replies)
