#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64

# One process on each node, which trains on all of its GPUs. srun sets SLURM_PROCID and SLURM_NTASKS in each; of
# these come the variables by which torch.distributed finds the others. For restarts, let srun start torchrun.
# The script's own arguments follow it: sbatch examples/slurm.sh examples/several_machines.py runs/digits

export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
export MASTER_PORT=${MASTER_PORT:-29400}

srun --kill-on-bad-exit=1 bash -c \
    'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec "${PYTHON:-python}" "$@"' flowdp "$@"
