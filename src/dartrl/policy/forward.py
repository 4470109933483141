"""A batched forward pass on the stock module's own parameters, with the log-probabilities of labelled tokens.

Hugging Face's forward loops over images in Python and computes logits of every position; this one batches images of equal
grids, encodes each distinct image once and applies the output head to labelled positions only. It agrees with stock to 1e-4
in float32. Differentiable; right padding; full causal attention over one row, whatever the rows hold.

Axes: B = rows, S = tokens, T = labelled tokens, V = vocabulary, D = hidden size, X = wanted places, N = images,
L = patches of one image, P = values of one patch, K = image or labelled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dartrl.policy.inputs import Batch, Grid, ImageGroup
from dartrl.policy.model import ImageSettings, Policy

BANNED_LOGIT = -1e30
"""Finite, so that gradients and entropies stay finite; its probability is exactly 0."""


@dataclass(slots=True, eq=False)
class KeyValues:
    """Keys and values of the prompt, one pair of [B, heads, S, size] per layer."""

    keys: list[Tensor]
    """Rotated keys by layer."""
    values: list[Tensor]
    """Values by layer."""


def token_logprobs(policy: Policy, batch: Batch, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs_BT, entropies_BT, mask_BT) of the labelled tokens, under the distribution that the engine samples from.

    The ban of placeholders and the temperature (0 counts as 1) are mirrored. float32; 0 where the mask is False.
    """
    batch = batch.to(policy.device)
    with policy.autocast():
        rows, slots = batch.mask_BT.nonzero(as_tuple=True)
        labels = batch.labels_BT[rows, slots]
        logits_KV = policy.model.lm_head(hidden_states(policy, batch, places_X=(rows, labels - 1)))
    logprobs_KV = log_distribution(policy, logits_KV, temperature)
    chosen_K = logprobs_KV.gather(-1, batch.ids_BS[rows, labels][:, None])[:, 0]
    blank_BT = logprobs_KV.new_zeros(batch.mask_BT.shape)
    logprobs_BT = blank_BT.index_put((rows, slots), chosen_K)
    entropies_BT = blank_BT.index_put((rows, slots), entropy(logprobs_KV))
    return logprobs_BT, entropies_BT, batch.mask_BT


def log_distribution(policy: Policy, logits_XV: Tensor, temperature: float | Tensor) -> Tensor:
    """float32 log-probabilities [..., V] after ban and temperature; 0 counts as temperature 1.

    temperature: one number, or one per row as [X, 1].
    """
    logits_XV = logits_XV.float()
    if isinstance(temperature, Tensor):
        logits_XV = logits_XV / torch.where(temperature > 0, temperature, 1.0)
    elif temperature not in (0, 1):
        logits_XV = logits_XV / temperature
    banned = torch.tensor(policy.banned_ids, dtype=torch.long, device=logits_XV.device)
    return F.log_softmax(logits_XV.index_fill(-1, banned, BANNED_LOGIT), dim=-1)


def entropy(logprobs_XV: Tensor) -> Tensor:
    """Exact entropy in nats of each row."""
    return -(logprobs_XV.exp() * logprobs_XV).sum(-1)


def hidden_states(
    policy: Policy,
    batch: Batch,
    *,
    places_X: tuple[Tensor, Tensor] | None = None,
    image_features: list[Tensor] | None = None,
    cache: KeyValues | None = None,
) -> Tensor:
    """Final hidden states after the last norm; call it inside `policy.autocast()`.

    places_X: wanted (rows, columns), which gives [X, D] and spares the last layer's MLP elsewhere; None gives [B, S, D].
    image_features: [N, tokens, D] per image group, computed here if None. cache: receives keys and values of every layer.
    """
    language: Any = policy.model.model.language_model
    hidden_BSD = language.embed_tokens(batch.ids_BS)
    if batch.images:
        features = image_features if image_features is not None else [encode_images(policy, group) for group in batch.images]
        hidden_BSD = _place_images(hidden_BSD, batch.images, features)
    cosine, sine = language.rotary_emb(hidden_BSD, batch.positions_3BS)
    cosine, sine = cosine[:, None], sine[:, None]
    last = len(language.layers) - 1
    for number, layer in enumerate(language.layers):
        attention = layer.self_attn
        mixed_BSD, keys, values = _attend(policy, attention, rms_norm(layer.input_layernorm, hidden_BSD), cosine, sine)
        if cache is not None:
            cache.keys.append(keys)
            cache.values.append(values)
        if places_X is not None and number == last:
            hidden_BSD, mixed_BSD = hidden_BSD[places_X], mixed_BSD[places_X]
        hidden_BSD = hidden_BSD + attention.o_proj(mixed_BSD)
        hidden_BSD = hidden_BSD + gated_mlp(layer.mlp, rms_norm(layer.post_attention_layernorm, hidden_BSD))
    return rms_norm(language.norm, hidden_BSD)


def encode_images(policy: Policy, group: ImageGroup) -> Tensor:
    """Features [N, tokens, D] of the group's distinct images, tokens in reading order."""
    visual: Any = policy.model.model.visual
    plan = _vision_plan(group.grid, policy.settings.merge_size, _window_tokens(policy), policy.device)
    patches_NLP = _patches(group.pixels_NHWC, policy.settings)[:, plan.order_L]
    # A still image fills all frames of a patch, so the kernel's frames can be summed first.
    kernel = visual.patch_embed.proj.weight.sum(2).flatten(1)
    hidden_NLD = F.linear(patches_NLP, kernel)
    angles_LD = (plan.positions_L2[..., None] * visual.rotary_pos_emb.inv_freq).flatten(1).repeat(1, 2)
    cosine, sine = angles_LD.cos(), angles_LD.sin()
    for index, block in enumerate(visual.blocks):
        windows = None if index in visual.fullatt_block_indexes else plan.windows
        hidden_NLD = hidden_NLD + _look(block.attn, rms_norm(block.norm1, hidden_NLD), cosine, sine, windows)
        hidden_NLD = hidden_NLD + gated_mlp(block.mlp, rms_norm(block.norm2, hidden_NLD))
    merger = visual.merger
    merged = rms_norm(merger.ln_q, hidden_NLD).reshape(len(hidden_NLD), -1, merger.hidden_size)
    return merger.mlp(merged)[:, plan.restore]


def rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    """Root-mean-square norm by the stock module's weight, in the input's type."""
    return F.rms_norm(hidden, (hidden.shape[-1],), norm.weight.to(hidden.dtype), norm.variance_epsilon)


def gated_mlp(mlp: Any, hidden: Tensor) -> Tensor:
    """The stock gated MLP of either tower."""
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of [..., size] states."""
    half = states.shape[-1] // 2
    return states * cosine + torch.cat((-states[..., half:], states[..., :half]), -1) * sine


# --------------------------------------------------------------------------- language


def _place_images(hidden_BSD: Tensor, groups: tuple[ImageGroup, ...], features: list[Tensor]) -> Tensor:
    flat = hidden_BSD.flatten(0, 1)
    for group, features_NKD in zip(groups, features, strict=True):
        placed = features_NKD[group.source_M].flatten(0, 1)
        flat = flat.index_copy(0, group.tokens_K, placed.to(flat.dtype))
    return flat.view_as(hidden_BSD)


def _attend(policy: Policy, attention: Any, hidden_BSD: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, length = hidden_BSD.shape[:2]
    num_kv = policy.text_config.num_key_value_heads

    def heads(states: Tensor, count: int) -> Tensor:
        return states.view(num_rows, length, count, -1).transpose(1, 2)

    query = heads(attention.q_proj(hidden_BSD), policy.text_config.num_attention_heads)
    key, value = heads(attention.k_proj(hidden_BSD), num_kv), heads(attention.v_proj(hidden_BSD), num_kv)
    query, key = rotate(query, cosine, sine).to(value.dtype), rotate(key, cosine, sine).to(value.dtype)
    repeats = query.shape[1] // num_kv
    keys, values = (key, value) if repeats == 1 else (key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
    mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
    return mixed.transpose(1, 2).flatten(2), key, value


# --------------------------------------------------------------------------- vision


@dataclass(frozen=True, slots=True, eq=False)
class _VisionPlan:
    order_L: Tensor
    """Patches in processing order: windows of equal size side by side."""
    positions_L2: Tensor
    """(row, column) of each patch in that order, float."""
    windows: tuple[tuple[int, int, int], ...]
    """(first patch, windows, patches per window) of each run of equal windows."""
    restore: Tensor
    """Processing order of image tokens -> reading order."""


@lru_cache(maxsize=64)
def _vision_plan(grid: Grid, merge: int, window: int, device: torch.device) -> _VisionPlan:
    """How to walk over the patches of a grid; windows as in transformers' `get_vision_window_index`, sorted by size."""
    rows, columns = grid[1] // merge, grid[2] // merge
    boxes = [
        torch.tensor(
            [[row, column] for row in range(top, min(top + window, rows)) for column in range(left, min(left + window, columns))]
        )
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]
    boxes.sort(key=len)
    tokens_X2 = torch.cat(boxes)
    inside = torch.cartesian_prod(torch.arange(merge), torch.arange(merge)).view(-1, 2)
    reading = tokens_X2[:, 0] * columns + tokens_X2[:, 1]
    order_L = (reading[:, None] * merge**2 + torch.arange(merge**2)).flatten()
    positions_L2 = (tokens_X2[:, None] * merge + inside).flatten(0, 1).float()
    runs: list[tuple[int, int, int]] = []
    first = 0
    for size in sorted({len(box) for box in boxes}):
        count = sum(len(box) == size for box in boxes)
        runs.append((first, count, size * merge**2))
        first += count * size * merge**2
    return _VisionPlan(order_L.to(device), positions_L2.to(device), tuple(runs), reading.argsort().to(device))


def _window_tokens(policy: Policy) -> int:
    config = policy.vision_config
    return config.window_size // config.spatial_merge_size // config.patch_size


def _patches(pixels_NHWC: Tensor, settings: ImageSettings) -> Tensor:
    """[N, L, P] normalised patches in stock order: by image token in reading order, then by patch, then channel first."""
    num, height, width, channels = pixels_NHWC.shape
    size, merge = settings.patch_size, settings.merge_size
    blocks = pixels_NHWC.view(num, height // size // merge, merge, size, width // size // merge, merge, size, channels)
    patches = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(num, -1, channels, size * size).float()
    mean = torch.tensor(settings.mean, device=patches.device)[:, None]
    std = torch.tensor(settings.std, device=patches.device)[:, None]
    return patches.mul_(settings.rescale_factor / std).sub_(mean / std).flatten(2)


def _look(attention: Any, hidden_NLD: Tensor, cosine: Tensor, sine: Tensor, windows: Any) -> Tensor:
    num, length = hidden_NLD.shape[:2]
    query, key, value = attention.qkv(hidden_NLD).view(num, length, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    query, key = rotate(query, cosine, sine).to(value.dtype), rotate(key, cosine, sine).to(value.dtype)
    if windows is None:
        mixed = F.scaled_dot_product_attention(query, key, value)
    else:
        mixed = torch.cat([_look_in_windows(query, key, value, run) for run in windows], dim=2)
    return attention.proj(mixed.transpose(1, 2).flatten(2))


def _look_in_windows(query: Tensor, key: Tensor, value: Tensor, run: tuple[int, int, int]) -> Tensor:
    first, count, size = run

    def split(states: Tensor) -> Tensor:
        return states[:, :, first : first + count * size].unflatten(2, (count, size)).transpose(1, 2).flatten(0, 1)

    mixed = F.scaled_dot_product_attention(split(query), split(key), split(value))
    return mixed.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)
