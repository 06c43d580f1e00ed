"""Plans in other trainers and engines, with one module or folder for each.

===================  ================================================================================================
`engine_placements`  placements as the arrays of EPLB, vLLM and SGLang
`expert_order`       a plan's homes as the order of experts in a trainer without slots
`maxtext`            experts of MaxText in that order
`megatron`           experts of Megatron-style PyTorch trainers in that order
`tunix`              balanced layers under Tunix's GRPO (extra ``tunix``)
===================  ================================================================================================

Each module is imported by its own name, because each needs other packages.
"""

__all__ = ["engine_placements", "expert_order", "maxtext", "megatron", "tunix"]
