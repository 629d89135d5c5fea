#!/bin/bash
# Start one rank with SIGUSR1 ignored. Otherwise the signal would kill the rank if it arrived during Python's imports,
# before there is a handler. The signal stays ignored until the program sets a handler, and job.sh repeats it.
trap '' USR1
exec "$@"
