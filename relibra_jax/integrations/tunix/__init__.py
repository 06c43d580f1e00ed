"""Tunix's GRPO with balanced mixture-of-experts layers: ``model``, ``rollout``, ``learner`` (extra ``tunix``).

    balancer = Balancer(relibra(), topology, mesh=mesh, num_layers=L, num_micro_batches=M, key=key, assign=None)
    actor = BalancedQwen3(qwen3.Qwen3(config, rngs=rngs), balancer.live)
    cluster = RLCluster(actor=actor, ..., cluster_config=ClusterConfig(rollout_engine=RecordingRollout, ...))
    BalancedGRPOLearner(cluster, GRPOConfig(...), reward, balancer=balancer).train(prompts)

Tunix's own lines stay as they are. Its sampler records the routing, because the model writes it into the KV cache;
every optimizer update is planned from that before its first micro-batch; what the layers follow reaches the jitted
train step as a part of the training example. Importing this package needs no Tunix, and importing those three
modules does.
"""
