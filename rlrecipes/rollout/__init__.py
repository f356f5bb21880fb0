"""From prompts to scored groups to samples, over the engines' HTTP API."""
