"""Hydra launchers of rlrecipes; installed as hydra_plugins.rlrecipes, where Hydra looks for them."""
