"""From messages and screenshots to what the model reads: exact ids, pixels and positions; and from recorded steps to rows.

Axes: S = tokens of a sequence, B = rows, T = labelled tokens of a row (padded), N = distinct images, M = places of images,
K = image tokens, H, W = pixels, C = channels. Ids that an engine reported are never re-tokenised, repaired or filled up here.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from dartrl.errors import ConfigError, RowRejected
from dartrl.interfaces import Message
from dartrl.policy.model import IMAGE_TOKEN, ImageSettings, Policy
from dartrl.types import Generation

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """A screenshot at the size the model sees."""

    hash: str
    """Identity; images with equal hashes are encoded once per batch."""
    grid: Grid
    """(t, h, w) in patches."""
    num_tokens: int
    """Placeholders it fills in the ids."""
    pixels_HWC: NDArray[np.uint8]
    """RGB, resized to whole image tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """A prompt ready for the model."""

    ids_S: NDArray[np.int32]
    """Token ids, image placeholders expanded."""
    positions_3S: NDArray[np.int64]
    """Rotary positions: time, height, width."""
    images: tuple[EncodedImage, ...]
    """In order of appearance."""
    image_tokens_K: NDArray[np.int64]
    """Indices in S of the placeholders of all images."""

    @property
    def next_position(self) -> int:
        """Rotary position of the first token of the reply, in all three axes."""
        return int(self.positions_3S.max()) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A sequence to train on or to score."""

    ids_S: NDArray[np.int32]
    """Token ids."""
    positions_3S: NDArray[np.int64]
    """Rotary positions: time, height, width."""
    images: tuple[EncodedImage, ...]
    """In order of appearance."""
    image_tokens_K: NDArray[np.int64]
    """Indices in S of the placeholders of all images."""
    is_label_S: NDArray[np.bool_]
    """True where the token was sampled (or demonstrated), so that its log-probability counts."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageGroup:
    """All images of a batch that share one grid."""

    grid: Grid
    """(t, h, w) in patches."""
    pixels_NHWC: Tensor
    """uint8, distinct images only."""
    source_M: Tensor
    """Which of the N images stands at each place."""
    tokens_K: Tensor
    """Indices into the flattened [B * S] ids of all places' image tokens, K = M times tokens per image."""

    def select(self, images: Tensor) -> ImageGroup:
        """The group with these of its N distinct images only, and without places; for encoding."""
        nothing = self.source_M[:0]
        return ImageGroup(self.grid, self.pixels_NHWC[images], nothing, nothing)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows padded on the right."""

    ids_BS: Tensor
    """int64, 0 where padded."""
    positions_3BS: Tensor
    """int64 rotary positions, 0 where padded."""
    lengths_B: Tensor
    """Tokens of each row."""
    images: tuple[ImageGroup, ...]
    """Images by grid."""
    labels_BT: Tensor
    """Index in S of each labelled token, in order; 1 where padded."""
    mask_BT: Tensor
    """True where labels_BT is real."""

    def __len__(self) -> int:
        return self.ids_BS.shape[0]

    def to(self, device: torch.device) -> Batch:
        """The batch on that device."""
        groups = tuple(
            ImageGroup(group.grid, group.pixels_NHWC.to(device), group.source_M.to(device), group.tokens_K.to(device))
            for group in self.images
        )
        ids, positions, lengths = self.ids_BS.to(device), self.positions_3BS.to(device), self.lengths_B.to(device)
        return Batch(ids, positions, lengths, groups, self.labels_BT.to(device), self.mask_BT.to(device))


# --------------------------------------------------------------------------- prompts


def encode_prompt(policy: Policy, messages: Sequence[Message], images: Mapping[str, bytes]) -> EncodedPrompt:
    """Ids, positions and pixels of a prompt, as stock Hugging Face code makes them.

    images: PNG bytes by hash, for every image of the messages.
    Raises ConfigError if an image is missing or unreadable, if the text contains an image placeholder, or if it is too long.
    """
    refs = [part for message in messages for part in message.parts if not isinstance(part, str)]
    missing = [ref.hash for ref in refs if ref.hash not in images]
    if missing:
        raise ConfigError(f"the prompt refers to image {missing[0]}, but its bytes are not in the request")
    encoded = tuple(encode_image(policy.settings, images[ref.hash], ref.hash) for ref in refs)
    text = policy.tokenizer.apply_chat_template(
        [_chat_message(message) for message in messages], add_generation_prompt=True, tokenize=False
    )
    pieces = str(text).split(IMAGE_TOKEN)
    if len(pieces) != len(refs) + 1:
        raise ConfigError(
            f"the prompt's text spells {IMAGE_TOKEN} {len(pieces) - 1 - len(refs)} times beside {len(refs)} images; neutralise it"
        )
    expanded = pieces[0]
    for image, piece in zip(encoded, pieces[1:], strict=True):
        expanded += IMAGE_TOKEN * image.num_tokens + piece
    ids_S = np.asarray(policy.tokenizer.backend_tokenizer.encode(expanded, add_special_tokens=False).ids, dtype=np.int32)
    if len(ids_S) >= policy.max_positions:
        raise ConfigError(
            f"the prompt has {len(ids_S)} tokens; the policy reads at most {policy.max_positions - 1}, shorten the history"
        )
    return _encoded(policy, ids_S, encoded)


def encode_image(settings: ImageSettings, png: bytes, content_hash: str) -> EncodedImage:
    """The screenshot in these PNG bytes, resized as the model wants it. Raises ConfigError if it cannot be read."""
    try:
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            rgb = image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigError(f"image {content_hash} is not a readable PNG: {error}") from error
    factor = settings.patch_size * settings.merge_size
    try:
        height, width = smart_resize(rgb.height, rgb.width, factor, settings.min_pixels, settings.max_pixels)
    except ValueError as error:
        raise ConfigError(f"image {content_hash} of {rgb.width}x{rgb.height} pixels: {error}") from error
    if (width, height) != rgb.size:
        rgb = rgb.resize((width, height), resample=Image.Resampling(settings.resample))
    return image_of_pixels(settings, np.asarray(rgb, dtype=np.uint8), content_hash)


def image_of_pixels(settings: ImageSettings, pixels_HWC: NDArray[np.uint8], content_hash: str) -> EncodedImage:
    """The image of RGB pixels whose height and width are whole image tokens."""
    height, width = pixels_HWC.shape[0] // settings.patch_size, pixels_HWC.shape[1] // settings.patch_size
    return EncodedImage(content_hash, (1, height, width), height * width // settings.merge_size**2, pixels_HWC)


def rotary_positions(policy: Policy, ids_S: NDArray[np.int32], grids: Sequence[Grid]) -> NDArray[np.int64]:
    """Positions [3, S] in time, height and width: text counts on, an image spans a box.

    Raises ConfigError if the image placeholders do not fit the grids.
    Source: `Qwen2_5_VLModel.get_rope_index` of transformers, for still images.
    """
    positions_3S = np.empty((3, len(ids_S)), dtype=np.int64)
    position = start = 0
    runs = _image_runs(ids_S, policy.image_token_id)
    if len(runs) != len(grids):
        raise ConfigError(f"the ids hold {len(runs)} images, but there are {len(grids)} grids")
    for (first, last), grid in zip(runs, grids, strict=True):
        height, width = grid[1] // policy.settings.merge_size, grid[2] // policy.settings.merge_size
        if last - first != grid[0] * height * width:
            raise ConfigError(f"an image of grid {grid} needs {grid[0] * height * width} placeholders, the ids hold {last - first}")
        positions_3S[:, start:first] = np.arange(position, position + first - start)
        position += first - start
        positions_3S[:, first:last] = np.indices((grid[0], height, width)).reshape(3, -1) + position
        position += max(height, width)
        start = last
    positions_3S[:, start:] = np.arange(position, position + len(ids_S) - start)
    return positions_3S


# --------------------------------------------------------------------------- rows


def make_row(policy: Policy, ids_S: NDArray[np.int32], is_label_S: NDArray[np.bool_], images: Sequence[EncodedImage]) -> Row:
    """A row of any ids with labelled tokens. Raises ConfigError if images and placeholders disagree."""
    prompt = _encoded(policy, ids_S, tuple(images))
    return Row(ids_S, prompt.positions_3S, prompt.images, prompt.image_tokens_K, is_label_S)


def reply_row(prompt: EncodedPrompt, reply_ids: Sequence[int] | NDArray[np.int32]) -> Row:
    """The row of a prompt followed by a labelled reply."""
    reply = np.asarray(reply_ids, dtype=np.int32)
    steps_T = np.arange(len(reply)) + prompt.next_position
    is_label_S = np.zeros(len(prompt.ids_S) + len(reply), dtype=np.bool_)
    is_label_S[len(prompt.ids_S) :] = True
    positions_3S = np.concatenate([prompt.positions_3S, np.broadcast_to(steps_T, (3, len(reply)))], axis=1)
    return Row(np.concatenate([prompt.ids_S, reply]), positions_3S, prompt.images, prompt.image_tokens_K, is_label_S)


def build_row(policy: Policy, generation: Generation, images: Mapping[str, bytes]) -> Row:
    """The training row of a recorded reply, from its ids and its screenshots' PNG bytes.

    Raises RowRejected with a fixed reason if anything disagrees: empty, lengths, ids, logprobs, fingerprint, banned_ids,
    finish_reason, too_long, image_missing, image_corrupt, grids or image_pads.
    """
    _check_numbers(policy, generation)
    encoded: list[EncodedImage] = []
    for content_hash, grid in zip(generation.image_hashes, generation.image_grids, strict=True):
        if content_hash not in images:
            raise RowRejected(f"image {content_hash} of request {generation.request_id} is missing", "image_missing")
        try:
            image = encode_image(policy.settings, images[content_hash], content_hash)
        except ConfigError as error:
            raise RowRejected(str(error), "image_corrupt") from error
        if image.grid != grid:
            raise RowRejected(f"image {content_hash} has grid {image.grid}, the engine reported {grid}", "grids")
        encoded.append(image)
    try:
        prompt = _encoded(policy, generation.prompt_ids, tuple(encoded))
    except ConfigError as error:
        raise RowRejected(f"request {generation.request_id}: {error}", "image_pads") from error
    return reply_row(prompt, generation.response_ids)


def collate(rows: Sequence[Row]) -> Batch:
    """The rows as one batch, padded on the right; each distinct image is kept once."""
    length = max(len(row.ids_S) for row in rows)
    labels = [np.flatnonzero(row.is_label_S) for row in rows]
    num_labels = max(len(label) for label in labels)
    ids_BS = np.zeros((len(rows), length), dtype=np.int64)
    positions_3BS = np.zeros((3, len(rows), length), dtype=np.int64)
    labels_BT = np.ones((len(rows), num_labels), dtype=np.int64)
    mask_BT = np.zeros((len(rows), num_labels), dtype=np.bool_)
    for index, (row, label) in enumerate(zip(rows, labels, strict=True)):
        ids_BS[index, : len(row.ids_S)] = row.ids_S
        positions_3BS[:, index, : len(row.ids_S)] = row.positions_3S
        labels_BT[index, : len(label)] = label
        mask_BT[index, : len(label)] = True
    return Batch(
        ids_BS=torch.from_numpy(ids_BS),
        positions_3BS=torch.from_numpy(positions_3BS),
        lengths_B=torch.tensor([len(row.ids_S) for row in rows]),
        images=_group_images(rows, length),
        labels_BT=torch.from_numpy(labels_BT),
        mask_BT=torch.from_numpy(mask_BT),
    )


# --------------------------------------------------------------------------- parts


def _chat_message(message: Message) -> dict[str, Any]:
    if len(message.parts) == 1 and isinstance(message.parts[0], str):
        return {"role": message.role, "content": message.parts[0]}
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in message.parts]
    return {"role": message.role, "content": content}


def _encoded(policy: Policy, ids_S: NDArray[np.int32], images: tuple[EncodedImage, ...]) -> EncodedPrompt:
    positions_3S = rotary_positions(policy, ids_S, [image.grid for image in images])
    return EncodedPrompt(ids_S, positions_3S, images, np.flatnonzero(ids_S == policy.image_token_id))


def _image_runs(ids_S: NDArray[np.int32], image_token_id: int) -> list[tuple[int, int]]:
    is_image_S = np.concatenate([[False], ids_S == image_token_id, [False]])
    edges = np.flatnonzero(is_image_S[1:] != is_image_S[:-1])
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _check_numbers(policy: Policy, generation: Generation) -> None:
    name, num_tokens = generation.request_id, len(generation.response_ids)
    entropies = generation.entropies
    ids = np.concatenate([generation.prompt_ids, generation.response_ids])
    last = int(generation.response_ids[-1]) if num_tokens else -1
    checks = (
        (num_tokens > 0 and len(generation.prompt_ids) > 0, "empty", "the prompt or the reply is empty"),
        (
            len(generation.behaviour_logprobs) == num_tokens and (entropies is None or len(entropies) == num_tokens),
            "lengths",
            f"{num_tokens} tokens, {len(generation.behaviour_logprobs)} log-probabilities",
        ),
        (len(generation.image_hashes) == len(generation.image_grids), "grids", "images and grids differ in number"),
        (bool(((ids >= 0) & (ids < policy.text_config.vocab_size)).all()), "ids", "an id is outside the vocabulary"),
        (
            bool((np.isfinite(generation.behaviour_logprobs) & (generation.behaviour_logprobs <= 1e-6)).all()),
            "logprobs",
            "a log-probability is not finite or above 0",
        ),
        (generation.fingerprint == policy.fingerprint, "fingerprint", "tokenizer, template or image processing differ"),
        (
            generation.banned_ids == policy.banned_ids and not np.isin(generation.response_ids, policy.banned_ids).any(),
            "banned_ids",
            f"the engine banned {generation.banned_ids}, this policy bans {policy.banned_ids}, or one was sampled",
        ),
        (generation.finish_reason == "length" or last in policy.end_ids, "finish_reason", f"it stopped at {last}, no end token"),
        (len(ids) <= policy.max_positions, "too_long", f"{len(ids)} tokens, at most {policy.max_positions} fit"),
    )
    for holds, reason, message in checks:
        if not holds:
            raise RowRejected(f"request {name}: {message}", reason)


def _group_images(rows: Sequence[Row], length: int) -> tuple[ImageGroup, ...]:
    distinct: dict[Grid, dict[str, EncodedImage]] = {}
    places: dict[Grid, list[tuple[str, NDArray[np.int64]]]] = {}
    for index, row in enumerate(rows):
        start = 0
        for image in row.images:
            distinct.setdefault(image.grid, {}).setdefault(image.hash, image)
            tokens = row.image_tokens_K[start : start + image.num_tokens] + index * length
            places.setdefault(image.grid, []).append((image.hash, tokens))
            start += image.num_tokens
    groups: list[ImageGroup] = []
    for grid, by_hash in distinct.items():
        order = {content_hash: number for number, content_hash in enumerate(by_hash)}
        pixels_NHWC = np.stack([image.pixels_HWC for image in by_hash.values()])
        source_M = torch.tensor([order[content_hash] for content_hash, _ in places[grid]])
        tokens_K = torch.from_numpy(np.concatenate([tokens for _, tokens in places[grid]]))
        groups.append(ImageGroup(grid, torch.from_numpy(pixels_NHWC), source_M, tokens_K))
    return tuple(groups)
