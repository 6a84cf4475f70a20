"""A training run that is killed anywhere and continues as the same experiment, with the proof bit for bit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fault_tolerant_transformer_lab.checkpoint_file import (
        CheckpointCorruptError,
        UnknownSchemaError,
        diff,
        open_checkpoint,
        read_manifest,
        verify,
    )
    from fault_tolerant_transformer_lab.config import ConfigError, ExperimentConfig, load_config
    from fault_tolerant_transformer_lab.contract import (
        CheckpointError,
        CheckpointMismatchError,
        Contract,
        ContractError,
        EnvironmentMismatchError,
        NamedGenerator,
        Progress,
        RandomGenerators,
    )
    from fault_tolerant_transformer_lab.equivalence import prove_restart, prove_training
    from fault_tolerant_transformer_lab.publication import (
        CheckpointLockedError,
        CheckpointStore,
        NoCheckpointError,
        PublicationError,
    )
    from fault_tolerant_transformer_lab.training import train

_ROOM_OF = {
    "ConfigError": "config",
    "ExperimentConfig": "config",
    "load_config": "config",
    "CheckpointError": "contract",
    "CheckpointMismatchError": "contract",
    "Contract": "contract",
    "ContractError": "contract",
    "EnvironmentMismatchError": "contract",
    "NamedGenerator": "contract",
    "Progress": "contract",
    "RandomGenerators": "contract",
    "CheckpointCorruptError": "checkpoint_file",
    "UnknownSchemaError": "checkpoint_file",
    "diff": "checkpoint_file",
    "open_checkpoint": "checkpoint_file",
    "read_manifest": "checkpoint_file",
    "verify": "checkpoint_file",
    "CheckpointLockedError": "publication",
    "CheckpointStore": "publication",
    "NoCheckpointError": "publication",
    "PublicationError": "publication",
    "train": "training",
    "prove_restart": "equivalence",
    "prove_training": "equivalence",
}
__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointLockedError",
    "CheckpointMismatchError",
    "CheckpointStore",
    "ConfigError",
    "Contract",
    "ContractError",
    "EnvironmentMismatchError",
    "ExperimentConfig",
    "NamedGenerator",
    "NoCheckpointError",
    "Progress",
    "PublicationError",
    "RandomGenerators",
    "UnknownSchemaError",
    "diff",
    "load_config",
    "open_checkpoint",
    "prove_restart",
    "prove_training",
    "read_manifest",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    # A name is fetched from its room on first use, so that reading a configuration never loads torch.
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
