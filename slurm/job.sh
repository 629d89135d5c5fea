# What the batch scripts share: starting ranks, and being preempted. Sourced in the repository's folder.
# shellcheck shell=bash

# Before anything else: until then the signals would end the script.
preempted='' terminated=''
trap 'preempted=1' USR1
trap 'terminated=1' TERM

# shellcheck source=slurm/env.sh
source slurm/env.sh

# The tasks of an array share SLURM_ARRAY_JOB_ID, which is also the SLURM_JOB_ID of one of them.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

# launch COMMAND...: runs it as one rank for each task of the job.
launch() {
    # shellcheck disable=SC2086 # CONTAINER is several words
    set -- bash slurm/rank.sh $CONTAINER "$@"
    case $LAUNCHER in
        # One rank that fails ends the others. By default srun lets them wait for it.
        srun) srun --mpi="$MPI_TYPE" --kill-on-bad-exit=1 "$@" ;;
        # Not bound to single cores: torch and the exchange have threads of their own.
        mpirun) mpirun -np "$SLURM_NTASKS" --bind-to none --map-by slot "$@" ;;
        horovodrun) horovodrun -np "$SLURM_NTASKS" -H "$(hosts)" "$@" ;;
        *) echo "job.sh: LAUNCHER=$LAUNCHER is unknown; known are: srun, mpirun, horovodrun" >&2 && return 2 ;;
    esac
}

# hosts: the job's nodes as horovodrun wants them, with as many slots on each as it has tasks: node1:4,node2:4
hosts() {
    if [ "$SLURM_JOB_NUM_NODES" = 1 ]; then
        echo "localhost:$SLURM_NTASKS"
    else
        scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/:${SLURM_NTASKS_PER_NODE:?}/" | paste -sd ,
    fi
}

# preemptible COMMAND...: a training that saves and ends on SIGUSR1 and SIGTERM; then requeues the job.
preemptible() {
    local training status=0
    (trap '' USR1 && launch "$@") &  # a launcher that has not set up its handler yet must survive the signal
    training=$!
    while kill -0 "$training" 2>/dev/null; do
        # A cluster that does not announce a preemption by the script's signal sends it SIGTERM, as scancel does.
        if [[ -n $terminated && $(scontrol show job "$job") =~ \ PreemptTime=[0-9] ]]; then
            preempted=1
        fi
        if [ -n "$preempted" ]; then
            signal_ranks || true  # again and again: a rank that still imports does not hear it yet
        fi
        sleep 5 &
        wait -n "$training" $! || true  # the trap ends the wait at once
    done
    wait "$training" || status=$?
    if [ -n "$preempted" ]; then
        # Whatever the status: a rank that the signal found before it could ignore it has been ended by it.
        echo "job $job: preempted (status $status), goes back into the queue"
        # SLURM does not requeue by itself a job that ends in its time of grace.
        scontrol requeue "$job"
        exit 0
    fi
    if [ -n "$terminated" ]; then
        exit 143  # cancelled, or at the time limit
    fi
    if [ "$status" != 0 ]; then
        echo "job $job: the training ended with status $status" >&2
        exit "$status"
    fi
}

# signal_ranks: SIGUSR1 to every rank.
signal_ranks() {
    case $LAUNCHER in
        srun) scancel --signal=USR1 "$job" ;;
        # mpirun (in Open MPI 5: prterun) passes it on to its ranks. horovodrun has become an mpirun by then.
        *) pkill -USR1 --session 0 --full '^(/.*/)?(mpirun|prterun) ' ;;
    esac
}

# train COMPRESSION OUTPUT: one training by examples/train.py, with what the script that calls it has set.
train() {
    # shellcheck disable=SC2086 # ARGUMENTS are several words
    preemptible python examples/train.py \
        --data "$DATA" --model "$MODEL" --device "$DEVICE" --compression "$1" \
        --epochs "$EPOCHS" --batch-size "$BATCH_SIZE" --lr "$LR" --output "$2" \
        --checkpoint "$2/checkpoints" --checkpoint-every "$CHECKPOINT_EVERY" $ARGUMENTS
}
