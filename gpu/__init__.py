"""What runs on the cluster: rollout control, environments, generation, training."""
