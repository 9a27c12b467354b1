"""The parts of the demonstration that judge: they must see a difference, and count the cost right."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import ckpt
from trainer.demo.compare import same_final_states
from trainer.demo.cost import reckon
from trainer.demo.course import Course


def test_one_bit_is_a_difference(tmp_path: Path) -> None:
    """Two runs are the same when every leaf is, to the sign of a zero."""
    for name, zero in (("a", 0.0), ("b", 0.0), ("c", -0.0)):
        ckpt.save(tmp_path / name, 1, {"w": torch.tensor([1.0, zero]), "n": [1, "x", 0.5]}, wait=True)
    assert same_final_states(tmp_path / "a", tmp_path / "b") == (True, 4)
    assert same_final_states(tmp_path / "a", tmp_path / "c") == (False, 4)


def test_the_cost_is_read_from_the_events(tmp_path: Path) -> None:
    """Steps lost, seconds from the kill to the end of the first new step, stalls of rank 0, bytes of all ranks."""
    course = Course("accident", tmp_path, steps=4, every=2)
    events = [
        {"event": "begin", "time_s": 10.0, "restored_step": None},
        {"event": "save", "time_s": 11.0, "step": 2, "stall_s": 0.5},
        {"event": "save", "time_s": 11.0, "step": 2, "stall_s": 0.9, "rank": 1},
        {"event": "commit", "time_s": 11.5, "step": 2, "nbytes": 7},
        {"event": "killed", "time_s": 12.0, "step": 3, "rank": 1},
        {"event": "step", "time_s": 12.0, "step": 3},
        {"event": "begin", "time_s": 15.0, "restored_step": 2},
        {"event": "step", "time_s": 16.5, "step": 3},
        {"event": "save", "time_s": 18.0, "step": 4, "stall_s": 0.3},
        {"event": "save", "time_s": 19.0, "step": 5, "stall_s": 0.1},
        {"event": "commit", "time_s": 19.0, "step": 4, "nbytes": 7},
        {"event": "commit", "time_s": 19.0, "step": 4, "nbytes": 8, "rank": 1},
    ]
    course.events.write_text("".join(json.dumps({"rank": 0, **event}) + "\n" for event in events))
    cost = reckon(course)
    assert (cost.killed_at, cost.restored, cost.steps_lost, cost.restart_s) == (3, 2, 1, 4.5)
    assert (cost.first_stalls_s, cost.stalls_s, cost.nbytes) == ((0.5, 0.3), (0.1,), (15,))
