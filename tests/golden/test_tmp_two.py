from __future__ import annotations
import ckpt, torch
from tests.ranks import run_ranks
from tests.distributed.models import build
from tests.format import spec_reader

def go(rank, world, run):
    model, opt = build("fsdp", world, width=8)
    if rank == 0: model.register_buffer("only", torch.ones(3))
    state = {"model": model}
    if False:
        state["only_rank0"] = torch.ones(3)
    ckpt.save(run, 1, state, wait=True)

def test_it(tmp_path):
    run_ranks(2, go, str(tmp_path/"run"))
    print(ckpt.verify(tmp_path/"run").problems)
    s = spec_reader.read_step(tmp_path/"run")
    assert "model.only" in s.tensors
