"""The optimizer step: advantages, loss, packing, and the trainer whose steps are compare-and-set."""
