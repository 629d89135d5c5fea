# Settings of all batch scripts: modules, Python environment, MPI, network. Sourced by job.sh; adapt it to your cluster.
# Each variable with a default can also be set at submission: NETWORK=infiniband sbatch slurm/train.sbatch
# shellcheck shell=bash

: "${MODULES:=}"           # modules to load, such as "gcc openmpi cuda"; use those that Horovod was built with
: "${VENV:=.venv}"         # Python environment, from `make venv` or your own; skipped if it does not exist
: "${LAUNCHER:=srun}"      # srun, mpirun or horovodrun
: "${MPI_TYPE:=pmix}"      # srun's interface to MPI (`srun --mpi=list`): pmix for Open MPI, cray_shasta for Cray MPICH
: "${NETWORK:=auto}"       # auto, infiniband, slingshot or ethernet: selects the settings below
: "${TCP_INTERFACES:=}"    # for ethernet: interfaces or networks, such as "eth0" or "10.1.0.0/16"
: "${CONTAINER:=}"         # prefix that runs a command in a container, such as "apptainer exec --nv horovod_sparse.sif"

if [ -n "$MODULES" ]; then
    # shellcheck disable=SC2086 # one word per module
    module load $MODULES
fi
if [ -f "$VENV/bin/activate" ]; then
    # shellcheck disable=SC1091 # created by `make venv`
    source "$VENV/bin/activate"
fi

# One thread per core of the rank, but for one that is left to the exchange. By default, torch starts one thread per
# core of the node on every rank.
cores=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 1 ? cores - 1 : 1))}"
# Since SLURM 22.05, srun does not inherit --cpus-per-task from sbatch. Without this, every rank is bound to one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi
# Do not buffer Python's output, and print Python's stack on a crash.
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1

case $NETWORK in
    auto)
        # Open MPI chooses: UCX on InfiniBand if it was built with UCX, else libfabric, else TCP.
        ;;
    infiniband)
        # Require UCX: without it, the job fails instead of running over TCP at a tenth of the speed.
        export OMPI_MCA_pml=ucx
        # Exclude Open MPI 4's legacy InfiniBand transport, which warns if UCX already uses the device.
        export OMPI_MCA_btl=^openib
        # UCX finds the adapters itself. To restrict it, set UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1 (see `ucx_info -d`).
        ;;
    slingshot)
        # Cray MPICH and Open MPI both use HPE Slingshot 11 through libfabric's provider cxi.
        export OMPI_MCA_pml=cm OMPI_MCA_mtl=ofi FI_PROVIDER=cxi
        # Match messages in software when the adapter runs out of entries: in a sparse exchange, many ranks send to one.
        export FI_CXI_RX_MATCH_MODE=hybrid
        # Let the kernel report when registered memory is freed. The alternative intercepts the program's calls; sites
        # advise against it if several libraries communicate, such as MPI and NCCL.
        export FI_MR_CACHE_MONITOR=userfaultfd
        ;;
    ethernet)
        # TCP between nodes, shared memory within a node (vader in Open MPI 4, an alias of sm in Open MPI 5).
        export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp
        # Nodes often have interfaces that do not reach other nodes (docker0, virbr0). Connections through them hang.
        if [ -n "$TCP_INTERFACES" ]; then
            export OMPI_MCA_btl_tcp_if_include=$TCP_INTERFACES OMPI_MCA_oob_tcp_if_include=$TCP_INTERFACES
            # torch's backends, which DDP uses, take names only.
            case $TCP_INTERFACES in
                */*) ;;
                *) export GLOO_SOCKET_IFNAME=$TCP_INTERFACES NCCL_SOCKET_IFNAME=$TCP_INTERFACES ;;
            esac
        fi
        ;;
    *)
        echo "env.sh: NETWORK=$NETWORK is unknown; known are: auto, infiniband, slingshot, ethernet" >&2
        exit 2
        ;;
esac
