"""Tasks and worlds that rollouts act in, and the agent loop that runs them."""
