"""What everything else may use: errors, files, paths, secrets, settings, threads and processes."""
