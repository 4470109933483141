import dataclasses
import hashlib
import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dartrl.errors import ConfigError, RowRejected
from dartrl.policy.forward import _patches
from dartrl.policy.inputs import build_row, collate, encode_image, encode_prompt, make_row, rotary_positions
from dartrl.policy.model import IMAGE_TOKEN
from dartrl.types import Generation


@pytest.mark.parametrize("size", [(56, 84), (168, 224), (70, 130), (20, 20), (900, 700)])
def test_images_equal_those_of_the_stock_processor(shared_policy, png, size):
    data = png(*size, 1)
    processor = Qwen2VLImageProcessorPil(
        image_mean=[1.0] * 3, image_std=[0.25] * 3, size={"shortest_edge": 3136, "longest_edge": 313600}
    )
    expected = processor(images=[Image.open(io.BytesIO(data))], return_tensors="pt")
    image = encode_image(shared_policy.settings, data, "h")
    assert image.grid == tuple(expected["image_grid_thw"][0].tolist())
    patches = _patches(torch.from_numpy(image.pixels_HWC[None].copy()), shared_policy.settings)[0]
    frames = expected["pixel_values"].view(len(patches), 3, 2, -1)
    torch.testing.assert_close(patches.view(len(patches), 3, -1), frames[:, :, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(frames[:, :, 0], frames[:, :, 1])


def test_prompt_ids_equal_those_of_the_stock_tokenizer(shared_policy, turns, conversation):
    for parts in turns.values():
        messages, images = conversation(*parts)
        prompt = encode_prompt(shared_policy, messages, images)
        chat = [
            {"role": "system", "content": "You see a screen."},
            {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]},
        ]
        text = shared_policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for image in prompt.images:
            text = text.replace(IMAGE_TOKEN, "<|x|>" * image.num_tokens, 1)
        assert prompt.ids_S.tolist() == shared_policy.tokenizer(text.replace("<|x|>", IMAGE_TOKEN))["input_ids"]


@given(
    layout=st.lists(st.one_of(st.integers(1, 5), st.tuples(st.integers(1, 4), st.integers(1, 4))), min_size=1, max_size=6),
)
def test_rotary_positions_equal_those_of_stock(shared_policy, layout):
    ids, grids = [1], []
    for piece in layout:
        if isinstance(piece, int):
            ids += [2] * piece
        else:
            ids += [3, *[shared_policy.image_token_id] * (piece[0] * piece[1]), 4]
            grids.append((1, 2 * piece[0], 2 * piece[1]))
    ids_S = np.asarray(ids, dtype=np.int32)
    tensor = torch.tensor([ids])
    expected, _ = shared_policy.model.model.get_rope_index(
        tensor, (tensor == shared_policy.image_token_id).int(), torch.tensor(grids).reshape(-1, 3) if grids else None
    )
    assert rotary_positions(shared_policy, ids_S, grids).tolist() == expected[:, 0].tolist()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("see <|image_pad|> here",), "neutralise"),
        (("word " * 3000,), "reads at most"),
        ((b"not a png", "x"), "not a readable PNG"),
    ],
)
def test_bad_prompts_are_refused(shared_policy, conversation, parts, message):
    with pytest.raises(ConfigError, match=message):
        encode_prompt(shared_policy, *conversation(*parts))


def test_missing_image_is_named(shared_policy, conversation, png):
    data = png(56, 56, 1)
    messages, _ = conversation(data)
    with pytest.raises(ConfigError, match=hashlib.sha256(data).hexdigest()):
        encode_prompt(shared_policy, messages, {})


def recorded(policy, conversation, png, **changes) -> tuple[Generation, dict[str, bytes]]:
    messages, images = conversation(png(56, 84, 1), "then", png(84, 56, 2), "click")
    prompt = encode_prompt(policy, messages, images)
    end = next(iter(policy.end_ids))
    generation = Generation(
        text="x",
        prompt_ids=prompt.ids_S,
        response_ids=np.asarray([7, 8, end], dtype=np.int32),
        behaviour_logprobs=np.asarray([-0.5, -1.0, -0.1], dtype=np.float32),
        entropies=np.asarray([0.5, 1.0, 0.1], dtype=np.float32),
        finish_reason="stop",
        image_hashes=tuple(image.hash for image in prompt.images),
        image_grids=tuple(image.grid for image in prompt.images),
        fingerprint=policy.fingerprint,
        temperature=1.0,
        banned_ids=policy.banned_ids,
        compute_dtype="float32",
        weights_version=1,
        worker="w",
        request_id="r",
    )
    return dataclasses.replace(generation, **changes), images


def test_recorded_reply_becomes_a_row_of_the_same_ids(shared_policy, conversation, png):
    generation, images = recorded(shared_policy, conversation, png)
    row = build_row(shared_policy, generation, images)
    assert row.ids_S.tolist() == [*generation.prompt_ids.tolist(), *generation.response_ids.tolist()]
    assert row.ids_S[row.is_label_S].tolist() == generation.response_ids.tolist()
    again = make_row(shared_policy, row.ids_S, row.is_label_S, row.images)
    assert again.positions_3S.tolist() == row.positions_3S.tolist()


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (
            "empty",
            lambda g, p: {"response_ids": g.response_ids[:0], "behaviour_logprobs": g.behaviour_logprobs[:0], "entropies": None},
        ),
        ("lengths", lambda g, p: {"behaviour_logprobs": g.behaviour_logprobs[:-1]}),
        ("lengths", lambda g, p: {"entropies": g.entropies[:-1]}),
        ("ids", lambda g, p: {"response_ids": np.asarray([10**6, 8, g.response_ids[-1]], dtype=np.int32)}),
        ("logprobs", lambda g, p: {"behaviour_logprobs": np.asarray([np.nan, -1, -1], dtype=np.float32)}),
        ("logprobs", lambda g, p: {"behaviour_logprobs": np.asarray([0.5, -1, -1], dtype=np.float32)}),
        ("fingerprint", lambda g, p: {"fingerprint": "0"}),
        ("banned_ids", lambda g, p: {"banned_ids": ()}),
        ("banned_ids", lambda g, p: {"response_ids": np.asarray([p.image_token_id, 8, g.response_ids[-1]], dtype=np.int32)}),
        ("finish_reason", lambda g, p: {"response_ids": np.asarray([7, 8, 9], dtype=np.int32)}),
        ("too_long", lambda g, p: {"prompt_ids": np.full(p.max_positions, 7, dtype=np.int32)}),
        ("grids", lambda g, p: {"image_grids": g.image_grids[:1]}),
        ("grids", lambda g, p: {"image_grids": g.image_grids[::-1]}),
        ("image_pads", lambda g, p: {"prompt_ids": g.prompt_ids[:-1][g.prompt_ids[:-1] != p.image_token_id]}),
        ("image_pads", lambda g, p: {"prompt_ids": np.append(g.prompt_ids, p.image_token_id).astype(np.int32)}),
        ("image_missing", lambda g, p: {"image_hashes": ("0" * 64, g.image_hashes[1])}),
    ],
)
def test_inconsistent_rows_are_rejected_by_reason(shared_policy, conversation, png, reason, change):
    generation, images = recorded(shared_policy, conversation, png)
    with pytest.raises(RowRejected) as caught:
        build_row(shared_policy, dataclasses.replace(generation, **change(generation, shared_policy)), images)
    assert caught.value.reason == reason


def test_corrupt_screenshot_rejects_the_row(shared_policy, conversation, png):
    generation, images = recorded(shared_policy, conversation, png)
    with pytest.raises(RowRejected) as caught:
        build_row(shared_policy, generation, {key: data[:100] for key, data in images.items()})
    assert caught.value.reason == "image_corrupt"


def test_collating_keeps_each_distinct_image_once(shared_policy, conversation, png):
    generation, images = recorded(shared_policy, conversation, png)
    row = build_row(shared_policy, generation, images)
    batch = collate([row] * 5)
    assert [len(group.pixels_NHWC) for group in batch.images] == [1, 1]
    assert [group.source_M.tolist() for group in batch.images] == [[0] * 5, [0] * 5]
    tokens = torch.cat([group.tokens_K for group in batch.images])
    assert (batch.ids_BS.flatten()[tokens] == shared_policy.image_token_id).all()
    assert len(tokens) == int((batch.ids_BS == shared_policy.image_token_id).sum())
