"""The table of rules across the fields of a recipe: one file a subject, ``table.py`` puts them together."""
