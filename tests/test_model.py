"The transformer at other shapes than the notebook's, and the faults that a recovery proof would trip over."

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fault_tolerant_transformer_lab.config import load_config
from fault_tolerant_transformer_lab.model import CausalSelfAttention, Transformer, generate, n_parameters


@pytest.fixture(autouse=True)
def global_generator_untouched():
    "Each test finds torch's global generator at one seed, and leaves it as it was before."
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2712)
        yield


shapes = st.fixed_dictionaries(
    {
        "vocab_size": st.integers(1, 20), "block_size": st.integers(1, 12), "n_heads": st.integers(1, 3),
        "width": st.integers(1, 4), "n_layers": st.integers(1, 3),
    }
)


def build(shape: dict[str, int], dropout: float = 0.0) -> Transformer:
    "The model of a drawn shape."
    d_model = shape["n_heads"] * shape["width"]
    names = ("vocab_size", "block_size", "n_heads", "n_layers")
    return Transformer(d_model=d_model, dropout=dropout, **{name: shape[name] for name in names})


@given(shapes)
@settings(max_examples=25, deadline=None)
def test_any_shape_has_the_parameters_that_the_formula_says(shape):
    model, V, T, L = build(shape), shape["vocab_size"], shape["block_size"], shape["n_layers"]
    D = shape["n_heads"] * shape["width"]
    per_block = (4 * D) + (3 * D * D + 3 * D) + (D * D + D) + (4 * D * D + 4 * D) + (4 * D * D + D)
    assert n_parameters(model) == V * D + T * D + L * per_block + 2 * D


def test_the_shipped_smoke_experiment_has_28032_parameters():
    model = Transformer.from_config(load_config("configs/smoke.json"))
    assert n_parameters(model) == 28032
    assert model.head.weight is model.token_embedding.weight


@given(shapes, st.data())
@settings(max_examples=25, deadline=None)
def test_a_changed_token_moves_no_logit_before_it(shape, data):
    model = build(shape).eval()
    T, V = shape["block_size"], shape["vocab_size"]
    t = data.draw(st.integers(0, T - 1))
    tokens_BT = torch.arange(T).unsqueeze(0) % V
    changed_BT = tokens_BT.clone()
    changed_BT[0, t:] = (changed_BT[0, t:] + 1) % V
    with torch.no_grad():
        assert torch.equal(model(tokens_BT)[:, :t], model(changed_BT)[:, :t])


def test_sequences_of_one_batch_do_not_see_each_other():
    model = Transformer(vocab_size=9, block_size=8, d_model=8, n_heads=2, n_layers=2)
    tokens_BT = torch.randint(9, (3, 8))
    changed_BT = tokens_BT.clone()
    changed_BT[1] = (changed_BT[1] + 1) % 9
    with torch.no_grad():
        before, after = model(tokens_BT), model(changed_BT)
    assert torch.equal(before[[0, 2]], after[[0, 2]]) and not torch.equal(before[1], after[1])


def test_the_whole_model_equals_one_written_without_modules():
    "An independent forward pass: explicit mask, explicit norms, plain matrices, in float64."
    V, T, D, H = 11, 6, 8, 2
    model = Transformer(vocab_size=V, block_size=T, d_model=D, n_heads=H, n_layers=2).double()
    w = model.state_dict()
    tokens_BT = torch.randint(V, (2, T))

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["token_embedding.weight"][tokens_BT] + w["position_embedding.weight"]
    for i in range(2):
        name, out = f"blocks.{i}", []
        q, k, v = linear(norm(x, f"{name}.attention_norm"), f"{name}.attention.qkv").split(D, dim=-1)
        for h in range(H):
            part = slice(h * D // H, (h + 1) * D // H)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(D // H)
            scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            out.append(torch.softmax(scores, -1) @ v[..., part])
        x = x + linear(torch.cat(out, -1), f"{name}.attention.projection")
        hidden = linear(norm(x, f"{name}.mlp_norm"), f"{name}.mlp.expand")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear(hidden, f"{name}.mlp.projection")
    expected = norm(x, "norm") @ w["token_embedding.weight"].T
    torch.testing.assert_close(model(tokens_BT), expected, rtol=0, atol=1e-12)


def test_construction_draws_from_the_global_generator_alone_and_leaves_no_value_uninitialised():
    torch.manual_seed(1)
    first = Transformer(vocab_size=7, block_size=4, d_model=8, n_heads=2, n_layers=1)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    second = Transformer(vocab_size=7, block_size=4, d_model=8, n_heads=2, n_layers=1)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
        if name.endswith("bias"):
            assert not a.any(), name


def test_residual_projections_start_narrower_by_the_number_of_branches():
    model = Transformer(vocab_size=7, block_size=4, d_model=128, n_heads=2, n_layers=8)
    wide = model.blocks[3].mlp.expand.weight.std().item()
    narrow = model.blocks[3].mlp.projection.weight.std().item()
    assert wide == pytest.approx(0.02, rel=0.05) and narrow == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize("where", ["embedding", "attention", "attention branch", "mlp branch"])
def test_dropout_works_at_each_of_its_places_in_training_mode_only(where):
    model = Transformer(vocab_size=7, block_size=8, d_model=16, n_heads=2, n_layers=1, dropout=0.5)
    for module in (model.dropout, model.blocks[0].dropout):
        module.p = 0.0
    model.blocks[0].attention.dropout = 0.0
    if where == "embedding":
        model.dropout.p = 0.5
    elif where == "attention":
        model.blocks[0].attention.dropout = 0.5
    else:
        model.blocks[0].dropout.p = 0.5
        silent = model.blocks[0].mlp if where == "attention branch" else model.blocks[0].attention
        for parameter in silent.projection.parameters():
            torch.nn.init.zeros_(parameter)
    tokens_BT = torch.randint(7, (2, 8))
    assert not torch.equal(model(tokens_BT), model(tokens_BT))
    model.eval()
    assert torch.equal(model(tokens_BT), model(tokens_BT))


def test_it_learns_a_sequence_by_heart():
    model = Transformer(vocab_size=16, block_size=16, d_model=32, n_heads=4, n_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens_BT = torch.randperm(16).unsqueeze(0)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    written = generate(model, tokens_BT[:, :1], 15, torch.Generator(), temperature=0.0)
    assert torch.equal(written, tokens_BT)


def test_generate_uses_the_given_generator_only_and_restores_modes_after_an_error():
    model = Transformer(vocab_size=16, block_size=4, d_model=8, n_heads=2, n_layers=1, dropout=0.5)
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    prompt = torch.zeros(2, 1, dtype=torch.long)
    one = generate(model, prompt, 12, torch.Generator().manual_seed(1), temperature=1.5)
    assert torch.equal(one, generate(model, prompt, 12, torch.Generator().manual_seed(1), temperature=1.5))
    assert not torch.equal(one, generate(model, prompt, 12, torch.Generator().manual_seed(2), temperature=1.5))
    with pytest.raises(IndexError):
        generate(model, prompt + 99, 1, torch.Generator())
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes


def test_generate_draws_from_the_last_window_once_the_text_outgrows_it():
    model = Transformer(vocab_size=16, block_size=4, d_model=8, n_heads=2, n_layers=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # far from the start, where every token is about as likely
        expected, generator = torch.tensor([[3, 1, 4, 1, 5, 9, 2]]), torch.Generator().manual_seed(1)
        for _ in range(20):
            scores = model(expected[:, -4:])[:, -1] / 0.7
            expected = torch.cat([expected, torch.multinomial(scores.softmax(-1), 1, generator=generator)], dim=1)
    written = generate(model, expected[:, :7], 20, torch.Generator().manual_seed(1), temperature=0.7)
    assert torch.equal(written, expected)


@pytest.mark.parametrize("temperature", [-0.1, math.inf, math.nan])
def test_generate_refuses_a_temperature_that_is_none(temperature):
    model = Transformer(vocab_size=4, block_size=4, d_model=4, n_heads=1, n_layers=1)
    with pytest.raises(ValueError, match="temperature must be finite and at least 0"):
        generate(model, torch.zeros(1, 1, dtype=torch.long), 1, torch.Generator(), temperature=temperature)


def test_heads_that_do_not_divide_the_width_and_sequences_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple of n_heads, got 10 and 4"):
        CausalSelfAttention(d_model=10, n_heads=4, dropout=0.0)
    model = Transformer(vocab_size=4, block_size=4, d_model=4, n_heads=1, n_layers=1)
    for shape in ((1, 5), (4,), (1, 0), (1, 1, 1)):
        with pytest.raises(ValueError, match=r"expected tokens of shape \(batch, 1 to 4\)"):
            model(torch.zeros(shape, dtype=torch.long))
