"""Requests and replies of the rollout service as JSON: OpenAI chat completions with vLLM's `return_token_ids`.

A reply carries `prompt_token_ids`, `choices[0].token_ids` and `choices[0].logprobs.content`; what those protocols have no
place for stands under the key `dartrl`. Images travel as PNG data URLs and are identified by the SHA-256 of their bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dartrl.errors import ConfigError, PolicyFault
from dartrl.interfaces import GenerateRequest, ImageRef, Message
from dartrl.types import Generation

DEFAULT_MODEL = "policy"
"""Model name in requests; workers answer to every name."""
DEFAULT_MAX_TOKENS = 256
"""Reply limit of a request that names none."""
_PNG_PREFIX = "data:image/png;base64,"
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UNCHANGED = {"n": 1, "stream": False, "top_p": 1, "top_k": -1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0}
_UNSUPPORTED = ("stop", "tools", "tool_choice", "functions", "response_format", "logit_bias", "repetition_penalty", "audio")


def request_to_json(request: GenerateRequest) -> dict[str, Any]:
    """Body of POST /v1/chat/completions for this request."""
    return {
        "model": DEFAULT_MODEL,
        "messages": [_message_to_json(message, request.images) for message in request.messages],
        "temperature": request.temperature,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "logprobs": True,
        "return_token_ids": True,
        "request_id": request.id,
        "dartrl": {"affinity": request.affinity},
    }


def request_from_json(body: Mapping[str, Any], *, default_id: str = "") -> GenerateRequest:
    """The request in the body of POST /v1/chat/completions.

    default_id: id of a request that has none; without a seed, the seed follows from the id.
    Raises ConfigError for anything malformed, and for sampling options that would change the distribution.
    """
    _refuse_unsupported(body)
    try:
        parsed = _ChatRequest.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"request field {where or 'body'}: {problem['msg']}") from error
    images: dict[str, bytes] = {}
    messages = tuple(_message_from_json(message, images) for message in parsed.messages)
    request_id = parsed.request_id or default_id
    return GenerateRequest(
        id=request_id,
        messages=messages,
        images=images,
        temperature=parsed.temperature,
        max_tokens=parsed.max_completion_tokens or parsed.max_tokens or DEFAULT_MAX_TOKENS,
        seed=_seed_of(request_id) if parsed.seed is None else parsed.seed,
        affinity=parsed.dartrl.affinity,
    )


def generation_to_json(generation: Generation, *, model: str, created: int = 0) -> dict[str, Any]:
    """The chat completion that carries this reply; numbers survive the way there and back bit for bit.

    created: seconds since the epoch.
    """
    response_ids = generation.response_ids.tolist()
    logprobs = generation.behaviour_logprobs.tolist()
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(response_ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": generation.text},
        "finish_reason": generation.finish_reason,
        "token_ids": response_ids,
        "logprobs": {"content": content},
    }
    num_prompt, num_response = len(generation.prompt_ids), len(response_ids)
    return {
        "id": f"chatcmpl-{generation.request_id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "prompt_token_ids": generation.prompt_ids.tolist(),
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_response, "total_tokens": num_prompt + num_response},
        "dartrl": {
            "request_id": generation.request_id,
            "weights_version": generation.weights_version,
            "worker": generation.worker,
            "entropies": None if generation.entropies is None else generation.entropies.tolist(),
            "image_hashes": list(generation.image_hashes),
            "grids": [list(grid) for grid in generation.image_grids],
            "fingerprint": generation.fingerprint,
            "compute_dtype": generation.compute_dtype,
            "banned_ids": list(generation.banned_ids),
        },
    }


def generation_from_json(body: Mapping[str, Any], *, request: GenerateRequest, seconds: float) -> Generation:
    """The reply to `request` in a chat completion that took `seconds`.

    Raises PolicyFault if a field is missing, if lengths disagree, if a number is not finite, or if it answers another request.
    """
    try:
        parsed = _ChatReply.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise PolicyFault(f"reply to {request.id}: field {where or 'body'}: {problem['msg']}") from error
    choice, extras = parsed.choices[0], parsed.dartrl
    if extras.request_id != request.id:
        raise PolicyFault(f"reply to {request.id} answers request {extras.request_id}")
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    num_tokens = len(choice.token_ids)
    return Generation(
        text=choice.message.content or "",
        prompt_ids=np.asarray(parsed.prompt_token_ids, dtype=np.int32),
        response_ids=np.asarray(choice.token_ids, dtype=np.int32),
        behaviour_logprobs=_finite_array(logprobs, num_tokens, "logprobs", request.id),
        entropies=None if extras.entropies is None else _finite_array(extras.entropies, num_tokens, "entropies", request.id),
        finish_reason=choice.finish_reason,
        image_hashes=tuple(extras.image_hashes),
        image_grids=tuple(extras.grids),
        fingerprint=extras.fingerprint,
        temperature=request.temperature,
        banned_ids=tuple(extras.banned_ids),
        compute_dtype=extras.compute_dtype,
        weights_version=extras.weights_version,
        worker=extras.worker,
        request_id=extras.request_id,
        seconds=seconds,
    )


def png_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels from a PNG header. Raises ConfigError if the bytes are no PNG."""
    if len(data) < 24 or not data.startswith(_PNG_SIGNATURE):
        raise ConfigError("image is not a PNG; send screenshots as data:image/png;base64,...")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


# --------------------------------------------------------------------------- shapes of the bodies


class _Open(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _ImageUrl(_Open):
    url: str


class _Part(_Open):
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: _ImageUrl | None = None


class _ChatMessage(_Open):
    role: Literal["system", "user", "assistant"]
    content: str | list[_Part]


class _RequestExtras(_Open):
    affinity: str = ""


class _ChatRequest(_Open):
    messages: list[_ChatMessage] = Field(min_length=1)
    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    request_id: str | None = None
    dartrl: _RequestExtras = _RequestExtras()


class _TokenLogprob(_Open):
    logprob: float


class _Logprobs(_Open):
    content: list[_TokenLogprob]


class _ReplyMessage(_Open):
    content: str | None


class _Choice(_Open):
    message: _ReplyMessage
    finish_reason: Literal["stop", "length"]
    token_ids: list[int]
    logprobs: _Logprobs


class _ReplyExtras(_Open):
    request_id: str
    weights_version: int
    worker: str
    entropies: list[float] | None
    image_hashes: list[str]
    grids: list[tuple[int, int, int]]
    fingerprint: str
    compute_dtype: str
    banned_ids: list[int]


class _ChatReply(_Open):
    prompt_token_ids: list[int] = Field(min_length=1)
    choices: list[_Choice] = Field(min_length=1, max_length=1)
    dartrl: _ReplyExtras


# --------------------------------------------------------------------------- messages and images


def _message_to_json(message: Message, images: Mapping[str, bytes]) -> dict[str, Any]:
    if len(message.parts) == 1 and isinstance(message.parts[0], str):
        return {"role": message.role, "content": message.parts[0]}
    return {"role": message.role, "content": [_part_to_json(part, images) for part in message.parts]}


def _part_to_json(part: str | ImageRef, images: Mapping[str, bytes]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.hash not in images:
        raise ConfigError(f"message refers to image {part.hash}, but the request has no bytes for it; add it to images")
    return {"type": "image_url", "image_url": {"url": _PNG_PREFIX + base64.b64encode(images[part.hash]).decode()}}


def _message_from_json(message: _ChatMessage, images: dict[str, bytes]) -> Message:
    if isinstance(message.content, str):
        return Message(message.role, (message.content,))
    return Message(message.role, tuple(_part_from_json(part, images) for part in message.content))


def _part_from_json(part: _Part, images: dict[str, bytes]) -> str | ImageRef:
    if part.type == "text":
        if part.text is None:
            raise ConfigError("message part of type text has no text")
        return part.text
    if part.image_url is None:
        raise ConfigError("message part of type image_url has no image_url")
    if not part.image_url.url.startswith(_PNG_PREFIX):
        raise ConfigError(f"image URL starts with {part.image_url.url[:32]!r}; only {_PNG_PREFIX}... is accepted")
    try:
        data = base64.b64decode(part.image_url.url[len(_PNG_PREFIX) :], validate=True)
    except binascii.Error as error:
        raise ConfigError(f"image is not valid base64: {error}") from error
    width, height = png_size(data)
    content_hash = hashlib.sha256(data).hexdigest()
    images[content_hash] = data
    return ImageRef(content_hash, width, height)


# --------------------------------------------------------------------------- checks


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, only in _UNCHANGED.items():
        value = body.get(name)
        if value is not None and value != only:
            raise ConfigError(
                f"request field {name} is {value!r}; only {only!r} is supported, other values change the distribution"
            )
    for name in _UNSUPPORTED:
        if body.get(name):
            raise ConfigError(f"request field {name} is not supported by the embedded engine; remove it")


def _finite_array(values: Sequence[float], num_tokens: int, name: str, request_id: str) -> NDArray[np.float32]:
    if len(values) != num_tokens:
        raise PolicyFault(f"reply to {request_id} has {len(values)} {name} for {num_tokens} tokens")
    if not all(math.isfinite(value) for value in values):
        raise PolicyFault(f"reply to {request_id} has {name} that are not finite")
    return np.asarray(values, dtype=np.float32)


def _seed_of(request_id: str) -> int:
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1
