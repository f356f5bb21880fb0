"""What a recipe may say: the schema, its composition from YAML groups, and the errors that help."""
