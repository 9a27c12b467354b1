"""Random generators: each rank's own stream goes on; at another world size all are seeded by a rule."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import ckpt
from tests.state.steps import Step, part_of, save


@pytest.fixture(autouse=True)
def _leave_generators_alone():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw():
    """Numbers from each generator, an odd count of normals among them (their second half is kept for later)."""
    return (
        [random.random(), random.gauss(0, 1)],
        [*np.random.rand(3).tolist(), np.random.randn()],
        torch.rand(3).tolist() + torch.randn(3).tolist(),
        torch.nn.functional.dropout(torch.ones(8)).tolist(),
    )


def test_s28_streams_go_on():
    """What follows a load is what followed the save, after start-up code that drew numbers."""
    seed(7)
    draw()
    step = save({"rng": ckpt.RNG()})
    expected = [draw() for _ in range(3)]
    seed(99)
    draw()
    state = {"rng": ckpt.RNG()}
    step.load(state)
    assert [draw() for _ in range(3)] == expected


def test_s28_each_rank_has_its_own():
    """Ranks get their own streams back, not rank 0's."""
    parts, expected = [], []
    for rank in range(2):
        seed(1000 + rank)
        for _ in range(3 * rank):
            draw()
        parts.append(part_of({"rng": ckpt.RNG()}, rank, 2))
        expected.append(draw())
    step = Step(*parts)
    for rank in range(2):
        seed(0)
        step.load({"rng": ckpt.RNG()}, rank, 2)
        assert draw() == expected[rank]
    assert expected[0] != expected[1]


def test_s28_another_world_size_follows_the_rule():
    """The same step, rank and world give the same numbers; ranks differ, and no saved stream is repeated."""
    parts, streams = [], []
    for rank in range(2):
        seed(rank)
        parts.append(part_of({"rng": ckpt.RNG()}, rank, 2))
        streams.append(draw())

    def after(world, rank, start):
        seed(start)
        Step(*parts).load({"rng": ckpt.RNG()}, rank, world)
        return draw()

    found = {(world, rank): after(world, rank, 5) for world in (1, 3) for rank in range(world)}
    assert all(after(*key, start=6) == numbers for key, numbers in found.items())
    everything = [*map(str, found.values()), *map(str, streams)]
    assert len(set(everything)) == len(everything)


def test_generators_are_restored_last():
    """An object that draws numbers while it loads does not disturb them."""

    class Draws:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            draw()

    seed(3)
    step = save({"rng": ckpt.RNG(), "draws": Draws()})
    expected = draw()
    step.load({"rng": ckpt.RNG(), "draws": Draws()})
    assert draw() == expected


def test_other_bit_generators_of_numpy():
    """numpy's global generator may be another one than Mersenne's."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        np.random.rand(3)
        step = save({"rng": ckpt.RNG()})
        expected = np.random.rand(3).tolist()
        np.random.rand(3)
        step.load({"rng": ckpt.RNG()})
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_numpy_is_not_imported_for_it():
    """A process that has not imported numpy.random saves no state of it (torch may have imported numpy itself)."""
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch, ckpt\n"
        "state = ckpt.RNG().state_dict(); assert set(state) == {'python', 'torch'}, set(state)\n"
        "ckpt.RNG().load_state_dict(state); ckpt.RNG().load_state_dicts([state, state])\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
