import hashlib
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dartrl.errors import ConfigError, PolicyFault
from dartrl.interfaces import GenerateRequest, ImageRef, Message
from dartrl.rollout.wire import generation_from_json, generation_to_json, png_size, request_from_json, request_to_json
from dartrl.types import Generation


def png(width: int, height: int, shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (shade, shade, shade)).save(buffer, "PNG")
    return buffer.getvalue()


IMAGES = [png(8, 5, 10), png(3, 9, 200)]
REFS = [ImageRef(hashlib.sha256(data).hexdigest(), *png_size(data)) for data in IMAGES]
BYTES = dict(zip((ref.hash for ref in REFS), IMAGES, strict=True))
texts = st.text(max_size=20)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant"]),
    parts=st.lists(st.one_of(texts, st.sampled_from(REFS)), min_size=1, max_size=4).map(tuple),
)


def through_json(body: dict) -> dict:
    return json.loads(json.dumps(body, allow_nan=False))


def request(**changes) -> GenerateRequest:
    fields = dict(
        id="r1", messages=(Message("user", ("hello", REFS[0])),), images=BYTES, temperature=1.0, max_tokens=8, seed=3, affinity="t"
    )
    return GenerateRequest(**{**fields, **changes})


@given(parts=st.lists(messages, min_size=1, max_size=4), seed=st.integers(0, 2**63 - 1), temperature=st.floats(0, 10))
def test_request_survives_the_way_there_and_back(parts, seed, temperature):
    sent = request(messages=tuple(parts), seed=seed, temperature=temperature)
    used = {part.hash: BYTES[part.hash] for message in parts for part in message.parts if isinstance(part, ImageRef)}
    received = request_from_json(through_json(request_to_json(sent)))
    assert received == GenerateRequest(
        id="r1", messages=tuple(parts), images=used, temperature=temperature, max_tokens=8, seed=seed, affinity="t"
    )


def generation(logprobs: list[float], entropies: list[float] | None) -> Generation:
    return Generation(
        text="Action: wait()",
        prompt_ids=np.arange(7, dtype=np.int32),
        response_ids=np.arange(len(logprobs), dtype=np.int32) + 100,
        behaviour_logprobs=np.asarray(logprobs, dtype=np.float32),
        entropies=None if entropies is None else np.asarray(entropies, dtype=np.float32),
        finish_reason="stop",
        image_hashes=tuple(BYTES),
        image_grids=((1, 4, 6), (1, 2, 2)),
        fingerprint="f" * 64,
        temperature=1.0,
        banned_ids=(5, 6),
        compute_dtype="float32",
        weights_version=12,
        worker="worker-0",
        request_id="r1",
        seconds=0.25,
    )


@given(st.lists(st.floats(-100, 0, width=32), max_size=20), st.booleans())
def test_generation_survives_bit_for_bit(logprobs, with_entropies):
    sent = generation(logprobs, [-value for value in logprobs] if with_entropies else None)
    received = generation_from_json(through_json(generation_to_json(sent, model="policy")), request=request(), seconds=0.25)
    for name in Generation.__slots__:
        expected, actual = getattr(sent, name), getattr(received, name)
        if isinstance(expected, np.ndarray):
            assert actual.dtype == expected.dtype
            assert np.array_equal(actual, expected)
        else:
            assert actual == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"top_p": 0.9}, "top_p"),
        ({"n": 2}, "n is 2"),
        ({"stream": True}, "stream"),
        ({"stop": ["x"]}, "stop"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]}, "http://x"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}]}]},
            "base64",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,eHg="}}]}
                ]
            },
            "PNG",
        ),
    ],
)
def test_bad_request_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        request_from_json({**request_to_json(request()), **change})


def test_defaults_of_a_bare_openai_request():
    received = request_from_json({"model": "any", "messages": [{"role": "user", "content": "hi"}]}, default_id="made-up")
    assert (received.id, received.temperature, received.affinity) == ("made-up", 1.0, "")
    again = request_from_json({"model": "any", "messages": [{"role": "user", "content": "hi"}]}, default_id="other")
    assert received.seed != again.seed


def test_missing_image_bytes_are_named():
    with pytest.raises(ConfigError, match=REFS[0].hash):
        request_to_json(request(images={}))


def damaged(path: list, value) -> dict:
    body = through_json(generation_to_json(generation([-0.5, -1.5], [0.1, 0.2]), model="policy"))
    place = body
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return body


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["dartrl", "weights_version"], None, "weights_version"),
        (["dartrl", "request_id"], "r2", "answers request r2"),
        (["dartrl", "entropies"], [0.1], "1 entropies for 2 tokens"),
        (["choices", 0, "logprobs", "content"], [{"logprob": -1.0}], "1 logprobs for 2 tokens"),
        (["choices", 0, "logprobs", "content"], [{"logprob": float("nan")}] * 2, "not finite"),
        (["choices", 0, "token_ids"], None, "token_ids"),
        (["choices", 0, "finish_reason"], "content_filter", "finish_reason"),
        (["prompt_token_ids"], None, "prompt_token_ids"),
        (["choices"], [], "choices"),
    ],
)
def test_bad_reply_is_a_policy_fault(path, value, message):
    with pytest.raises(PolicyFault, match=message):
        generation_from_json(damaged(path, value), request=request(), seconds=0.0)
