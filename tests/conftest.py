"""Settings of the whole suite and the small random policy that many tests share.

Hypothesis runs without deadlines (the machine may be busy) and with fixed seeds. Torch gets one thread: on a busy machine
spinning threads make small matrix products a hundred times slower.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dartrl.policy.model import Policy

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("dartrl", deadline=None, derandomize=True)
settings.load_profile("dartrl")

CORPUS = ("Click the button labelled ok.", "Copy the word tree into the field and press submit.", "click(start_box='(12,87)')")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 512 entries."""
    from dartrl.policy.model import build_tokenizer

    return build_tokenizer(CORPUS * 4, vocab_size=512, added_tokens=["\nAction: "])


@pytest.fixture(scope="session")
def tiny_policy_folder(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved policy with random weights; do not write into it."""
    from dartrl.policy.model import PolicyShape, build_policy, save_policy

    folder = tmp_path_factory.mktemp("policy") / "tiny"
    save_policy(build_policy(tiny_tokenizer, PolicyShape(vision_layers=2, text_layers=2), seed=0), folder)
    return folder


@pytest.fixture
def tiny_policy(tiny_policy_folder: Path) -> Policy:
    """A policy with random weights, freshly loaded, so a test may train it."""
    from dartrl.policy.model import load_policy

    return load_policy(tiny_policy_folder)
