"""External participants of a rollout: hosts that keep its sessions behind HTTP, and the protocol that saves them."""
