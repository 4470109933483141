"""The torch side of training: one policy, its optimizer, and what one training step does to them.

Blocking and free of clocks, ledgers and files, so that equal batches in equal order give equal weights, bit for bit.
Axes: B = rows of a microbatch, T = labelled tokens of a row (padded), K = trained tokens of a training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dartrl.config import RunConfig
from dartrl.policy.forward import token_logprobs
from dartrl.policy.inputs import Row, build_row, collate
from dartrl.policy.model import Policy
from dartrl.train.batch import TrainingBatch, TrainingRow, plan_updates
from dartrl.train.diagnostics import effective_sample_size, gap_summary, staleness_summary
from dartrl.train.objective import LossParts, TokenTerms, microbatch_loss, objective_of
from dartrl.types import Generation

BETAS = (0.9, 0.99)
"""AdamW's decay rates; runs are short, so the second moment forgets faster than the usual 0.999."""

ROLES = ("fresh", "replay")

Microbatch = Sequence[TrainingRow]


class Learner:
    """Owns the weights and the optimizer of one run."""

    def __init__(self, policy: Policy, *, reference: Policy | None, config: RunConfig) -> None:
        """reference: the run's initial policy, needed if training.kl_weight is above 0."""
        training = config.training
        self.policy = policy
        self.objective = objective_of(training)
        self._reference = reference if self.objective.kl_weight else None
        self._training = training
        self._seed = config.seed
        self._temperature = config.rollout.temperature
        self._parameters: dict[str, Any] = dict(policy.model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=training.learning_rate, betas=BETAS, weight_decay=training.weight_decay
        )

    # -- rows

    def build_row(self, generation: Generation, images: Mapping[str, bytes]) -> Row:
        """The training row of a recorded reply. Raises RowRejected."""
        return build_row(self.policy, generation, images)

    def mean_entropies(self, rows: Sequence[Row]) -> list[float]:
        """Mean token entropy of each row in nats, under the present weights."""
        size = self._training.microbatch_rows
        means: list[float] = []
        with torch.no_grad():
            for at in range(0, len(rows), size):
                _, entropies_BT, mask_BT = self._score(self.policy, rows[at : at + size])
                means += (entropies_BT.double().sum(-1) / mask_BT.sum(-1)).tolist()
        return means

    # -- training

    def train(self, batch: TrainingBatch, *, step: int, version: int, is_published: bool) -> dict[str, float]:
        """Train on the batch and say how it went.

        step: 1-based index, which fixes the order of the rows. version: the newest published version. is_published: the
        weights are still that version, so rows sampled by it have lag 0. Returns metrics; without rows nothing changes.
        """
        training = self._training
        updates = plan_updates(
            batch.rows,
            minibatch_rows=training.minibatch_rows,
            microbatch_rows=training.microbatch_rows,
            seed=(self._seed, step),
        )
        record = _Record()
        proximal, reference = self._score_before(updates)
        num_tokens = sum(row.num_tokens for row in batch.rows)
        for number, update in enumerate(updates):
            num_rows = sum(len(microbatch) for microbatch in update)
            is_constant = self.objective.aggregation == "constant"
            normaliser = num_tokens / len(updates) if is_constant else float(num_rows)
            self.optimizer.zero_grad(set_to_none=True)
            for place, microbatch in enumerate(update):
                known = proximal.get((number, place)), reference.get((number, place))
                self._accumulate(microbatch, known, normaliser, record)
            self._apply(record)
        return {
            **batch.summary(),
            **record.metrics(),
            **_age_metrics(batch.rows, record, version, is_published),
            "learning_rate": training.learning_rate,
        }

    def _score_before(self, updates: Sequence[Sequence[Microbatch]]) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
        """Log-probabilities that must be known before the first update, by (update, microbatch).

        Those of the proximal policy for all updates but the first, whose own forward pass gives them; those of the initial
        policy for all.
        """
        proximal: dict[Any, Tensor] = {}
        reference: dict[Any, Tensor] = {}
        with torch.no_grad():
            for number, update in enumerate(updates):
                for place, microbatch in enumerate(update):
                    rows = [row.row for row in microbatch]
                    if number > 0:
                        proximal[number, place] = self._score(self.policy, rows)[0]
                    if self._reference is not None:
                        reference[number, place] = self._score(self._reference, rows)[0]
        return proximal, reference

    def _accumulate(
        self, microbatch: Microbatch, known: tuple[Tensor | None, Tensor | None], normaliser: float, record: _Record
    ) -> None:
        logprobs_BT, entropies_BT, mask_BT = self._score(self.policy, [row.row for row in microbatch])
        proximal_BT, reference_BT = known
        behaviour_BT = torch.zeros_like(logprobs_BT)
        behaviour = np.concatenate([row.behaviour_T for row in microbatch])
        behaviour_BT[mask_BT] = torch.as_tensor(behaviour, dtype=behaviour_BT.dtype, device=behaviour_BT.device)
        terms = TokenTerms(
            logprobs_BT=logprobs_BT,
            proximal_BT=logprobs_BT.detach() if proximal_BT is None else proximal_BT,
            behaviour_BT=behaviour_BT,
            reference_BT=reference_BT,
            mask_BT=mask_BT,
            advantages_B=torch.tensor([row.advantage for row in microbatch], dtype=logprobs_BT.dtype, device=logprobs_BT.device),
        )
        parts = microbatch_loss(self.objective, terms, normaliser=normaliser)
        parts.loss.backward()
        record.add(microbatch, terms, parts, entropies_BT.detach())

    def _apply(self, record: _Record) -> None:
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._training.max_gradient_norm))
        record.gradient_norms.append(norm)
        if np.isfinite(norm):
            self.optimizer.step()
        else:
            record.skipped_updates += 1

    def _score(self, policy: Policy, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
        return token_logprobs(policy, collate(rows), temperature=self._temperature)

    # -- state

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors as `<parameter>/<name>`."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        return {
            f"{names[parameter]}/{key}": torch.as_tensor(value)
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
        }

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue with tensors from `optimizer_state`. Raises KeyError for a parameter that the policy does not have."""
        self.optimizer.state.clear()
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            self.optimizer.state[self._parameters[name]][key] = value.clone()


def _age_metrics(rows: Sequence[TrainingRow], record: _Record, version: int, is_published: bool) -> dict[str, float]:
    ages = {role: np.array([version - row.weights_version for row in rows if row.role == role], np.int64) for role in ROLES}
    ages_K = version - record.joined("versions").astype(np.int64)
    if not is_published:
        ages_K += 1  # the weights are beyond the newest version, so nothing has lag 0
    metrics = gap_summary(record.joined("proximal"), record.joined("behaviour"), ages_K) | staleness_summary(ages["fresh"])
    if len(ages["replay"]):
        metrics["replay_age_max"] = float(ages["replay"].max())
    return metrics


@dataclass(slots=True)
class _Record:
    """What happened to the tokens of one training step."""

    tokens: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict[str, list[NDArray[np.float64]]])
    losses: list[float] = field(default_factory=list[float])
    gradient_norms: list[float] = field(default_factory=list[float])
    skipped_updates: int = 0

    def add(self, microbatch: Microbatch, terms: TokenTerms, parts: LossParts, entropies_BT: Tensor) -> None:
        versions = np.repeat([row.weights_version for row in microbatch], [row.num_tokens for row in microbatch])
        self.losses.append(float(parts.loss.detach()))
        self._append("versions", versions)
        values = {
            "proximal": terms.proximal_BT,
            "behaviour": terms.behaviour_BT,
            "entropies": entropies_BT,
            "clipped": parts.clipped_BT,
            "weights": parts.weights_BT,
        }
        if parts.divergence_BT is not None:
            values["divergence"] = parts.divergence_BT
        for name, value_BT in values.items():
            self._append(name, value_BT.detach()[terms.mask_BT].double().cpu().numpy())

    def _append(self, name: str, values_K: NDArray[Any]) -> None:
        self.tokens.setdefault(name, []).append(values_K.astype(np.float64))

    def joined(self, name: str) -> NDArray[np.float64]:
        """[K] values of that name, in training order."""
        return np.concatenate(self.tokens[name]) if name in self.tokens else np.empty(0)

    def metrics(self) -> dict[str, float]:
        metrics = {"updates": float(len(self.gradient_norms)), "skipped_updates": float(self.skipped_updates)}
        if not self.gradient_norms:
            return metrics
        log_rho_K = self.joined("proximal") - self.joined("behaviour")
        weights_K = self.joined("weights")
        metrics |= {
            "loss": sum(self.losses) / len(self.gradient_norms),
            "gradient_norm": float(np.mean(self.gradient_norms)),
            "entropy": float(self.joined("entropies").mean()),
            "clip_share": float(self.joined("clipped").mean()),
            "correction_share": float(np.mean(np.abs(weights_K / np.exp(log_rho_K) - 1.0) > 1e-4)),
            "correction_weight_mean": float(weights_K.mean()),
            "effective_sample_size": effective_sample_size(log_rho_K),
        }
        if "divergence" in self.tokens:
            metrics["kl_to_initial"] = float(self.joined("divergence").mean())
        return metrics
