"""What is true: journal, ledger, payloads and checkpoints on any store that can create exclusively."""
