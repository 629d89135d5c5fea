"""Process control: threads, replaced functions of other libraries, shutdown, detection of ranks that leave or stall."""
