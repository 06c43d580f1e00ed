"""Tunix's GRPO with balanced mixture-of-experts layers (extra ``tunix``).

    balancer = Balancer(relibra(), parallel, num_layers=L, num_micro_batches=M, key=key, assign=None)
    actor = BalancedQwen3(qwen3.Qwen3(config, rngs=rngs), balancer.live)
    cluster = RLCluster(actor=actor, ..., cluster_config=ClusterConfig(rollout_engine=RecordingRollout, ...))
    BalancedGRPOLearner(cluster, GRPOConfig(...), reward, balancer=balancer).train(prompts)

Tunix itself is not changed. The model writes its routing into the KV cache, so Tunix's sampler records it. The learner
plans every optimizer update from the recorded routing before the first micro-batch of the update. The prepared layers
reach the jitted train step as part of the training example. This package can be imported without Tunix, but its modules
``model``, ``rollout`` and ``learner`` need it.
"""
