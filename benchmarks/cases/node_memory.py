"""Host memory of all ranks of a node together, with ``offload_param: cpu``: how often the model is in it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.case import Case, Rank
from benchmarks.figure import Aim, Figure

LAYERS = 8
HIDDEN = 768
VOCABULARY = 4096
AIM = Aim(1.3, note="one copy of the model, and what ranks need besides")


def measure(rank: Rank) -> list[Figure]:
    """Loads a checkpoint as a Trainer does, runs the model, and adds up what the ranks have grown by.

    What ranks share counts once (PSS, see proc_pid_smaps_rollup(5)), the pages of the checkpoint file not at all.
    """
    import ctypes
    import gc

    import torch
    from transformers.integrations import HfDeepSpeedConfig

    from benchmarks import workload

    checkpoint = rank.scratch_dir / "checkpoint"
    layers = rank.choose(full=LAYERS, quick=2)
    ds_config = workload.zero3_config(offload_param={"device": "cpu", "pin_memory": False})
    with workload.process_group(), torch.no_grad():
        if rank.rank == 0:
            workload.build(workload.llama(layers, HIDDEN, VOCABULARY)).save_pretrained(checkpoint)
        torch.distributed.barrier()
        # Whatever the first engine of a process takes is no part of a model.
        workload.zero3_engine(workload.build(workload.llama(1, 64)).eval(), ds_config)
        gc.collect()
        before_bytes = _anonymous_and_shared_bytes()
        alive = HfDeepSpeedConfig(ds_config)
        engine = workload.zero3_engine(workload.load(checkpoint).eval(), ds_config)
        del alive
        engine(torch.ones(1, 16, dtype=torch.long), use_cache=False)
        gc.collect()
        # What the allocator keeps of freed memory changes from run to run.
        ctypes.CDLL(None).malloc_trim(0)
        torch.distributed.barrier()
        grown = torch.tensor([float(_anonymous_and_shared_bytes() - before_bytes)])
        torch.distributed.all_reduce(grown)
        model_bytes = sum(p.ds_numel * p.element_size() for p in engine.module.parameters())
    return [Figure("all ranks together", float(grown) / model_bytes, "× model", aim=AIM)]


def _anonymous_and_shared_bytes() -> int:
    fields = ("Pss_Anon:", "Pss_Shmem:")
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(fields))


CASE = Case(
    title=f"host memory, parameters offloaded to the CPU (Llama, {LAYERS} layers, hidden {HIDDEN}, fp32, no grad)",
    measure=measure,
    world_sizes=(1, 2, 4),
)
