"""Fixed prompts with the log-probabilities that the publisher computed, so that a worker can tell it serves the same policy.

One prompt is text, one shows an image, one shows several of different sizes. A mismatch means other weights, a stale cache,
another tokenizer, template or image processing, or a broken kernel.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dartrl.errors import ConfigError, WeightsRejected
from dartrl.interfaces import ImageRef, Message
from dartrl.policy.forward import token_logprobs
from dartrl.policy.inputs import Row, collate, encode_prompt, reply_row
from dartrl.policy.model import Policy

PROBES_NAME = "probes.json"
_REPLY_TOKENS = 8


def make_probes(policy: Policy, images: Sequence[bytes] = ()) -> list[dict[str, Any]]:
    """JSON-ready probes of the policy as it is now.

    images: PNG bytes shown in the probes with images; two generated ones if empty.
    """
    pngs = list(images) or [_pattern(84, 112), _pattern(140, 56)]
    turns: list[list[str | bytes]] = [["Copy the word tree."], [pngs[0], "Click the button."], [*pngs, "Compare ", pngs[0]]]
    rows: list[Row] = []
    for number, turn in enumerate(turns):
        messages, by_hash = _conversation(turn)
        prompt = encode_prompt(policy, messages, by_hash)
        rows.append(reply_row(prompt, _reply(policy, number)))
    logprobs = _score(policy, rows)
    return [_probe_to_json(turn, row, scores) for turn, row, scores in zip(turns, rows, logprobs, strict=True)]


def write_probes(policy: Policy, folder: Path) -> None:
    """Write `probes.json` for the policy as it is now; do this before the manifest."""
    unfinished = folder / f".{PROBES_NAME}.part"
    unfinished.write_text(json.dumps(make_probes(policy)), encoding="utf-8")
    os.replace(unfinished, folder / PROBES_NAME)


def check_probes(policy: Policy, folder: Path, *, tolerance: float) -> float:
    """Largest difference in nats between the folder's recorded log-probabilities and the policy's own.

    Raises WeightsRejected if it exceeds the tolerance, or if prompts become other ids here.
    """
    path = folder / PROBES_NAME
    try:
        probes: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        turns = [
            [base64.b64decode(part["png"]) if "png" in part else str(part["text"]) for part in probe["turn"]] for probe in probes
        ]
        expected = [np.asarray(probe["logprobs"], dtype=np.float64) for probe in probes]
        rows = [_row_of(policy, turn, probe) for turn, probe in zip(turns, probes, strict=True)]
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise WeightsRejected(f"{path} cannot be used: {error!r}; publish the weights again") from error
    if not rows:
        raise WeightsRejected(f"{path} holds no probes; publish the weights again")
    worst = 0.0
    for number, (scores, recorded) in enumerate(zip(_score(policy, rows), expected, strict=True)):
        difference = float(np.max(np.abs(np.asarray(scores) - recorded)))
        if not difference <= tolerance:
            raise WeightsRejected(
                f"probe {number} of {path} differs by {difference:.6f} nats; rollout.probe_tolerance allows {tolerance}"
            )
        worst = max(worst, difference)
    return worst


def _row_of(policy: Policy, turn: list[str | bytes], probe: dict[str, Any]) -> Row:
    messages, by_hash = _conversation(turn)
    prompt = encode_prompt(policy, messages, by_hash)
    if prompt.ids_S.tolist() != probe["prompt_ids"]:
        raise ValueError("the prompt becomes other token ids here than where it was published")
    if len(probe["logprobs"]) != len(probe["reply_ids"]):
        raise ValueError("as many log-probabilities as reply ids are needed")
    return reply_row(prompt, probe["reply_ids"])


def _score(policy: Policy, rows: Sequence[Row]) -> list[list[float]]:
    with torch.no_grad():
        logprobs_BT, _, mask_BT = token_logprobs(policy, collate(rows))
    return [logprobs[mask].tolist() for logprobs, mask in zip(logprobs_BT, mask_BT, strict=True)]


def _reply(policy: Policy, number: int) -> list[int]:
    allowed = [token for token in range(len(policy.tokenizer)) if token not in policy.banned_ids]
    return np.random.default_rng(number).choice(allowed, _REPLY_TOKENS).tolist()


def _conversation(turn: Sequence[str | bytes]) -> tuple[list[Message], dict[str, bytes]]:
    images = {hashlib.sha256(part).hexdigest(): part for part in turn if isinstance(part, bytes)}
    parts = tuple(ImageRef(hashlib.sha256(part).hexdigest(), 0, 0) if isinstance(part, bytes) else part for part in turn)
    return [Message("user", parts)], images


def _probe_to_json(turn: Sequence[str | bytes], row: Row, logprobs: list[float]) -> dict[str, Any]:
    return {
        "turn": [{"png": base64.b64encode(part).decode()} if isinstance(part, bytes) else {"text": part} for part in turn],
        "prompt_ids": row.ids_S[~row.is_label_S].tolist(),
        "reply_ids": row.ids_S[row.is_label_S].tolist(),
        "logprobs": logprobs,
    }


def _pattern(width: int, height: int) -> bytes:
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([columns * 255 // width, rows * 255 // height, (rows // 8 + columns // 8) % 2 * 200], axis=-1)
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()
