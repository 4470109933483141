"""Sampling replies for many prompts at once, with a static key-value cache; rows join and leave between any two tokens.

A reply depends on its own prompt, seed and temperature only: each row draws from its own generator, and rows never see each
other. Batch composition changes sums in their last bits, so log-probabilities are equal to about 1e-6, and a token could differ
only if its random number fell within that distance of a boundary.

Axes: B = rows now decoding, V = vocabulary, S = cache length, D = hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dartrl.policy.forward import KeyValues, encode_images, entropy, gated_mlp, hidden_states, log_distribution, rms_norm, rotate
from dartrl.policy.inputs import Batch, EncodedPrompt, collate, reply_row
from dartrl.policy.model import Policy

_CACHE_STEP = 128
"""The cache grows by multiples of this many tokens."""


@dataclass(slots=True, eq=False)
class Reply:
    """One reply being sampled; complete once `finish_reason` is set."""

    prompt: EncodedPrompt
    """What it answers."""
    temperature: float
    """0 is greedy."""
    max_tokens: int
    """Reply length limit."""
    uniforms: NDArray[np.float64]
    """One random number in [0, 1) per token, drawn from the request's seed."""
    ids: list[int] = field(default_factory=list[int])
    """Tokens so far, the end token included."""
    logprobs: list[float] = field(default_factory=list[float])
    """Log-probability of each under the distribution sampled from."""
    entropies: list[float] = field(default_factory=list[float])
    """Entropy of that distribution in nats."""
    finish_reason: Literal["stop", "length"] | None = None
    """None while it goes on."""


def begin_reply(policy: Policy, prompt: EncodedPrompt, *, temperature: float, max_tokens: int, seed: int) -> Reply:
    """A reply to sample; its length is bounded by what the policy can read."""
    limit = min(max_tokens, policy.max_positions - len(prompt.ids_S))
    return Reply(prompt, temperature, limit, np.random.default_rng(seed).random(limit))


def draw_tokens(logprobs_BV: Tensor, uniforms_B: Tensor, temperatures_B: Tensor) -> Tensor:
    """One token id per row as [B, 1]: the inverse of the cumulated distribution, or the likeliest at temperature 0.

    uniforms_B: [B, 1] float64 in [0, 1). temperatures_B: [B, 1]. Ids of probability 0 are never drawn.
    """
    cumulated_BV = logprobs_BV.double().exp().cumsum(-1)
    last_possible_B = torch.searchsorted(cumulated_BV, cumulated_BV[:, -1:].contiguous())
    drawn_B = torch.searchsorted(cumulated_BV, uniforms_B * cumulated_BV[:, -1:], right=True)
    return torch.where(temperatures_B > 0, drawn_B.minimum(last_possible_B), logprobs_BV.argmax(-1, keepdim=True))


class Decoder:
    """Decodes the replies that were admitted, one token of each per step. One thread at a time.

    feature_cache_images: encoded images kept for prompts that show them again; cleared by `forget_images`.
    """

    def __init__(self, policy: Policy, *, max_rows: int, feature_cache_images: int = 512) -> None:
        self._policy = policy
        self._max_rows = max_rows
        self._replies: list[Reply] = []
        self._features: OrderedDict[str, Tensor] = OrderedDict()
        self._feature_limit = feature_cache_images
        config = policy.text_config
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self._head_size = config.hidden_size // config.num_attention_heads
        self._cache_shape = (config.num_hidden_layers, max_rows, config.num_key_value_heads)
        self._keys = self._values = torch.empty(0)
        self._capacity = 0
        self._lengths_B = torch.zeros(max_rows, dtype=torch.long)
        self._next_B = torch.zeros(max_rows, dtype=torch.long)
        self._last_B = torch.zeros(max_rows, dtype=torch.long)

    def __len__(self) -> int:
        return len(self._replies)

    def forget_images(self) -> None:
        """Drop encoded images; call it whenever the weights change."""
        self._features.clear()

    def abandon(self) -> None:
        """Drop all replies under way."""
        self._replies.clear()

    @torch.inference_mode()
    def admit(self, replies: Sequence[Reply]) -> None:
        """Read the prompts of new replies and sample their first tokens."""
        if len(self._replies) + len(replies) > self._max_rows:
            raise ValueError(f"{len(replies)} replies do not fit beside {len(self._replies)}; at most {self._max_rows} rows")
        policy, first, count = self._policy, len(self._replies), len(replies)
        batch = collate([reply_row(reply.prompt, ()) for reply in replies]).to(policy.device)
        self._reserve(max(len(reply.prompt.ids_S) + reply.max_tokens for reply in replies))
        cache = KeyValues([], [])
        with policy.autocast():
            features = [self._encode(batch, index, replies) for index in range(len(batch.images))]
            ends_B = (torch.arange(count, device=policy.device), batch.lengths_B - 1)
            logits_BV = policy.model.lm_head(hidden_states(policy, batch, places_X=ends_B, image_features=features, cache=cache))
        length = batch.ids_BS.shape[1]
        for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
            self._keys[layer, first : first + count, :, :length] = keys
            self._values[layer, first : first + count, :, :length] = values
        self._replies.extend(replies)
        rows = slice(first, first + count)
        self._lengths_B[rows] = batch.lengths_B.cpu()
        self._next_B[rows] = torch.tensor([reply.prompt.next_position for reply in replies])
        self._sample(logits_BV, rows)

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every reply under way; finished ones must have been collected."""
        rows = slice(0, len(self._replies))
        logits_BV = self._decode(rows)
        self._lengths_B[rows] += 1
        self._next_B[rows] += 1
        self._sample(logits_BV, rows)

    @torch.inference_mode()
    def collect(self) -> list[Reply]:
        """Finished replies, which leave the batch."""
        finished: list[Reply] = []
        for row in reversed(range(len(self._replies))):
            if self._replies[row].finish_reason is not None:
                finished.append(self._replies[row])
                self._close_gap(row)
        return finished

    # ----------------------------------------------------------------------- one step

    def _decode(self, rows: slice) -> Tensor:
        policy = self._policy
        language: Any = policy.model.model.language_model
        lengths_B = self._lengths_B[rows].to(policy.device)
        num_rows, length = len(lengths_B), int(self._lengths_B[rows].max()) + 1
        index_B = torch.arange(num_rows, device=policy.device)
        is_future = torch.arange(length, device=policy.device) > lengths_B[:, None, None, None]
        with policy.autocast():
            hidden_BD = language.embed_tokens(self._last_B[rows].to(policy.device))
            positions = self._next_B[rows].to(policy.device)[:, None].expand(3, -1, 1)
            cosine, sine = (angles for angles in language.rotary_emb(hidden_BD, positions))
            bias = torch.zeros(is_future.shape, dtype=self._keys.dtype, device=policy.device).masked_fill(is_future, float("-inf"))
            for number, layer in enumerate(language.layers):
                attention, states = layer.self_attn, rms_norm(layer.input_layernorm, hidden_BD)
                query = rotate(attention.q_proj(states).view(num_rows, -1, self._head_size), cosine, sine)
                key = rotate(attention.k_proj(states).view(num_rows, -1, self._head_size), cosine, sine)
                value = attention.v_proj(states).view(num_rows, -1, self._head_size)
                self._keys[number, index_B, :, lengths_B] = key.to(self._keys.dtype)
                self._values[number, index_B, :, lengths_B] = value.to(self._values.dtype)
                mixed = F.scaled_dot_product_attention(
                    query.to(self._keys.dtype).view(num_rows, -1, self._groups, self._head_size),
                    self._keys[number, rows, :, :length],
                    self._values[number, rows, :, :length],
                    attn_mask=bias,
                )
                hidden_BD = hidden_BD + attention.o_proj(mixed.flatten(1))
                hidden_BD = hidden_BD + gated_mlp(layer.mlp, rms_norm(layer.post_attention_layernorm, hidden_BD))
            return policy.model.lm_head(rms_norm(language.norm, hidden_BD))

    def _sample(self, logits_BV: Tensor, rows: slice) -> None:
        replies = self._replies[rows]
        temperatures_B = torch.tensor([[reply.temperature] for reply in replies], device=logits_BV.device)
        uniforms = [[reply.uniforms[len(reply.ids)]] for reply in replies]
        uniforms_B = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)
        logprobs_BV = log_distribution(self._policy, logits_BV, temperatures_B)
        ids_B = draw_tokens(logprobs_BV, uniforms_B, temperatures_B)
        chosen_B = logprobs_BV.gather(-1, ids_B)
        self._last_B[rows] = ids_B[:, 0].cpu()
        columns = zip(replies, ids_B[:, 0].tolist(), chosen_B[:, 0].tolist(), entropy(logprobs_BV).tolist(), strict=True)
        for reply, token, logprob, token_entropy in columns:
            reply.ids.append(token)
            reply.logprobs.append(logprob)
            reply.entropies.append(token_entropy)
            if token in self._policy.end_ids:
                reply.finish_reason = "stop"
            elif len(reply.ids) == reply.max_tokens:
                reply.finish_reason = "length"

    # ----------------------------------------------------------------------- memory

    def _encode(self, batch: Batch, index: int, replies: Sequence[Reply]) -> Tensor:
        """Features of one image group, from the cache where possible."""
        group = batch.images[index]
        hashes = list(dict.fromkeys(image.hash for reply in replies for image in reply.prompt.images if image.grid == group.grid))
        unknown = [number for number, content_hash in enumerate(hashes) if content_hash not in self._features]
        if unknown:
            fresh = encode_images(self._policy, group.select(torch.tensor(unknown, device=group.pixels_NHWC.device)))
            for number, features in zip(unknown, fresh, strict=True):
                self._features[hashes[number]] = features
        for content_hash in hashes:
            self._features.move_to_end(content_hash)
        result = torch.stack([self._features[content_hash] for content_hash in hashes])
        while len(self._features) > self._feature_limit:
            self._features.popitem(last=False)
        return result

    def _reserve(self, length: int) -> None:
        if length <= self._capacity:
            return
        policy, occupied = self._policy, self._capacity
        dtype = torch.bfloat16 if policy.dtype == "bfloat16" else torch.float32
        self._capacity = (length + _CACHE_STEP - 1) // _CACHE_STEP * _CACHE_STEP
        shape = (*self._cache_shape, self._capacity, self._head_size)
        keys, values = torch.zeros(2, *shape, dtype=dtype, device=policy.device)
        if occupied:
            keys[..., :occupied, :] = self._keys
            values[..., :occupied, :] = self._values
        self._keys, self._values = keys, values

    def _close_gap(self, row: int) -> None:
        """Move the last row into the place of one that leaves."""
        last = len(self._replies) - 1
        if row != last:
            length = int(self._lengths_B[last]) + 1
            for cache in (self._keys, self._values):
                cache[:, row, :, :length] = cache[:, last, :, :length]
            for column in (self._lengths_B, self._next_B, self._last_B):
                column[row] = column[last]
            self._replies[row] = self._replies[last]
        self._replies.pop()
