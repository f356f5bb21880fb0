"""From prompts to rewarded groups to samples, over the engines' HTTP API."""
