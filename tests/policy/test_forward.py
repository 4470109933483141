import hashlib
import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dartrl.interfaces import ImageRef, Message
from dartrl.policy.forward import hidden_states, token_logprobs
from dartrl.policy.inputs import collate, encode_prompt, make_row, reply_row
from dartrl.policy.model import Policy, PolicyShape, build_policy

WINDOWED = PolicyShape(vision_layers=2, text_layers=2, window_pixels=56, full_attention_layers=(1,))


def png(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def conversation(*parts: str | bytes) -> tuple[list[Message], dict[str, bytes]]:
    images = {hashlib.sha256(part).hexdigest(): part for part in parts if isinstance(part, bytes)}
    refs = tuple(ImageRef(hashlib.sha256(part).hexdigest(), 0, 0) if isinstance(part, bytes) else part for part in parts)
    return [Message("system", ("You see a screen.",)), Message("user", refs)], images


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
    extras = {}
    if images:
        opened = [Image.open(io.BytesIO(data)) for data in images]
        extras = dict(processor(images=opened, return_tensors="pt"))
    input_ids = torch.from_numpy(ids.astype(np.int64))[None]
    types = (input_ids == policy.image_token_id).int()
    with torch.no_grad():
        return policy.model(input_ids=input_ids, mm_token_type_ids=types, **extras).logits[0]


SMALL, WIDE, ODD = png(56, 84, 1), png(168, 112, 2), png(70, 130, 3)
CASES = {
    "text only": ("Copy the word tree.",),
    "one image": (SMALL, "Click the button."),
    "image after text": ("Look: ", WIDE, " and click."),
    "several images of several sizes": (SMALL, "then", WIDE, "then", ODD, "now click", SMALL),
    "resized": (ODD, "Click."),
}


@pytest.mark.parametrize("shape", [PolicyShape(vision_layers=2, text_layers=2), WINDOWED], ids=["full", "windowed"])
@torch.no_grad()
def test_mixed_batch_agrees_with_stock_forward(tiny_tokenizer, shape):
    policy = build_policy(tiny_tokenizer, shape, seed=3)
    rows, stock = [], []
    for parts in CASES.values():
        messages, images = conversation(*parts)
        row = reply_row(encode_prompt(policy, messages, images), [5, 6, 7])
        rows.append(row)
        stock.append(stock_logits(policy, row.ids_S, [part for part in parts if isinstance(part, bytes)]))
    hidden_BSD = hidden_states(policy, collate(rows))
    logits_BSV = policy.model.lm_head(hidden_BSD)
    for index, expected_SV in enumerate(stock):
        assert expected_SV.std() > 0.1
        torch.testing.assert_close(logits_BSV[index, : len(expected_SV)], expected_SV, atol=1e-4, rtol=0)
