# Settings of every batch script: modules, environment, MPI and network. Sourced by job.sh; change it for your cluster.
# Each variable with a default can also be given from outside: NETWORK=infiniband sbatch slurm/train.sbatch
# shellcheck shell=bash

: "${MODULES:=}"           # modules to load, such as "gcc openmpi cuda"; the same as when Horovod was built
: "${VENV:=.venv}"         # the Python environment, made by `make venv` or by hand; skipped where there is none
: "${LAUNCHER:=srun}"      # srun, mpirun or horovodrun
: "${MPI_TYPE:=pmix}"      # how srun talks to MPI (`srun --mpi=list`): pmix for Open MPI, cray_shasta for Cray MPICH
: "${NETWORK:=auto}"       # auto, infiniband, slingshot, ethernet: which settings below are made
: "${TCP_INTERFACES:=}"    # of ethernet: interfaces or networks, such as "eth0" or "10.1.0.0/16"
: "${CONTAINER:=}"         # what runs a command in a container, such as "apptainer exec --nv horovod_sparse.sif"

if [ -n "$MODULES" ]; then
    # shellcheck disable=SC2086 # one word for each module
    module load $MODULES
fi
if [ -f "$VENV/bin/activate" ]; then
    # shellcheck disable=SC1091 # made by `make venv`
    source "$VENV/bin/activate"
fi

# A rank's threads: as many as it has cores. Without this torch starts as many as the node has, on every rank.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
# Since SLURM 22.05 srun no longer takes over --cpus-per-task from sbatch: every rank would be bound to one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi
# What a rank prints shows in the log at once, and a crash prints Python's stack.
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1

case $NETWORK in
    auto)
        # Open MPI chooses: UCX on InfiniBand where it was built with it, else libfabric, else TCP.
        ;;
    infiniband)
        # UCX and nothing else: without it the job must fail, not run over TCP at a tenth of the speed.
        export OMPI_MCA_pml=ucx
        # The old InfiniBand transport of Open MPI 4, which warns where it finds a device that UCX already drives.
        export OMPI_MCA_btl=^openib
        # UCX finds the cards itself. Choose some with UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1 (`ucx_info -d` lists them).
        ;;
    slingshot)
        # HPE Slingshot 11 is reached through libfabric's provider cxi, by Cray MPICH as well as by Open MPI.
        export OMPI_MCA_pml=cm OMPI_MCA_mtl=ofi FI_PROVIDER=cxi
        # Matching in software where the card runs out of entries: many ranks send to one in a sparse exchange.
        export FI_CXI_RX_MATCH_MODE=hybrid
        # The kernel reports when registered memory is freed. The other monitor intercepts the program's own calls,
        # which sites advise against where several libraries communicate, such as MPI and NCCL.
        export FI_MR_CACHE_MONITOR=userfaultfd
        ;;
    ethernet)
        # TCP between nodes, shared memory on them (its name in Open MPI 4; Open MPI 5 knows it as sm).
        export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp
        # Nodes often have networks that do not reach the others (docker0, virbr0): a connection to one of them hangs.
        if [ -n "$TCP_INTERFACES" ]; then
            export OMPI_MCA_btl_tcp_if_include=$TCP_INTERFACES OMPI_MCA_oob_tcp_if_include=$TCP_INTERFACES
        fi
        ;;
    *)
        echo "env.sh: NETWORK=$NETWORK is unknown; known are: auto, infiniband, slingshot, ethernet" >&2
        exit 2
        ;;
esac
