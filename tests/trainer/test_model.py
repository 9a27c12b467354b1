"""The model: its shapes, that it cannot see the future, and that it is the same every time."""

from __future__ import annotations

import pytest
import torch

from trainer.model import GPT, GPTConfig, rotary_angles, rotate

CONFIG = GPTConfig(layers=2, width=32, heads=4)


def model(seed: int = 0, config: GPTConfig = CONFIG) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def test_logits_have_one_score_per_byte_value_and_position() -> None:
    """(B, T) token ids become (B, T, 256) scores."""
    assert model()(torch.zeros(3, 7, dtype=torch.long)).shape == (3, 7, 256)


def test_a_token_sees_only_the_tokens_before_it() -> None:
    """Changing token 5 changes the scores from position 5 on and none before it."""
    net = model()
    tokens = torch.randint(256, (1, 9))
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % 256
    same = (net(tokens) == net(other)).all(dim=-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 4


def test_the_same_seed_draws_the_same_model() -> None:
    """Weights and logits repeat bit for bit; another seed gives others."""
    tokens = torch.randint(256, (2, 8))
    assert torch.equal(model(1)(tokens), model(1)(tokens))
    assert not torch.equal(model(1)(tokens), model(2)(tokens))


def test_the_table_that_reads_tokens_also_writes_them() -> None:
    """Embedding and head are one parameter."""
    net = model()
    assert net.head.weight is net.embedding.weight
    assert len(list(net.parameters())) == len({id(p) for p in net.parameters()}) == 2 * 6 + 2


def test_dropout_acts_in_training_only() -> None:
    """Two passes differ while training and agree in evaluation."""
    net = model(config=GPTConfig(layers=1, width=32, heads=4, dropout=0.5))
    tokens = torch.randint(256, (2, 8))
    assert not torch.equal(net(tokens), net(tokens))
    net.eval()
    assert torch.equal(net(tokens), net(tokens))


def test_rotation_keeps_lengths_and_knows_distances_only() -> None:
    """A rotated vector is as long as before, and a product depends on how far apart two positions are."""
    angles = rotary_angles(12, 8, device=torch.device("cpu"))
    query, key = torch.randn(1, 1, 1, 8).expand(1, 1, 12, 8), torch.randn(1, 1, 1, 8).expand(1, 1, 12, 8)
    turned_query, turned_key = rotate(query, angles), rotate(key, angles)
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1))
    products = (turned_query @ turned_key.transpose(-1, -2))[0, 0]  # (12, 12)
    torch.testing.assert_close(products.diagonal(3), products[0, 3].expand(9), rtol=1e-4, atol=1e-4)


def test_it_learns() -> None:
    """Thirty steps on one batch bring the loss from about ln 256 to below 1."""
    net = model()
    tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        logits = net(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.545, abs=0.2)
    assert losses[-1] < 1


def test_a_width_that_the_heads_cannot_share_is_refused() -> None:
    """The sentence says what would do."""
    with pytest.raises(ValueError, match="choose a multiple of 8"):
        GPTConfig(width=36, heads=4)
