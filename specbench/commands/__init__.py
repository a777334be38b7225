"""What a person types: `run`, `sweep`, `tune`, `log`, `fetch`, and the console command that names them."""
