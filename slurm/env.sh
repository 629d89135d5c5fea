# Settings of all batch scripts: modules, environment, MPI and network. Sourced by job.sh; adapt it to your cluster.
# Each variable with a default can also be set at submission: NETWORK=infiniband sbatch slurm/train.sbatch
# shellcheck shell=bash

: "${MODULES:=}"           # modules to load, such as "gcc openmpi cuda"; those that Horovod was built with
: "${VENV:=.venv}"         # Python environment, from `make venv` or your own; skipped if it does not exist
: "${LAUNCHER:=srun}"      # srun, mpirun or horovodrun
: "${MPI_TYPE:=pmix}"      # srun's interface to MPI (`srun --mpi=list`): pmix for Open MPI, cray_shasta for Cray MPICH
: "${NETWORK:=auto}"       # auto, infiniband, slingshot or ethernet: selects the settings below
: "${TCP_INTERFACES:=}"    # for ethernet: interfaces or networks, such as "eth0" or "10.1.0.0/16"
: "${CONTAINER:=}"         # prefix that runs a command in a container, such as "apptainer exec --nv horovod_sparse.sif"

if [ -n "$MODULES" ]; then
    # shellcheck disable=SC2086 # one word for each module
    module load $MODULES
fi
if [ -f "$VENV/bin/activate" ]; then
    # shellcheck disable=SC1091 # made by `make venv`
    source "$VENV/bin/activate"
fi

# One thread per core of the rank. Otherwise torch starts one per core of the node, on every rank.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
# Since SLURM 22.05, srun does not inherit --cpus-per-task from sbatch: every rank would be bound to one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi
# Show output in the log immediately, and print Python's stack on a crash.
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1

case $NETWORK in
    auto)
        # Open MPI chooses: UCX on InfiniBand if it was built with UCX, else libfabric, else TCP.
        ;;
    infiniband)
        # UCX only: without it the job must fail, instead of running over TCP at a tenth of the speed.
        export OMPI_MCA_pml=ucx
        # Exclude Open MPI 4's old InfiniBand transport, which warns if UCX already uses the device.
        export OMPI_MCA_btl=^openib
        # UCX finds the adapters itself. To select some, set UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1 (see `ucx_info -d`).
        ;;
    slingshot)
        # Cray MPICH and Open MPI both use HPE Slingshot 11 through libfabric's provider cxi.
        export OMPI_MCA_pml=cm OMPI_MCA_mtl=ofi FI_PROVIDER=cxi
        # Match messages in software when the adapter runs out of entries: in a sparse exchange, many ranks send to one.
        export FI_CXI_RX_MATCH_MODE=hybrid
        # The kernel reports when registered memory is freed. The other monitor intercepts the program's calls;
        # sites advise against it if several libraries communicate, such as MPI and NCCL.
        export FI_MR_CACHE_MONITOR=userfaultfd
        ;;
    ethernet)
        # TCP between nodes, shared memory within them (vader in Open MPI 4, which Open MPI 5 knows as sm).
        export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp
        # Nodes often have networks that do not reach other nodes (docker0, virbr0). Connections to them hang.
        if [ -n "$TCP_INTERFACES" ]; then
            export OMPI_MCA_btl_tcp_if_include=$TCP_INTERFACES OMPI_MCA_oob_tcp_if_include=$TCP_INTERFACES
        fi
        ;;
    *)
        echo "env.sh: NETWORK=$NETWORK is unknown; known are: auto, infiniband, slingshot, ethernet" >&2
        exit 2
        ;;
esac
