"""Adapters in the files of Hugging Face's PEFT, loaded and written by the real package; nothing is downloaded."""

import json
import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the packages are imported
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402

from fault_tolerant_transformer_lab.lora import (  # noqa: E402
    LoraConfig,
    LoraError,
    adapt,
    export_peft,
    gpt2_state,
    import_peft,
    lora_layers,
)
from fault_tolerant_transformer_lab.model import Transformer  # noqa: E402

SHAPE = {"vocab_size": 64, "block_size": 16, "d_model": 32, "n_heads": 4, "n_layers": 2}
EVERY_LINEAR = ("*.attention.*", "*.mlp.*")


@pytest.fixture(autouse=True)
def _own_generator():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        yield


def lab_model() -> Transformer:
    "The lab's model with weights that are not near zero."
    model = Transformer(**SHAPE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model


def trained(model: nn.Module) -> nn.Module:
    "Adapters with both factors away from their start."
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_A.normal_(0.0, 0.3)
            layer.lora_B.normal_(0.0, 0.3)
    return model


def gpt2_of(model: Transformer) -> "transformers.GPT2LMHeadModel":
    "A GPT-2 of Hugging Face's with the weights of a lab model."
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, activation_function="gelu", resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    missing, unexpected = gpt2.load_state_dict(gpt2_state(model), strict=False)
    assert unexpected == [] and all("attn.bias" in name or "masked_bias" in name for name in missing), missing
    return gpt2


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    "Logits of either kind of model."
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, "logits", out)


TOKENS = torch.arange(48).reshape(3, 16) % 64


def test_the_lab_model_and_gpt2_with_its_weights_compute_the_same():
    model = lab_model()
    torch.testing.assert_close(logits(gpt2_of(model), TOKENS), logits(model, TOKENS), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("targets", [LoraConfig().targets, EVERY_LINEAR])
def test_peft_loads_an_exported_adapter_onto_gpt2_and_computes_what_the_lab_computes(tmp_path, targets):
    model = lab_model()
    gpt2 = gpt2_of(model)
    plain = logits(model, TOKENS)
    adapt(model, LoraConfig(rank=3, alpha=5.0, targets=targets), seed=1)
    export_peft(trained(model), tmp_path, layout="gpt2")

    loaded = peft.PeftModel.from_pretrained(gpt2, tmp_path).eval()

    expected = logits(model, TOKENS)
    assert (expected - plain).abs().max() > 0.5  # the adapters matter
    torch.testing.assert_close(logits(loaded, TOKENS), expected, rtol=1e-5, atol=1e-4)
    adapted = {name for name, part in loaded.named_modules() if hasattr(part, "lora_A") and len(part.lora_A)}
    assert len(adapted) == len(lora_layers(model))
    # PEFT writes back what it read, tensor for tensor
    loaded.save_pretrained(tmp_path / "again")
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_peft_loads_an_adapter_onto_the_lab_model_itself_and_its_logits_are_the_same_bits(tmp_path):
    model, base = lab_model(), lab_model()
    base.load_state_dict(model.state_dict())
    adapt(model, LoraConfig(), seed=1)
    export_peft(trained(model), tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(logits(loaded, TOKENS), logits(model, TOKENS))


def test_an_adapter_that_peft_made_on_gpt2_is_taken_over_with_the_same_logits(tmp_path):
    model = lab_model()
    config = peft.LoraConfig(r=5, lora_alpha=10, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True,
                             init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(gpt2_of(model), config).eval()
    theirs.save_pretrained(tmp_path)

    found = import_peft(model, tmp_path, layout="gpt2")

    assert (found.rank, found.alpha) == (5, 10.0)
    assert set(lora_layers(model)) == {f"blocks.{i}.{part}" for i in (0, 1) for part in ("attention.qkv", "mlp.expand")}
    torch.testing.assert_close(logits(model, TOKENS), logits(theirs, TOKENS), rtol=1e-5, atol=1e-4)


def test_a_model_of_ones_own_keeps_its_names_and_peft_computes_the_same_bits(tmp_path):
    "Not this lab's model and not GPT-2: linear layers by their names, without a translation."
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    model = transformers.LlamaForCausalLM(config).eval()
    other = transformers.LlamaForCausalLM(config).eval()
    other.load_state_dict(model.state_dict())
    adapt(model, LoraConfig(rank=2, targets=("*.q_proj", "*.v_proj")), seed=1)
    export_peft(trained(model), tmp_path)
    loaded = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    assert len(lora_layers(model)) == 4
    assert torch.equal(logits(loaded, TOKENS), logits(model, TOKENS))
    again = transformers.LlamaForCausalLM(config).eval()
    again.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name})
    assert import_peft(again, tmp_path).rank == 2
    assert torch.equal(logits(again, TOKENS), logits(model, TOKENS))


def test_merging_gives_what_peft_merges(tmp_path):
    from fault_tolerant_transformer_lab.lora import merge

    model = lab_model()
    gpt2 = gpt2_of(model)
    adapt(model, LoraConfig(), seed=1)
    export_peft(trained(model), tmp_path, layout="gpt2")
    merged = peft.PeftModel.from_pretrained(gpt2, tmp_path).merge_and_unload()
    merge(model)
    theirs, ours = merged.state_dict(), gpt2_state_of_merged(model)
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-5, atol=1e-6)


def gpt2_state_of_merged(model: Transformer) -> dict[str, torch.Tensor]:
    "The merged attention weights as GPT-2's Conv1D holds them: transposed."
    return {f"transformer.h.{i}.attn.{theirs}.weight": model.blocks[i].attention.get_submodule(ours).weight.detach().t()
            for i in (0, 1) for ours, theirs in (("qkv", "c_attn"), ("projection", "c_proj"))}


@pytest.mark.parametrize("change, told", [
    ({"use_dora": True}, "use_dora"), ({"use_rslora": True}, "use_rslora"), ({"bias": "all"}, "bias"),
    ({"modules_to_save": ["ln_f"]}, "modules_to_save"), ({"rank_pattern": {"c_fc": 2}}, "rank_pattern"),
    ({"alpha_pattern": {"c_fc": 2}}, "alpha_pattern"),
])
def test_what_is_not_plain_lora_is_refused_by_name_with_the_model_unchanged(tmp_path, change, told):
    model = lab_model()
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM", **change)
    peft.get_peft_model(gpt2_of(model), config).save_pretrained(tmp_path)
    with pytest.raises(LoraError, match=f"adapter_config.json: {told}: expected"):
        import_peft(model, tmp_path, layout="gpt2")
    assert not lora_layers(model) and all(p.requires_grad for p in model.parameters())


def test_dropout_of_the_adapters_is_told_and_changes_no_logit(tmp_path):
    model = lab_model()
    config = peft.LoraConfig(r=2, lora_dropout=0.25, target_modules=["c_attn"], fan_in_fan_out=True,
                             init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(gpt2_of(model), config).eval()
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"lora_dropout 0\.25"):
        import_peft(model, tmp_path, layout="gpt2")
    torch.testing.assert_close(logits(model, TOKENS), logits(theirs, TOKENS), rtol=1e-5, atol=1e-4)


def test_every_field_that_peft_writes_is_one_that_was_judged(tmp_path):
    """A later PEFT may add a field that makes another function of the same tensors; here it would be seen."""
    from fault_tolerant_transformer_lab import lora

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    peft.get_peft_model(gpt2_of(lab_model()), config).save_pretrained(tmp_path)
    written = set(json.loads(Path(tmp_path / "adapter_config.json").read_text()))
    assert written - lora._PEFT_ELSEWHERE - set(lora._PEFT_PLAIN) == set()
