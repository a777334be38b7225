"""What several tests use: small models, pairs, drafters, records, run folders, commands and a server."""
