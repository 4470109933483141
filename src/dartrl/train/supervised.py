"""Supervised pre-training of a small policy from nothing, in two stages, on several processes of one machine.

First text to copy, without images: exact typing takes minutes here and does not come by itself later. Then everything
together: screens with tasks, places to point at and to read, and text to copy in every batch, so that copying stays.
Matrices are trained by Muon, the rest by AdamW; gradients of all processes are averaged. Steps, not seconds, fix the result.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.random import Generator as Random
from pydantic import Field
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from dartrl.config import Section
from dartrl.interfaces import Clock
from dartrl.policy.forward import token_logprobs
from dartrl.policy.inputs import Row, collate
from dartrl.policy.model import Policy, PolicyShape, build_policy, build_tokenizer, load_policy, save_policy
from dartrl.train.muon import Muon
from dartrl.train.next_action import CopyAccuracy, next_action_accuracy
from dartrl.train.supervised_data import (
    ADDED_TOKENS,
    Collection,
    CopyLessons,
    LessonWriter,
    load_collection,
    screen_turns,
    tokenizer_corpus,
)

logger = logging.getLogger(__name__)

MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.98)
MATRIX_DECAY = 0.02
GRADIENT_NORM = 1.0
PROGRESS_FILE = "progress.jsonl"
"""A line per measurement: stage, step, seconds, loss, accuracies."""


class StageConfig(Section):
    """One stage of supervised training."""

    steps: int = Field(ge=1)
    """Optimizer steps of the learning-rate schedule."""
    stop_after: int = Field(default=0, ge=0)
    """Steps actually made; 0 means all. An early stop leaves a policy that reinforcement learning can still lift."""
    muon_learning_rate: float = Field(default=0.005, gt=0)
    """Peak learning rate of the matrices."""
    adam_learning_rate: float = Field(default=0.002, gt=0)
    """Peak learning rate of embeddings, head, biases and norms."""
    warmup_steps: int = Field(default=100, ge=1)
    """Steps of linear warm-up."""
    constant_share: float = Field(default=0.67, ge=0, le=1)
    """Share of the steps before the cosine decay."""
    final_share: float = Field(default=0.03, gt=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    text_rows: int = Field(default=10, ge=1)
    """Rows of text to copy per process and step."""
    measure_every: int = Field(default=200, ge=1)
    """Steps between two measurements."""

    @property
    def last_step(self) -> int:
        """Steps actually made."""
        return min(self.steps, self.stop_after or self.steps)


class CopyStage(StageConfig):
    """Text only."""

    steps: int = Field(default=900, ge=1)
    """Optimizer steps of the learning-rate schedule."""
    text_rows: int = Field(default=24, ge=1)
    """Rows of text to copy per process and step."""
    warmup_steps: int = Field(default=50, ge=1)
    """Steps of linear warm-up."""


class JointStage(StageConfig):
    """Screens and text."""

    steps: int = Field(default=2000, ge=1)
    """Optimizer steps of the learning-rate schedule."""
    screens: int = Field(default=10, ge=1)
    """Screens per process and step."""
    questions: int = Field(default=4, ge=0)
    """Questions about each screen beside its task."""
    first_page_share: float = Field(default=0.6, ge=0, le=1)
    """Share of synthetic pages among the screens at the first step."""
    last_page_share: float = Field(default=0.2, ge=0, le=1)
    """The same from `page_decay` on."""
    page_decay: float = Field(default=0.43, gt=0, le=1)
    """Share of the steps over which the share of synthetic pages falls."""
    keep_every: int = Field(default=200, ge=1)
    """Steps between two policies kept in the work folder."""


@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    """Everything a training process needs; sent to each of them."""

    collection: Path
    """Folder of the demonstrations."""
    pages: Path
    """Folder of the synthetic pages."""
    work_dir: Path
    """Receives the progress file and the stages."""
    copy: CopyStage
    """First stage."""
    joint: JointStage
    """Second stage."""
    seed: int
    """Root of all randomness."""
    processes: int
    """Training processes, one thread each."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the matrix products; bfloat16 is faster only on processors with instructions for it."""

    @property
    def initial(self) -> Path:
        """The untrained policy."""
        return self.work_dir / "stages" / "initial"

    def stage(self, step: int) -> Path:
        """The policy kept after that step of the joint stage."""
        return self.work_dir / "stages" / f"step-{step:05d}"


def create_initial_policy(plan: SupervisedPlan, vocabulary: int, shape: PolicyShape | None = None) -> Policy:
    """A policy with random weights and a tokenizer made for the collection, saved in the work folder."""
    states = load_collection(plan.collection).states
    corpus = tokenizer_corpus(states, np.random.default_rng(plan.seed))
    tokenizer = build_tokenizer(corpus, vocab_size=vocabulary, added_tokens=ADDED_TOKENS)
    policy = build_policy(tokenizer, shape or PolicyShape(), seed=plan.seed)
    save_policy(policy, plan.initial)
    return policy


def train_policy(plan: SupervisedPlan, clock_factory: Callable[[], Clock]) -> Path:
    """Run both stages; the folder of the last policy. `create_initial_policy` comes first.

    clock_factory: importable, called in every process. Raises what a training process raised.
    """
    (plan.work_dir / PROGRESS_FILE).unlink(missing_ok=True)
    if plan.processes == 1:
        _train_process(0, plan, clock_factory, "")
    else:
        with tempfile.TemporaryDirectory(prefix="dartrl-pretrain-") as folder:
            meeting = f"file://{folder}/meeting"
            spawn(_train_process, args=(plan, clock_factory, meeting), nprocs=plan.processes)
    return plan.stage(plan.joint.last_step)


# --------------------------------------------------------------------------- one process


def _train_process(rank: int, plan: SupervisedPlan, clock_factory: Callable[[], Clock], meeting: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    if plan.processes > 1:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=plan.processes)
    try:
        worker = SupervisedTrainer(plan, load_policy(plan.initial, dtype=plan.dtype), rank, clock_factory())
        worker.train_copying()
        worker.train_jointly()
    finally:
        if plan.processes > 1:
            dist.destroy_process_group()


class SupervisedTrainer:
    """One process's share of the training; rank 0 measures and saves."""

    def __init__(self, plan: SupervisedPlan, policy: Policy, rank: int, clock: Clock) -> None:
        self._plan = plan
        self._policy = policy
        self._rank = rank
        self._clock = clock
        self._started = clock.now()
        self._writer = LessonWriter(policy)
        self._random = np.random.default_rng([plan.seed, rank])
        self._demonstrations = load_collection(plan.collection)
        self._pages = load_collection(plan.pages)
        self._training = self._demonstrations.subset(held_out=False)
        self._held_out = self._demonstrations.subset(held_out=True)
        self._copying = CopyLessons([self._demonstrations.states[int(index)] for index in self._training])
        self._copy_accuracy = CopyAccuracy(CopyLessons([self._demonstrations.states[int(index)] for index in self._held_out]))

    def train_copying(self) -> None:
        """The first stage; the vision tower is left as it is."""
        stage = self._plan.copy
        language = [(name, value) for name, value in self._policy.model.named_parameters() if ".visual." not in name]
        self._run("copy", stage, language, lambda _: copy_rows(self._copying, self._writer, stage.text_rows, self._random))

    def train_jointly(self) -> None:
        """The second stage; keeps a policy every so many steps and at the end."""
        stage = self._plan.joint
        self._run("joint", stage, list(self._policy.model.named_parameters()), self._joint_rows)

    def _joint_rows(self, step: int) -> list[Row]:
        stage = self._plan.joint
        share = page_share(stage, step)
        rows: list[Row] = []
        for _ in range(stage.screens):
            if self._random.random() < share:
                source, index = self._pages, int(self._random.integers(len(self._pages)))
            else:
                source, index = self._demonstrations, int(self._random.choice(self._training))
            rows.append(screen_row(source, index, self._policy, self._writer, stage.questions, self._random))
        return rows + copy_rows(self._copying, self._writer, stage.text_rows, self._random)

    def _run(
        self, name: str, stage: StageConfig, parameters: Sequence[tuple[str, Tensor]], rows_of: Callable[[int], list[Row]]
    ) -> None:
        optimizers = build_optimizers(parameters, stage)
        tensors = [value for _, value in parameters]
        losses: list[float] = []
        for step in range(stage.last_step):
            share = learning_rate_share(stage, step)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * share
            losses.append(training_step(self._policy, rows_of(step), tensors, optimizers))
            is_last = step + 1 == stage.last_step
            if self._rank == 0 and ((step + 1) % stage.measure_every == 0 or is_last):
                self._measure(name, step + 1, losses)
            if self._rank == 0 and isinstance(stage, JointStage) and ((step + 1) % stage.keep_every == 0 or is_last):
                save_policy(self._policy, self._plan.stage(step + 1))

    def _measure(self, name: str, step: int, losses: list[float]) -> None:
        line: dict[str, Any] = {
            "stage": name,
            "step": step,
            "seconds": round(self._clock.now() - self._started, 1),
            "loss": round(float(np.mean(losses[-60:])), 4),
            "copy": round(self._copy_accuracy.measure(self._policy, self._writer), 3),
        }
        if name == "joint":
            families = next_action_accuracy(self._policy, self._writer, self._demonstrations, self._held_out)
            line["next_action"] = round(float(np.mean(list(families.values()))), 3)
            line["families"] = {family: round(value, 2) for family, value in families.items()}
        logger.info("pretraining %s", json.dumps(line))
        with (self._plan.work_dir / PROGRESS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


# --------------------------------------------------------------------------- parts


def copy_rows(lessons: CopyLessons, writer: LessonWriter, count: int, random: Random) -> list[Row]:
    """Rows of text to copy."""
    return [writer.row([lessons.turn(random)]) for _ in range(count)]


def screen_row(  # noqa: PLR0913 - each names one source of the row
    source: Collection, index: int, policy: Policy, writer: LessonWriter, questions: int, random: Random
) -> Row:
    """The lesson of one screen."""
    image = source.image(policy, index)
    height, width = image.pixels_HWC.shape[:2]
    turns = screen_turns(source.states[index], questions, random, (width, height))
    return writer.row(turns or [("What is here?", "nothing")], image)


def page_share(stage: JointStage, step: int) -> float:
    """Share of synthetic pages at a step: falls linearly, then stays."""
    done = min(1.0, step / (stage.steps * stage.page_decay))
    return stage.first_page_share + (stage.last_page_share - stage.first_page_share) * done


def learning_rate_share(stage: StageConfig, step: int) -> float:
    """Share of the peak at a 0-based step: linear warm-up, constant, cosine to `final_share`."""
    warm = min(1.0, (step + 1) / stage.warmup_steps)
    done = step / stage.steps
    if done < stage.constant_share or stage.constant_share == 1:
        return warm
    decay = (done - stage.constant_share) / (1 - stage.constant_share)
    return warm * (stage.final_share + (1 - stage.final_share) * 0.5 * (1 + math.cos(math.pi * decay)))


def build_optimizers(parameters: Sequence[tuple[str, Tensor]], stage: StageConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, head, kernels, biases and norms."""
    is_matrix = {name: value.ndim == 2 and "embed" not in name and "lm_head" not in name for name, value in parameters}
    matrices = [value for name, value in parameters if is_matrix[name]]
    others = [value for name, value in parameters if not is_matrix[name]]
    muon = Muon(matrices, lr=stage.muon_learning_rate, momentum=MUON_MOMENTUM, weight_decay=MATRIX_DECAY)
    adam = torch.optim.AdamW(others, lr=stage.adam_learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def training_step(
    policy: Policy, rows: Sequence[Row], parameters: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> float:
    """One update on the mean negative log-likelihood of the labelled tokens; returns it."""
    texts = [row for row in rows if not row.images]
    screens = [row for row in rows if row.images]
    total = sum(int(row.is_label_S.sum()) for row in rows)
    loss = 0.0
    for part in (screens, texts):  # apart, so that short rows are not padded to the length of long ones
        if part:
            logprobs_BT, _, mask_BT = token_logprobs(policy, collate(part))
            part_loss = -logprobs_BT[mask_BT].sum() / total
            part_loss.backward()
            loss += part_loss.item()
    average_gradients(parameters)
    torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return loss


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace each gradient by its mean over all processes; does nothing in a single process."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if not dist.is_initialized():
        return
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
        offset += parameter.numel()
