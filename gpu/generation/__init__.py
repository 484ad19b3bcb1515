"""Engines that generate tokens with exact policy versions, and the workers that drive rollouts through them."""
