"""`python -m rlrecipes` is `rlrecipes`."""

from rlrecipes.cli.main import main

main()
