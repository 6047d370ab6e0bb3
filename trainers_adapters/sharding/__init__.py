"""Weights that are spread over a trainer's ranks, as one source.

    ranks.py     what the ranks tell each other: commands of rank 0, and errors, which end all of them
    gather.py    how whole parameters are had of each kind: DTensor, FSDP1, ZeRO-3, or held whole anyway
    source.py    ShardedSource: buckets of parts, gathered when rank 0 asks for them
    push.py      push_sharded: push_weights on rank 0, and the other ranks in step

Docstrings say ALL RANKS where every rank of the group has to call, RANK 0 and OTHERS where only some do.
"""
