#!/usr/bin/env bash
# Trains the same model on scikit-learn's digits with 4 ranks, dense and sparse, and compares the two runs.
# Usage: tools/demo.sh [FOLDER]      (runs/demo)
set -euo pipefail

folder=${1:-runs/demo}
ranks=4

# Four ranks share whatever cores there are: waiting must yield them, and one thread per rank is enough.
export OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

train() {  # NAME SPEC
    printf '\n== %s: --compression %s, %s ranks\n' "$1" "$2" "$ranks"
    horovodrun -np "$ranks" --mpi-args="--oversubscribe" \
        python examples/train.py --data digits --model cnn --compression "$2" --output "$folder/$1"
}

train dense none
train sparse topka:density=0.01
horovod-sparse report "$folder/dense" "$folder/sparse" --output "$folder"
