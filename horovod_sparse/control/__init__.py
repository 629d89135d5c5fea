"""Process control: background threads, patched library functions, shutdown, detection of ranks that leave or stall."""
