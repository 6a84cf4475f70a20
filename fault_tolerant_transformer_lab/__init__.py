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
        Accumulation,
        CheckpointError,
        CheckpointMismatchError,
        Contract,
        ContractError,
        EnvironmentMismatchError,
        ModuleFlags,
        NamedGenerator,
        PlainState,
        Progress,
        RandomGenerators,
    )
    from fault_tolerant_transformer_lab.diagnosis import diagnosis_of
    from fault_tolerant_transformer_lab.equivalence import prove_restart, prove_training, run_from
    from fault_tolerant_transformer_lab.lora import (
        AdapterState,
        LoraConfig,
        adapt,
        compare_tuning,
        export_peft,
        import_peft,
        merge,
        unmerge,
    )
    from fault_tolerant_transformer_lab.publication import (
        CheckpointLockedError,
        CheckpointStore,
        NoCheckpointError,
        PublicationError,
    )
    from fault_tolerant_transformer_lab.script_proof import prove_script
    from fault_tolerant_transformer_lab.training import stop_signals, train

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
    "run_from": "equivalence",
    "diagnosis_of": "diagnosis",
    "prove_script": "script_proof",
    "stop_signals": "training",
    "Accumulation": "contract",
    "ModuleFlags": "contract",
    "PlainState": "contract",
    "AdapterState": "lora",
    "LoraConfig": "lora",
    "adapt": "lora",
    "compare_tuning": "lora",
    "export_peft": "lora",
    "import_peft": "lora",
    "merge": "lora",
    "unmerge": "lora",
}
__all__ = [
    "Accumulation",
    "AdapterState",
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
    "LoraConfig",
    "ModuleFlags",
    "NamedGenerator",
    "NoCheckpointError",
    "PlainState",
    "Progress",
    "PublicationError",
    "RandomGenerators",
    "UnknownSchemaError",
    "adapt",
    "compare_tuning",
    "diagnosis_of",
    "diff",
    "export_peft",
    "import_peft",
    "load_config",
    "merge",
    "open_checkpoint",
    "prove_restart",
    "prove_script",
    "prove_training",
    "read_manifest",
    "run_from",
    "stop_signals",
    "train",
    "unmerge",
    "verify",
]


def __getattr__(name: str) -> Any:
    # A name is fetched from its room on first use, so that reading a configuration never loads torch.
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
