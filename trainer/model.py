"""A GPT, from token ids to logits, in the order in which it computes.

Letters in the shape comments:

    B  sequences in a batch       D  numbers per head (width = H * D)
    T  tokens in a sequence       W  width of the residual stream
    H  attention heads            V  vocabulary: the 256 values of a byte

A block reads the residual stream ``x`` twice and adds to it twice::

    x = x + attention(norm(x))      tokens look at the tokens before them
    x = x + mlp(norm(x))            every token is thought about alone

Positions enter through rotary embedding: queries and keys are turned by angles that grow with the
position, so that their product depends on how far apart two tokens are, and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

__all__ = ["GPT", "Attention", "Block", "GPTConfig", "rotary_angles", "rotate"]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. ``width`` is divided evenly among ``heads``."""

    layers: int = 4
    width: int = 192
    heads: int = 6
    vocabulary: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} cannot be divided among {self.heads} heads of an even size: "
                f"choose a multiple of {2 * self.heads}"
            )


def rotary_angles(sequence: int, head: int, *, device: torch.device) -> Tensor:
    """How far each pair of a head's numbers is turned at each position: angles (T, D/2), in radians.

    The first pair turns by one radian per token, the last by about one in ten thousand: fast hands
    tell near positions apart, slow hands far ones.
    """
    speeds = 10_000.0 ** (-torch.arange(0, head, 2, device=device, dtype=torch.float32) / head)  # (D/2,)
    positions = torch.arange(sequence, device=device, dtype=torch.float32)  # (T,)
    return torch.outer(positions, speeds)  # (T, D/2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn ``x`` (B, H, T, D) by ``angles`` (T, D/2): number i pairs with number i + D/2."""
    cos, sin = angles.cos(), angles.sin()  # (T, D/2)
    first, second = x.float().chunk(2, dim=-1)  # (B, H, T, D/2) each; float: bf16 angles are too coarse
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)  # (B, H, T, D)
    return turned.type_as(x)


class Attention(nn.Module):
    """Causal self-attention: every token gathers what it needs from itself and the tokens before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """The stream (B, T, W) to what each token gathered, (B, T, W); ``angles`` (T, D/2) turn the heads."""
        B, T, W = x.shape
        qkv = self.qkv(x)  # (B, T, 3W)
        q, k, v = qkv.view(B, T, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        q, k = rotate(q, angles), rotate(k, angles)
        y = scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, W)
        out: Tensor = self.out(y)  # (B, T, W)
        return out


class MLP(nn.Module):
    """Two layers with a bend between them, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream (B, T, W) to what each token makes of it alone, (B, T, W)."""
        hidden = gelu(self.up(x))  # (B, T, 4W)
        out: Tensor = self.down(hidden)  # (B, T, W)
        return out


class Block(nn.Module):
    """Attention and MLP, each reading the normalised stream and adding to the stream itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """The stream (B, T, W) before the block to the stream after it, (B, T, W)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), angles))  # (B, T, W)
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))  # (B, T, W)
        return out


class GPT(nn.Module):
    """Embed, run the blocks, and score every token of the vocabulary as the next one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied: one table both reads tokens and writes them
        self.initialise()

    def initialise(self) -> None:
        """Draw the weights: sigma 0.02, and less where every layer adds to the residual stream.

        There are two additions per layer, so dividing by sqrt(2 * layers) keeps the stream's size
        the same however deep the model is.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # the norms start at one
            adds_to_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
            sigma = 0.02 / (2 * self.config.layers) ** 0.5 if adds_to_stream else 0.02
            nn.init.normal_(parameter, std=sigma)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) to logits (B, T, V): position t scores the token that follows it."""
        x = self.dropout(self.embedding(tokens))  # (B, T, W)
        angles = rotary_angles(tokens.shape[1], self.config.width // self.config.heads, device=x.device)  # (T, D/2)
        for block in self.blocks:
            x = block(x, angles)  # (B, T, W)
        logits: Tensor = self.head(self.norm(x))  # (B, T, V)
        return logits
