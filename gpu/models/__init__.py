"""Llama-family models, their tokenizers, and where their weights come from."""
