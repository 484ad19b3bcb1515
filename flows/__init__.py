"""What happens, in which order: flows, run configuration, command line."""
