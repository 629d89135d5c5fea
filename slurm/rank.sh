#!/bin/bash
# Start one rank with SIGUSR1 ignored until the program sets a handler. Otherwise, a signal that arrives during Python's
# imports would kill the rank. job.sh repeats the signal.
trap '' USR1
exec "$@"
