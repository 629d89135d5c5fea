# Shared code of the batch scripts: starting ranks and handling preemption. Source it in the repository's folder.
# shellcheck shell=bash

# Set the traps before anything else: without them, the signals end the script.
preempted='' terminated=''
trap 'preempted=1' USR1
trap 'terminated=1' TERM

# shellcheck source=slurm/env.sh
source slurm/env.sh

# The tasks of an array share SLURM_ARRAY_JOB_ID, which is also the SLURM_JOB_ID of one of them.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

# launch COMMAND...: run the command as one rank per task of the job.
launch() {
    # shellcheck disable=SC2086 # CONTAINER may be several words
    set -- bash slurm/rank.sh $CONTAINER "$@"
    case $LAUNCHER in
        # A failing rank ends all ranks. By default, srun leaves the others waiting for it. A job that was submitted with
        # --export=NONE would start them without the environment that env.sh has set up.
        srun) srun --export=ALL --mpi="$MPI_TYPE" --kill-on-bad-exit=1 "$@" ;;
        # Do not bind ranks to single cores: torch and the exchange use additional threads.
        mpirun) mpirun -np "$SLURM_NTASKS" --bind-to none --map-by slot "$@" ;;
        horovodrun) horovodrun -np "$SLURM_NTASKS" -H "$(hosts)" "$@" ;;
        *) echo "job.sh: LAUNCHER=$LAUNCHER is unknown; known are: srun, mpirun, horovodrun" >&2 && return 2 ;;
    esac
}

# hosts: print the job's nodes in horovodrun's format, with one slot per task: node1:4,node2:4
hosts() {
    if [ "$SLURM_JOB_NUM_NODES" = 1 ]; then
        echo "localhost:$SLURM_NTASKS"
    else
        scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/:${SLURM_NTASKS_PER_NODE:?}/" | paste -sd ,
    fi
}

# preemptible COMMAND...: run a training that saves and exits on SIGUSR1 or SIGTERM; requeue the job after a preemption.
# Restart a failed training in the same job, up to RETRIES times (0) within an hour.
preemptible() {
    local failures=0
    until attempt "$@"; do
        failures=$((failures + 1))
        if [ $((SECONDS - started)) -gt 3600 ]; then
            failures=1  # what came before is long ago
        fi
        if [ "$failures" -gt "${RETRIES:-0}" ]; then
            exit "$status"
        fi
        echo "job $job: starting the training again ($failures of $RETRIES)" >&2
        sleep 10 &
        wait $! || true
        note_preemption
        if [ -n "$terminated" ] && [ -z "$preempted" ]; then
            exit 143
        fi
    done
}

# attempt COMMAND...: run a training once; its status is in the variable, too.
attempt() {
    local training
    status=0 started=$SECONDS
    (trap '' USR1 && launch "$@") &  # ignored, as it would kill a launcher without a handler
    training=$!
    while kill -0 "$training" 2>/dev/null; do
        note_preemption
        if [ -n "$preempted" ]; then
            signal_ranks || true  # repeated, as ranks ignore it during imports
        fi
        sleep 5 &
        wait -n "$training" $! || true  # returns immediately on a trapped signal
    done
    wait "$training" || status=$?
    note_preemption
    # hvs.checkpoint.Training ends with 75 if something else than this script has notified its ranks.
    if [ -n "$preempted" ] || { [ "$status" = 75 ] && [ -z "$terminated" ]; }; then
        # Requeue regardless of the status: a rank that does not ignore the signal yet is killed by it.
        echo "job $job: preempted (status $status), requeuing"
        # SLURM itself does not requeue a job that ends within its grace time.
        scontrol requeue "$job" || exit 1
        exit 0
    fi
    if [ -n "$terminated" ]; then
        exit 143  # cancelled, or time limit reached
    fi
    if [ "$status" != 0 ]; then
        echo "job $job: training exited with status $status" >&2
    fi
    return "$status"
}

# note_preemption: without preempt_send_user_signal, a preemption sends SIGTERM, as scancel does. PreemptTime
# distinguishes them.
note_preemption() {
    if [[ -n $terminated && $(scontrol show job "$job") =~ \ PreemptTime=[0-9] ]]; then
        preempted=1
    fi
}

# signal_ranks: send SIGUSR1 to every rank.
signal_ranks() {
    case $LAUNCHER in
        srun) scancel --signal=USR1 "$job" ;;
        # mpirun (Open MPI 5: prterun) forwards it to the ranks. horovodrun replaces itself with mpirun.
        *) pkill -USR1 --session 0 --full '^(/.*/)?(mpirun|prterun) ' ;;
    esac
}

# train COMPRESSION OUTPUT: run examples/train.py with the variables of the calling script.
train() {
    # shellcheck disable=SC2086 # ARGUMENTS may be several words
    preemptible python examples/train.py \
        --data "$DATA" --model "$MODEL" --device "$DEVICE" --compression "$1" \
        --epochs "$EPOCHS" --batch-size "$BATCH_SIZE" --lr "$LR" --output "$2" \
        --checkpoint "$2/checkpoints" --checkpoint-every "$CHECKPOINT_EVERY" $ARGUMENTS
}
