"""The groups a recipe is composed of, as a package for Hydra to find."""
