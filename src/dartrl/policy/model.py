"""The policy: a stock Qwen2.5-VL with its tokenizer and image settings; building, loading and saving it.

Weights are held in float32; `dtype` is the type in which engine and trainer alike compute (by autocast), so that both sides
round in the same places. Nothing here needs torchvision.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dartrl.errors import ConfigError, WeightsRejected
from dartrl.policy.manifest import sync_folder

transformers.utils.logging.disable_progress_bar()

ComputeType = Literal["float32", "bfloat16"]
END_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"
IMAGE_TOKEN = "<|image_pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", IMAGE_TOKEN, "<|video_pad|>")
"""Placeholders that only the prompt may contain; banned from sampling."""
SPECIAL_TOKENS = (PAD_TOKEN, "<|im_start|>", END_TOKEN, *VISION_TOKENS)
WORD_PATTERN = r"\p{L}+|\p{N}{1,3}|\s|[^\s\p{L}\p{N}]"
"""Pieces that tokens never cross: a word has the same tokens after a space and after a quote, and 0-999 may be one token."""
CHAT_TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m['role'] + '\n' }}"
    "{%- if m['content'] is string -%}{{ m['content'] }}{%- else -%}{%- for c in m['content'] -%}"
    "{%- if c['type'] in ['image', 'image_url'] or 'image' in c -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in c -%}{{ c['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How a screenshot becomes patches; part of the fingerprint."""

    patch_size: int
    """Pixels along the side of a patch."""
    merge_size: int
    """Patches along the side of one image token."""
    temporal_patch_size: int
    """Frames per patch; a still image is repeated."""
    min_pixels: int
    """Smaller images are enlarged to about this many pixels."""
    max_pixels: int
    """Larger images are reduced to at most this many pixels."""
    resample: int
    """PIL resampling filter."""
    rescale_factor: float
    """Factor from 0-255 to the range of mean and deviation."""
    mean: tuple[float, ...]
    """Subtracted per channel."""
    std: tuple[float, ...]
    """Divided by per channel."""


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """Size of a policy built from scratch; the defaults give about 1.7 million parameters."""

    text_width: int = 128
    """Hidden size of the language model."""
    text_layers: int = 3
    """Decoder layers."""
    text_heads: int = 4
    """Query heads."""
    text_kv_heads: int = 2
    """Key and value heads."""
    text_mlp: int = 384
    """Inner size of the language model's MLP."""
    rope_theta: float = 10.0
    """Base of the rotary positions; small, because positions are pixels / 28."""
    vision_width: int = 96
    """Hidden size of the vision tower."""
    vision_layers: int = 3
    """Blocks of the vision tower."""
    vision_heads: int = 3
    """Heads of the vision tower."""
    vision_mlp: int = 288
    """Inner size of the vision tower's MLP."""
    window_pixels: int = 112
    """Side of an attention window of the blocks without full attention."""
    full_attention_layers: tuple[int, ...] | None = None
    """Vision blocks that see the whole image; None means all."""
    init_range: float = 0.08
    """Standard deviation of the initial weights."""
    max_positions: int = 2048
    """Longest prompt plus reply in tokens."""
    max_pixels: int = 28 * 28 * 400
    """Larger screenshots are reduced."""


class Policy:
    """Model, tokenizer and image settings that belong together."""

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast,
        settings: ImageSettings,
        dtype: ComputeType,
    ) -> None:
        _check_supported(model.config)
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.dtype: ComputeType = dtype
        self.fingerprint = _fingerprint(tokenizer, settings)
        present = set(tokenizer.get_vocab())
        self.banned_ids: tuple[int, ...] = tuple(sorted(_token_id(tokenizer, token) for token in VISION_TOKENS if token in present))
        self.image_token_id: int = model.config.image_token_id
        if self.image_token_id != _token_id(tokenizer, IMAGE_TOKEN):
            raise ConfigError(
                f"config.json says that image_token_id is {self.image_token_id}, but {IMAGE_TOKEN} is "
                f"{_token_id(tokenizer, IMAGE_TOKEN)} in the tokenizer; model and tokenizer do not belong together"
            )
        self.end_ids = frozenset(_end_ids(model, tokenizer))
        self.text_config: Any = model.config.text_config
        self.vision_config: Any = model.config.vision_config
        self.max_positions: int = self.text_config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.lm_head.weight.device

    def autocast(self) -> AbstractContextManager[Any]:
        """Context in which matrix products run in the policy's compute type."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16")


def build_tokenizer(corpus: Iterable[str], *, vocab_size: int, added_tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the corpus, with Qwen's special tokens and the chat template.

    vocab_size: entries in all, special and added ones included. added_tokens: whole phrases that become one ordinary token each.
    Kept as PreTrainedTokenizerFast, because Qwen2Tokenizer replaces the pre-tokenizer by its own when it is loaded again.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    words = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    encoding = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, encoding])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trained = vocab_size - len(SPECIAL_TOKENS) - len(added_tokens)
    if trained < 256:
        raise ConfigError(f"vocab_size is {vocab_size}; must be at least {256 + vocab_size - trained} to hold all bytes")
    trainer = trainers.BpeTrainer(
        vocab_size=trained, min_frequency=2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added_tokens])
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD_TOKEN, END_TOKEN)],
        clean_up_tokenization_spaces=False,
        model_max_length=PolicyShape().max_positions,
    )
    result.chat_template = CHAT_TEMPLATE
    return result


def build_policy(tokenizer: PreTrainedTokenizerFast, shape: PolicyShape, *, seed: int, dtype: ComputeType = "float32") -> Policy:
    """A policy of that shape with random weights, equal for equal seeds."""
    config = _build_config(tokenizer, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).float().eval()
    vision: Any = config.vision_config
    processor = Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        image_mean=[1.0] * 3,
        image_std=[0.25] * 3,
        size={"shortest_edge": 56 * 56, "longest_edge": shape.max_pixels},
    )
    return Policy(model, tokenizer, _settings_of(processor), dtype)


def load_policy(folder: Path, *, dtype: ComputeType = "float32") -> Policy:
    """The policy in a Hugging Face folder, on the CPU. Raises ConfigError that names the folder and the remedy."""
    model = _load_model(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} has weights but no usable tokenizer and image settings: {error}") from error
    # without its file, transformers makes up an empty tokenizer of the right class
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        raise ConfigError(f"{folder} has weights but no usable tokenizer; add tokenizer.json")
    if not tokenizer.chat_template:
        raise ConfigError(f"{folder} has no chat template; add chat_template.jinja")
    return Policy(model, tokenizer, _settings_of(processor), dtype)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write the policy as a Hugging Face folder, all of it or nothing; an existing folder is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f".{folder.name}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    policy.model.save_pretrained(unfinished)
    policy.tokenizer.save_pretrained(unfinished)
    _processor_of(policy.settings).save_pretrained(unfinished)
    for path in unfinished.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(unfinished)
    replaced = folder.parent / f".{folder.name}.old"
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(unfinished, folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def load_weights_into(policy: Policy, folder: Path) -> None:
    """Replace the policy's weights by those of the folder, in place.

    Raises WeightsRejected, with the policy unchanged, if the folder holds another model, tokenizer or image processing.
    """
    try:
        loaded = load_policy(folder, dtype=policy.dtype)
    except ConfigError as error:
        raise WeightsRejected(str(error)) from error
    require_same_kind(loaded, policy, folder)
    copy_weights(loaded.model.state_dict(), policy.model)


def require_same_kind(loaded: Policy, policy: Policy, folder: Path) -> None:
    """Raises WeightsRejected if what was loaded from the folder is another model, tokenizer or image processing."""
    if loaded.fingerprint != policy.fingerprint:
        raise WeightsRejected(
            f"{folder} has fingerprint {loaded.fingerprint[:12]}..., this policy has {policy.fingerprint[:12]}..."
        )
    shapes = [{name: tuple(value.shape) for name, value in each.model.state_dict().items()} for each in (loaded, policy)]
    if shapes[0] != shapes[1]:
        raise WeightsRejected(f"{folder} holds a model of another shape; publish weights of the policy that this worker serves")


def copy_weights(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Copy tensors of equal names and shapes into the model, in place."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(weights[name])


# --------------------------------------------------------------------------- parts


def _build_config(tokenizer: PreTrainedTokenizerFast, shape: PolicyShape) -> Qwen2_5_VLConfig:
    half_head = shape.text_width // shape.text_heads // 2
    spatial = half_head * 3 // 8
    full_layers = range(shape.vision_layers) if shape.full_attention_layers is None else shape.full_attention_layers
    ids = {
        "image_token_id": _token_id(tokenizer, IMAGE_TOKEN),
        "video_token_id": _token_id(tokenizer, "<|video_pad|>"),
        "vision_start_token_id": _token_id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": _token_id(tokenizer, "<|vision_end|>"),
    }
    text = {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "hidden_size": shape.text_width,
        "intermediate_size": shape.text_mlp,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.text_heads,
        "num_key_value_heads": shape.text_kv_heads,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": False,
        "initializer_range": shape.init_range,
        "bos_token_id": _token_id(tokenizer, PAD_TOKEN),
        "eos_token_id": _token_id(tokenizer, END_TOKEN),
        "pad_token_id": _token_id(tokenizer, PAD_TOKEN),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "mrope_section": [half_head - 2 * spatial, spatial, spatial],
        },
    }
    vision = {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_width,
        "intermediate_size": shape.vision_mlp,
        "num_heads": shape.vision_heads,
        "out_hidden_size": shape.text_width,
        "window_size": shape.window_pixels,
        "fullatt_block_indexes": list(full_layers),
        "initializer_range": shape.init_range,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        initializer_range=shape.init_range,  # pyright: ignore[reportCallIssue]
        dtype="float32",
        **ids,
    )


def _load_model(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a policy folder (no config.json); set policy.path to one, such as models/tiny")
    try:
        loaded: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be loaded as Qwen2.5-VL: {error}") from error
    model, info = loaded
    problems = {name: sorted(map(str, keys)) for name, keys in info.items() if keys and name != "error_msgs"}
    if problems:
        raise ConfigError(f"{folder} does not hold exactly the weights of its config.json: {problems}")
    return model.eval()


def _check_supported(config: Qwen2_5_VLConfig) -> None:
    text: Any = config.text_config
    if text.use_sliding_window or "sliding_attention" in text.layer_types:
        raise ConfigError(
            "the model uses sliding-window attention; only full attention is supported, set use_sliding_window to false"
        )
    if text.rope_parameters["rope_type"] not in ("default", "mrope"):
        raise ConfigError(f"the model uses rope_type {text.rope_parameters['rope_type']!r}; only default is supported")


def _settings_of(processor: Any) -> ImageSettings:
    size = processor.size
    return ImageSettings(
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        temporal_patch_size=processor.temporal_patch_size,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
        resample=int(processor.resample),
        rescale_factor=float(processor.rescale_factor),
        mean=tuple(float(value) for value in processor.image_mean),
        std=tuple(float(value) for value in processor.image_std),
    )


def _processor_of(settings: ImageSettings) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=settings.patch_size,
        merge_size=settings.merge_size,
        temporal_patch_size=settings.temporal_patch_size,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        resample=settings.resample,
        rescale_factor=settings.rescale_factor,
        image_mean=list(settings.mean),
        image_std=list(settings.std),
    )


def _fingerprint(tokenizer: PreTrainedTokenizerFast, settings: ImageSettings) -> str:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.pop("padding", None)
    state.pop("truncation", None)
    parts = {"tokenizer": state, "chat_template": tokenizer.chat_template, "images": asdict(settings)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        raise ConfigError(f"the tokenizer lacks the special token {token}; build it with build_tokenizer")
    return token_id


def _end_ids(model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    configured = model.generation_config.eos_token_id
    ids = [] if configured is None else [configured] if isinstance(configured, int) else list(configured)
    return sorted({*ids, _token_id(tokenizer, str(tokenizer.eos_token))})
