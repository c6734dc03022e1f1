"""Good files and their tests; `tasks` puts one bug into a file."""
