"""From a checkpoint to a bundle, and the command line."""
