"""Every error that dartrl raises on purpose.

    DartrlError
    ├── ConfigError            a recipe, option, task file or database URL is wrong; the message names the remedy
    ├── EnvironmentFault       the environment broke: outcome env_error, never a reward
    │   ├── EnvironmentTimeout an operation passed its deadline
    │   └── EnvironmentCrashed the browser, desktop or guest is gone
    ├── EvaluatorFault         the score could not be computed: outcome evaluator_error
    ├── PolicyFault            inference failed: outcome model_error
    │   ├── PolicyOverloaded   the queue is full (HTTP 429); retry later
    │   └── PolicyUnavailable  no worker answered within the deadline
    ├── LeaseLost              the caller slept through its lease; it may write nothing
    ├── LedgerConflict         the ledger refuses: the move is not in the state table, or somebody else was first
    ├── BlobCorrupt            stored bytes are missing or do not match their hash
    ├── WeightsRejected        a worker refuses weights: checksum or probe does not match
    ├── CheckpointBroken       a resumable checkpoint is damaged and no older one can stand in
    ├── RowRejected            a training row is inconsistent; counted and left out, never repaired
    └── RoleFailed             a role process cannot be kept running; the run ends and can be resumed

All of them survive pickling: the arguments are the attributes.
"""


class DartrlError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DartrlError):
    """Bad input by the user: says what, the value, what is allowed, what to do."""


class EnvironmentFault(DartrlError):
    """Infrastructure failure of an environment; `kind` is one of reset, display, guest_api, oom, timeout, network, crash."""

    def __init__(self, message: str, kind: str = "crash") -> None:
        super().__init__(message, kind)
        self.message = message
        self.kind = kind

    def __str__(self) -> str:
        return self.message


class EnvironmentTimeout(EnvironmentFault):
    """An environment operation passed its deadline."""

    def __init__(self, message: str, kind: str = "timeout") -> None:
        super().__init__(message, kind)


class EnvironmentCrashed(EnvironmentFault):
    """The browser, desktop or guest behind the environment is gone."""


class EvaluatorFault(DartrlError):
    """The score of an episode could not be computed."""


class PolicyFault(DartrlError):
    """Inference failed on the server's side."""


class PolicyOverloaded(PolicyFault):
    """The rollout service's queue is full; the caller may retry after a pause."""


class PolicyUnavailable(PolicyFault):
    """No policy worker answered within the deadline."""


class LeaseLost(DartrlError):
    """The lease expired or was fenced off; the holder must drop its work."""


class LedgerConflict(DartrlError):
    """The requested change is not allowed from the present state."""


class BlobCorrupt(DartrlError):
    """A blob is missing or its bytes do not match its content hash."""


class WeightsRejected(DartrlError):
    """Published weights fail their checksum, their fingerprint or their probes."""


class RoleFailed(DartrlError):
    """A role process cannot be kept running; the message carries its own reason."""


class CheckpointBroken(DartrlError):
    """A checkpoint's files are missing, truncated or altered; the message names file and remedy."""


class RowRejected(DartrlError):
    """A recorded step cannot be trained on; `reason` is a fixed word, counted per training step."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason)
        self.message = message
        self.reason = reason

    def __str__(self) -> str:
        return self.message
