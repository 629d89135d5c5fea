#!/bin/bash
# Starts one rank. A signal USR1 that comes before Python handles it, while it still imports, would end the rank:
# ignored signals stay ignored until the program asks for them, and job.sh repeats the signal.
trap '' USR1
exec "$@"
