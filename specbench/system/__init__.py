"""What everything else may use: errors, files, paths, settings, threads and processes."""
