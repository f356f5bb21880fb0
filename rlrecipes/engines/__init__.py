"""The processes that serve and train, blind to each other."""
