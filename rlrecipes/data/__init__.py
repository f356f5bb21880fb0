"""Where prompts come from and where groups wait; everything here can be checkpointed."""
